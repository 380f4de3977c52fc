// The kernels of layers with a state. See core/types.h for what holds of all launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args/state.h"
#include "cuda/core/types.h"

namespace infinilm::cuda {

cudaError_t causal_conv(const CausalConvArgs&, cudaStream_t);

cudaError_t delta_rule(const DeltaRuleArgs&, cudaStream_t);  // v_dim is even

cudaError_t selective_scan(const SelectiveScanArgs&, cudaStream_t);  // head_dim is even
cudaError_t gated_norm(const GatedNormArgs&, cudaStream_t);

cudaError_t log_drafts(const LogDraftsArgs&, cudaStream_t);

}  // namespace infinilm::cuda
