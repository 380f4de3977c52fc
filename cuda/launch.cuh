// launch<kernel>(config, args...): how every kernel is started, on a GPU and in the emulator alike. Never <<<>>>.
// Returns the error of the launch; nothing is allocated and nothing waits, so it may be captured into a graph. That
// holds once load_kernels() has run on the device (kernel_list.h): the kernel is a template argument so that whatever
// is launched anywhere is in its list.
//
// On sm_90 and later a kernel is started before the one in front has ended, so that a step of many small kernels does
// not wait for each start: every kernel begins with begin_kernel() (ptx.cuh) or grid_dependency_wait(), before which it
// may do what needs no earlier output.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "kernel_list.h"

namespace infinilm::cuda {

struct LaunchConfig {
    dim3 grid;
    dim3 block;
    size_t smem_bytes = 0;  // dynamic shared memory
    cudaStream_t stream = nullptr;
    // Starts when all before it has ended, so that kernels behind it find what was written before it even before they
    // wait: the block table, which the first kernel of a step brings up to date.
    bool in_order = false;
    unsigned cluster = 1;  // blocks of a cluster (sm_90), neighbours in x; divides the grid
};

template <auto kernel>
struct ListedKernel {
    static inline const bool entered = (kernel_list().push_back(reinterpret_cast<const void*>(kernel)), true);
};

// Whether a kernel may be launched while the one in front still runs: programmatic dependent launch, from sm_90 on.
// Asked each time: the driver answers from a table.
inline cudaError_t has_dependent_launch(bool& has) {
    int device = 0, major = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    has = major >= 9;
    return error;
}

template <class... P, class... A>
cudaError_t launch_listed(void (*kernel)(P...), const LaunchConfig& config, A&&... args) {
    static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter of the kernel");
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    bool dependent = false;
    if (cudaError_t error = has_dependent_launch(dependent)) return error;
    if (dependent && !config.in_order) {
        cudaLaunchAttribute& attribute = attributes[count++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (config.cluster > 1) {
        cudaLaunchAttribute& attribute = attributes[count++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = config.cluster;
        attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    // gridDim, blockDim, ..: not by name, as blockDim is a macro in the emulator.
    const cudaLaunchConfig_t c{config.grid, config.block, config.smem_bytes, config.stream, attributes, count};
    return cudaLaunchKernelEx(&c, kernel, static_cast<P>(std::forward<A>(args))...);
}

template <auto kernel, class... A>
cudaError_t launch(const LaunchConfig& config, A&&... args) {
    static_cast<void>(&ListedKernel<kernel>::entered);  // a use, by which it is there
    return launch_listed(kernel, config, std::forward<A>(args)...);
}

// Blocks for a loop over `count` by that many threads each: enough to fill a GPU, few enough for the limit of a grid.
inline dim3 loop_grid(int64_t count, int threads) {
    const int64_t blocks = (count + threads - 1) / threads;
    return dim3(static_cast<unsigned>(blocks < 16384 ? blocks : 16384));
}

}  // namespace infinilm::cuda
