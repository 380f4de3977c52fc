// Every kernel of the library, and how all are made ready on a device before anything runs there.
//
// The driver loads a kernel when it is first needed on a device, for which it may wait for what runs there, while it
// holds a lock that launches on other devices need (CUDA C++ Programming Guide, "Lazy Loading": concurrent execution).
// Ranks are threads whose kernels wait for each other: a rank that loads one in the middle of a step could wait for
// ever. So each rank loads all of them before its first collective.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <vector>

namespace infinilm::cuda {

// Filled while the library is opened: launch<kernel>() enters its kernel (launch.cuh).
inline std::vector<const void*>& kernel_list() {
    static std::vector<const void*> kernels;
    return kernels;
}

// Loads all kernels on the current device, and lets each have all the shared memory that a block may have: above 48 KiB
// that must be asked for. Kernels that were not compiled for this device are passed over; who launches one is told.
//
// Where the library has no machine code for the device, the driver compiles its PTX, for a minute at the first start:
// then stderr is told, as nothing else would be heard for so long. Later starts find what the driver has kept.
inline cudaError_t load_kernels() {
    const auto begin = std::chrono::steady_clock::now();
    bool told = false;
    int device = 0, limit = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device))
        return error;
    for (const void* kernel : kernel_list()) {
        cudaFuncAttributes attributes;
        cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
            cudaGetLastError();  // forget it
            continue;
        }
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         limit - static_cast<int>(attributes.sharedSizeBytes));
        if (error != cudaSuccess) return error;
        const bool compiled = attributes.binaryVersion != attributes.ptxVersion;
        if (compiled && !told && std::chrono::steady_clock::now() - begin > std::chrono::seconds(2)) {
            std::fprintf(
                stderr,
                "infinilm: the CUDA driver compiles the kernels for this GPU (compute capability %d.%d), which "
                "takes about a minute and is done once, or in each new container unless CUDA_CACHE_PATH names a folder "
                "that stays; a build with --config-settings=setup-args=-Dgpu_archs=%d has them\n",
                attributes.binaryVersion / 10, attributes.binaryVersion % 10, attributes.binaryVersion);
            told = true;
        }
    }
    return cudaSuccess;
}

}  // namespace infinilm::cuda
