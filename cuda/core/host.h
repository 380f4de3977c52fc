// What host code of the CUDA library shares: errors of the runtime as exceptions, and memory with an owner.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <thread>

#include "core/dtype.h"
#include "core/error.h"
#include "cuda/core/types.h"

namespace infinilm::cuda {

inline void require(bool ok, const auto&... parts) {
    if (!ok) throw DeviceError(concat(parts...));
}

inline int count(int64_t size) { return static_cast<int>(size); }

// INFINILM_CUDA_SYNC=1: wait after every launch, so that a fault is told with the op it is of.
inline bool sync_launches() {
    const char* text = std::getenv("INFINILM_CUDA_SYNC");
    return text && std::string_view(text) == "1";
}

inline void check(cudaError_t error, std::string_view what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // not sticky unless the device is lost
    constexpr auto unsupported_ptx_version = static_cast<cudaError_t>(222);
    if (error == cudaErrorNoKernelImageForDevice || error == unsupported_ptx_version)
        throw DeviceError(concat(what,
                                 error == unsupported_ptx_version
                                     ? ": this build has kernels for this GPU as PTX alone, of a CUDA toolkit that is "
                                       "newer than the driver; install a newer driver, or reinstall with "
                                     : ": this build has no kernels for this GPU; reinstall with ",
                                 "--config-settings=setup-args=-Dgpu_archs=<its compute capability, such as 80, 90a "
                                 "or 120>"));
    const bool by_kernel = error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure;
    throw DeviceError(concat(
        what, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error),
        by_kernel && !sync_launches() ? ": an op that ran before has failed (INFINILM_CUDA_SYNC=1 tells which)" : ""));
}

// Calls f with this device current, from any thread, whose own device stays as it is. If that is another device, f runs
// on a thread of its own: to return to a device by cudaSetDevice would make a context there, which takes some hundred
// megabytes on a GPU that other programs may be using.
template <class F>
void on_device(int device, F f) {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current == device) return f();
    try {
        std::thread([&] {
            cudaSetDevice(device);  // where that fails, as on a lost device, so does what f calls
            f();
        }).join();
    } catch (const std::system_error&) {  // no more threads are to be had
        cudaSetDevice(device);
        f();
    }
}

struct DeviceMemory {
    void* data = nullptr;
    int device = 0;  // the current one
    // `what` it is for; it is uninitialised. Where a step may ask for some it is CudaBackend::device_memory that makes
    // it.
    DeviceMemory(size_t bytes, std::string_view what) {
        cudaGetDevice(&device);
        const cudaError_t error = cudaMalloc(&data, std::max<size_t>(bytes, 1));
        if (error == cudaSuccess) return;
        if (error != cudaErrorMemoryAllocation) check(error, concat("memory for ", what));
        cudaGetLastError();
        size_t free_bytes = 0, total_bytes = 0;
        cudaMemGetInfo(&free_bytes, &total_bytes);
        throw DeviceError(concat("out of device memory: ", bytes, " bytes for ", what, ", ", free_bytes, " of ",
                                 total_bytes,
                                 " are free; lower kv_cache, max_model_len or max_num_batched_tokens, use a smaller "
                                 "model or dtype, or round the weights with quantization='int4'"));
    }
    ~DeviceMemory() {
        on_device(device, [&] { cudaFree(data); });
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
};

}  // namespace infinilm::cuda
