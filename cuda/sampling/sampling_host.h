// The ops of logits and sampling, launched: what their kernels get of an op's parameters. The current device is that of
// the stream.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "cuda/core/host.h"
#include "cuda/sampling/kernels.h"
#include "ops/backend.h"

namespace infinilm::cuda {

// Memory by which the blocks of a row of logits talk, where a device wants it (sampling_places): 16 KiB for each
// multiprocessor. It belongs to one stream.
class SamplingWorkspace {
public:
    explicit SamplingWorkspace(cudaStream_t stream);  // of the current device
    RowBlocks blocks() const { return {.workspace = memory_ ? memory_->data : nullptr, .places = places_}; }

private:
    int places_ = 0;
    std::unique_ptr<DeviceMemory> memory_;
};

cudaError_t run_change_logits(const ChangeLogitsParams& params, cudaStream_t stream);
cudaError_t run_find_best(const FindBestParams& params, const SamplingWorkspace& workspace, cudaStream_t stream);
// DeviceError: too many of the best.
cudaError_t run_log_probs(const LogProbsParams& params, const SamplingWorkspace& workspace, cudaStream_t stream);
cudaError_t run_sample(const SampleParams& params, const SamplingWorkspace& workspace, cudaStream_t stream);

}  // namespace infinilm::cuda
