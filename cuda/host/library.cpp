// The one symbol of the CUDA library, and why a machine cannot use it.
#include <cuda_runtime.h>
#include <unistd.h>

#include "cuda/core/host.h"
#include "cuda/host/backend.h"

namespace infinilm::cuda {

namespace {

std::string version(int number) { return concat(number / 1000, ".", number % 1000 / 10); }

pid_t first_process = 0;  // that found devices

// CUDA is of no use in a process that was forked from one that had used it. There the runtime still counts devices, as
// its memory was copied (seen with driver 580), and only what comes next fails: so it is told by the process itself.
void check_process() {
    if (first_process == 0 || getpid() == first_process) return;
    throw DeviceError(
        "CUDA cannot be used in this process, which was forked from one that had used it already; start processes by "
        "multiprocessing's 'spawn', or look at devices in the new process only");
}

}  // namespace

std::vector<CudaDevice> devices() {
    check_process();
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
    first_process = getpid();
    std::vector<CudaDevice> found(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
        CudaDevice& device = found[static_cast<size_t>(i)];
        cudaDeviceProp properties;
        if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
        device = {.name = properties.name,
                  .major = properties.major,
                  .minor = properties.minor,
                  .total_bytes = static_cast<int64_t>(properties.totalGlobalMem),
                  .num_sms = properties.multiProcessorCount};
    }
    return found;
}

int64_t free_bytes(int device) {
    check_process();
    size_t free = 0, total = 0;
    cudaError_t error = cudaSuccess;
    on_device(device, [&] { error = cudaMemGetInfo(&free, &total); });
    check(error, concat("free memory of cuda:", device));
    return static_cast<int64_t>(free);
}

}  // namespace infinilm::cuda

extern "C" __attribute__((visibility("default"))) const infinilm::CudaLibrary* infinilm_cuda_library() {
    static const infinilm::CudaLibrary table{.abi = infinilm::cuda_library_abi,
                                             .devices = infinilm::cuda::devices,
                                             .free_bytes = infinilm::cuda::free_bytes,
                                             .make_backend = infinilm::cuda::make_backend};
    return &table;
}
