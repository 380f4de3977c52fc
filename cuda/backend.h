// The CUDA backend: device memory, one stream, and for each op the choice of a kernel (kernels.h). Host code, C++20.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string_view>

#include "ops/cuda_library.h"

namespace infinilm::cuda {

class CudaBackend;  // defined in backend.cpp
std::unique_ptr<Backend> make_backend(const CudaOptions& options);
std::vector<CudaDevice> devices();
void check(cudaError_t error, std::string_view what);  // DeviceError unless it is cudaSuccess

}  // namespace infinilm::cuda
