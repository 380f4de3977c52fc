// launch<kernel>(config, args...): how every kernel is started, on a GPU and in the emulator alike. Never <<<>>>.
// Returns the error of the launch; nothing is allocated and nothing waits, so it may be captured into a graph. That
// holds once load_kernels() has run on the device (kernel_list.h): the kernel is a template argument so that whatever
// is launched anywhere is in its list.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "kernel_list.h"

namespace infinilm::cuda {

struct LaunchConfig {
    dim3 grid;
    dim3 block;
    size_t smem_bytes = 0;  // dynamic shared memory
    cudaStream_t stream = nullptr;
    // Programmatic dependent launch (sm_90): the kernel may start before its predecessor in the stream has ended, and
    // must call grid_dependency_wait() (ptx.cuh) before it reads what that wrote or writes what that reads.
    bool dependent = false;
    unsigned cluster = 1;  // blocks of a cluster (sm_90), neighbours in x; divides the grid
};

template <auto kernel>
struct ListedKernel {
    static inline const bool entered = (kernel_list().push_back(reinterpret_cast<const void*>(kernel)), true);
};

template <class... P, class... A>
cudaError_t launch_listed(void (*kernel)(P...), const LaunchConfig& config, A&&... args) {
    static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter of the kernel");
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (config.cluster > 1) {
        cudaLaunchAttribute& cluster = attributes[count++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = config.cluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    if (config.dependent) {
        cudaLaunchAttribute& dependent = attributes[count++];
        dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        dependent.val.programmaticStreamSerializationAllowed = 1;
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

}  // namespace infinilm::cuda
