// The CUDA backend is a shared library of its own, opened on first use, so that one build runs on machines with and
// without a GPU. This is both sides' view of it: what it exports, and how the core finds and opens it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace infinilm {

struct CudaOptions {
    int device = 0;
    DType dtype = DType::bfloat16;  // of activations, packed weights and cache
    bool fp8_inputs = false;        // linears of FP8 weights round what they read to FP8, too
};
inline constexpr int64_t fp8_inputs_bytes = int64_t{32} << 20;  // what a device then keeps for such inputs

struct CudaDevice {
    std::string name;
    int major = 0, minor = 0;  // compute capability
    int64_t total_bytes = 0;
    int num_sms = 0;
};

// What the library exports, as a table: one symbol, and a number that tells a library of another version.
struct CudaLibrary {
    int abi;
    std::vector<CudaDevice> (*devices)();  // at least one; DeviceError: why there is none
    int64_t (*free_bytes)(int device);
    std::unique_ptr<Backend> (*make_backend)(const CudaOptions&);
};
inline constexpr int cuda_library_abi = 10;  // raise it when Backend, DeviceQueue, their structs or these change
inline constexpr const char* cuda_library_symbol = "infinilm_cuda_library";
// In its place where a compiler failed: why, as a text (cuda/optional.py).
inline constexpr const char* cuda_left_out_symbol = "infinilm_cuda_left_out";

// Each of these opens the library if need be. DeviceError: it is not built, cannot be opened, or finds no driver, too
// old a driver, no device, or a device it has no code for; the message says which and what to do.
std::vector<CudaDevice> cuda_devices();
// Bytes of memory that are free on a device that there is. That makes a context there, which takes some memory,
// too, and which engines on the device share; cuda_devices makes none.
int64_t cuda_free_bytes(int device);
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

}  // namespace infinilm
