// What the kernels of rows get of an op's parameters. Each function enqueues, and returns the error of the launch.
#pragma once

#include "cuda/core/host.h"
#include "ops/backend.h"

namespace infinilm::cuda {

cudaError_t run_join_columns(const TensorView& parts, const TensorView& out, cudaStream_t stream);

}  // namespace infinilm::cuda
