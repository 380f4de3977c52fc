// The CUDA backend: device memory, one stream, and for each op the choice of a kernel (kernels.h). Host code, C++20.
#pragma once

#include <memory>

#include "ops/cuda_library.h"

namespace infinilm::cuda {

class CudaBackend;  // defined in backend.cpp
std::unique_ptr<Backend> make_backend(const CudaOptions& options);
std::vector<CudaDevice> devices();  // makes no context anywhere
int64_t free_bytes(int device);     // makes one there

}  // namespace infinilm::cuda
