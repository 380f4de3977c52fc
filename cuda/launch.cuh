// launch<kernel>(config, args...): how every kernel is started, on a GPU and in the emulator alike. Never <<<>>>.
// Returns the error of the launch; nothing is allocated and nothing waits, so it may be captured into a graph. That
// holds once load_kernels() has run on the device (kernel_list.h): the kernel is a template argument so that whatever
// is launched anywhere is in its list.
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
    // Programmatic dependent launch (sm_90): the kernel may start before its predecessor in the stream has ended, and
    // must call grid_dependency_wait() (ptx.cuh) before it reads what that wrote or writes what that reads.
    bool dependent = false;
};

template <auto kernel>
struct ListedKernel {
    static inline const bool entered = (kernel_list().push_back(reinterpret_cast<const void*>(kernel)), true);
};

template <class... P, class... A>
cudaError_t launch_listed(void (*kernel)(P...), const LaunchConfig& config, A&&... args) {
    static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter of the kernel");
    cudaLaunchAttribute dependent;
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    // gridDim, blockDim, ..: not by name, as blockDim is a macro in the emulator.
    const cudaLaunchConfig_t c{config.grid,   config.block, config.smem_bytes,
                               config.stream, &dependent,   config.dependent ? 1u : 0u};
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
