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

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "cuda/core/kernel_list.h"

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
    // All blocks run at one time, so that they may wait for each other; an error where the device has no room for that.
    bool cooperative = false;
};

template <auto kernel>
struct ListedKernel {
    static inline const bool entered = (kernel_list().push_back(reinterpret_cast<const void*>(kernel)), true);
};

// Asks the driver about the current device every time: it answers from a table, in well under a microsecond.
inline cudaError_t device_attribute(int& value, cudaDeviceAttr attribute) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    return cudaDeviceGetAttribute(&value, attribute, device);
}
inline cudaError_t device_sms(int& num_sms) { return device_attribute(num_sms, cudaDevAttrMultiProcessorCount); }

// What a block of a kernel may have on every device: 99 KiB on sm_86, sm_89 and sm_120. Declared variables take the
// first KiB, where there are any, as dynamic shared memory begins at a multiple of it (device.cuh).
constexpr size_t declared_shared_bytes = 1024;
constexpr bool fits_any_device(size_t dynamic_bytes) { return dynamic_bytes + declared_shared_bytes <= 99 * 1024; }
// The same of the current device.
inline cudaError_t fits_device(bool& fits, size_t dynamic_bytes) {
    int most = 0;
    const cudaError_t error = device_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    fits = dynamic_bytes + declared_shared_bytes <= static_cast<size_t>(most);
    return error;
}

template <class... P, class... A>
cudaError_t launch_listed(void (*kernel)(P...), const LaunchConfig& config, A&&... args) {
    static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter of the kernel");
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (config.cooperative) {
        cudaLaunchAttribute& attribute = attributes[count++];
        attribute.id = cudaLaunchAttributeCooperative;
        attribute.val.cooperative = 1;
    }
    int major = 0;
    if (cudaError_t error = device_attribute(major, cudaDevAttrComputeCapabilityMajor)) return error;
    if (major >= 9 && !config.in_order && !config.cooperative) {  // programmatic dependent launch: from sm_90 on
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

// How many clusters of such a launch run at a time. A cluster's blocks lie in one group of SMs (GPC), and these groups
// differ in size from one GPU to the next, so that some SMs may be left over. The driver's answer is kept.
template <auto kernel>
cudaError_t max_clusters(const LaunchConfig& config, int& count) {
    static std::array<std::array<std::atomic<int>, 9>, 64> kept;  // by device and cluster
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    std::atomic<int>& known = kept[static_cast<size_t>(device) % 64][config.cluster];
    count = known.load(std::memory_order_relaxed);
    if (count > 0) return cudaSuccess;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = config.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    const cudaLaunchConfig_t c{dim3(config.cluster), config.block, config.smem_bytes, config.stream, &attribute, 1};
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &c)) return error;
    if (count == 0) return cudaErrorInvalidConfiguration;
#ifndef INFINILM_CUDA_EMULATOR  // where the device changes
    known.store(count, std::memory_order_relaxed);
#endif
    return cudaSuccess;
}

// Blocks for a loop over `count` by that many threads each: enough to fill a GPU, few enough for the limit of a grid.
inline dim3 loop_grid(int64_t count, int threads) {
    const int64_t blocks = (count + threads - 1) / threads;
    return dim3(static_cast<unsigned>(blocks < 16384 ? blocks : 16384));
}

}  // namespace infinilm::cuda
