// What stands in place of attention's q, k and v in some layers, from the parameters of ops to those of kernels. All
// enqueue, and return the error of a launch.
#pragma once

#include "host.h"
#include "ops/backend.h"

namespace infinilm::cuda {

// DeviceError: attention of such heads does not run on the current device.
void check_head(int head_dim, Type type);
cudaError_t run_head_linear(const HeadLinearParams& p, cudaStream_t stream);
cudaError_t run_causal_conv(const CausalConvParams& p, Type type, cudaStream_t stream);
cudaError_t run_delta_rule(const DeltaRuleParams& p, Type type, cudaStream_t stream);

}  // namespace infinilm::cuda
