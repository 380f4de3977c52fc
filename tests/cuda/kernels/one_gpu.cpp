// One GPU as several, for tests of ranks where there are too few: preloaded, it stands between the CUDA library of a
// test and the runtime that it is linked with, and shows INFINILM_EMULATOR_DEVICES devices that are all the first one.
// They reach each other's memory unless INFINILM_EMULATOR_PEERS is 0, as on the emulator. NCCL has a runtime of its own
// and sees the one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1 is for that).
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string_view>

namespace {

thread_local int current = 0;

template <class F>
F* real(const char* name, F*) {
    return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}
#define REAL(function) real(#function, &function)

int num_devices() {
    const char* text = std::getenv("INFINILM_EMULATOR_DEVICES");
    return text ? std::atoi(text) : 1;
}

bool is_device(int device) { return device >= 0 && device < num_devices(); }

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    const cudaError_t error = REAL(cudaGetDeviceCount)(count);
    if (error == cudaSuccess && *count > 0) *count = num_devices();
    return error;
}
cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    current = device;
    return REAL(cudaSetDevice)(0);
}
cudaError_t cudaGetDevice(int* device) {
    const cudaError_t error = REAL(cudaGetDevice)(device);
    *device = current;
    return error;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return is_device(device) ? REAL(cudaDeviceGetAttribute)(value, attribute, 0) : cudaErrorInvalidDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    return is_device(device) ? REAL(cudaGetDeviceProperties)(properties, 0) : cudaErrorInvalidDevice;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    const char* text = std::getenv("INFINILM_EMULATOR_PEERS");
    *can = is_device(device) && is_device(peer) && device != peer && !(text && std::string_view(text) == "0");
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    return is_device(peer) && peer != current ? cudaSuccess : cudaErrorInvalidDevice;
}

}  // extern "C"
