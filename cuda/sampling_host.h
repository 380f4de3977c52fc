// The ops of logits and sampling, launched: what their kernels get of an op's parameters. The current device is that of
// the stream.
#pragma once

#include <cuda_runtime.h>

#include "ops/backend.h"

namespace infinilm::cuda {

cudaError_t run_join_columns(const TensorView& parts, const TensorView& out, cudaStream_t stream);
cudaError_t run_change_logits(const ChangeLogitsParams& params, cudaStream_t stream);
cudaError_t run_find_best(const FindBestParams& params, cudaStream_t stream);
cudaError_t run_log_probs(const LogProbsParams& params, cudaStream_t stream);  // DeviceError: too many of the best
cudaError_t run_sample(const SampleParams& params, cudaStream_t stream);

}  // namespace infinilm::cuda
