// launch(kernel, config, args...): how every kernel is started, on a GPU and in the emulator alike. Never <<<>>>.
// Returns the error of the launch; nothing is allocated and nothing waits, so it may be captured into a graph.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <utility>
#include <vector>

namespace infinilm::cuda {

struct LaunchConfig {
    dim3 grid;
    dim3 block;
    size_t smem_bytes = 0;  // dynamic shared memory
    cudaStream_t stream = nullptr;
    dim3 cluster = {1, 1, 1};  // blocks of a cluster (sm_90); divides the grid
    // Programmatic dependent launch (sm_90): the kernel may start before its predecessor in the stream has ended, and
    // must call grid_dependency_wait() (ptx.cuh) before it reads what that wrote or writes what that reads.
    bool dependent = false;
};

// Above 48 KiB a kernel must be told how much dynamic shared memory it may get: once per kernel and device, since the
// call costs about a microsecond. The table is short; launches that need no opt-in never look at it.
inline cudaError_t allow_shared_memory(const void* kernel, size_t bytes) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    struct Entry {
        const void* kernel;
        int device;
        size_t bytes;
    };
    static std::mutex mutex;
    static std::vector<Entry> allowed;
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    std::lock_guard<std::mutex> lock(mutex);
    for (Entry& entry : allowed) {
        if (entry.kernel != kernel || entry.device != device) continue;
        if (entry.bytes >= bytes) return cudaSuccess;
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
        if (error == cudaSuccess) entry.bytes = bytes;
        return error;
    }
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error == cudaSuccess) allowed.push_back({kernel, device, bytes});
    return error;
}

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), const LaunchConfig& config, A&&... args) {
    static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter of the kernel");
    if (cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), config.smem_bytes)) return error;
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
        cudaLaunchAttribute& cluster = attributes[count++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = config.cluster.x;
        cluster.val.clusterDim.y = config.cluster.y;
        cluster.val.clusterDim.z = config.cluster.z;
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

}  // namespace infinilm::cuda
