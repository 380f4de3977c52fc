// The one symbol of the CUDA library, and why a machine cannot use it.
#include <cuda_runtime.h>

#include "backend.h"

namespace infinilm::cuda {

namespace {

std::string version(int number) { return concat(number / 1000, ".", number % 1000 / 10); }

}  // namespace

std::vector<CudaDevice> devices() {
    int count = 0, driver = 0, runtime = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);  // 0: no driver
    cudaRuntimeGetVersion(&runtime);
    if (error != cudaSuccess) cudaGetLastError();  // not sticky: the next call starts clean
    if (driver == 0) throw DeviceError("no NVIDIA driver is installed (libcuda.so.1 was not found); use device='cpu'");
    if (error == cudaErrorInsufficientDriver)
        throw DeviceError(concat("the NVIDIA driver is too old: it supports CUDA ", version(driver),
                                 ", this build needs ", version(runtime), "; update the driver or use device='cpu'"));
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
        throw DeviceError("the NVIDIA driver finds no device (is CUDA_VISIBLE_DEVICES set?); use device='cpu'");
    if (error != cudaSuccess)
        throw DeviceError(concat("CUDA is not usable: ", cudaGetErrorName(error), ", ", cudaGetErrorString(error)));
    std::vector<CudaDevice> found(static_cast<size_t>(count));
    int current = 0;
    cudaGetDevice(&current);
    for (int i = 0; i < count; ++i) {
        CudaDevice& device = found[static_cast<size_t>(i)];
        cudaDeviceProp properties;
        size_t free_bytes = 0, total_bytes = 0;
        if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
        if (cudaSetDevice(i) == cudaSuccess) cudaMemGetInfo(&free_bytes, &total_bytes);
        device = {.name = properties.name,
                  .major = properties.major,
                  .minor = properties.minor,
                  .total_bytes = static_cast<int64_t>(total_bytes),
                  .free_bytes = static_cast<int64_t>(free_bytes),
                  .num_sms = properties.multiProcessorCount};
    }
    cudaSetDevice(current);
    return found;
}

}  // namespace infinilm::cuda

extern "C" __attribute__((visibility("default"))) const infinilm::CudaLibrary* infinilm_cuda_library() {
    static const infinilm::CudaLibrary table{.abi = infinilm::cuda_library_abi,
                                             .devices = infinilm::cuda::devices,
                                             .make_backend = infinilm::cuda::make_backend};
    return &table;
}
