// What lies between a layer's linears and attention, or stands in place of it, from the parameters of ops to those of
// kernels. What is called run_ enqueues, and returns the error of a launch.
#pragma once

#include "host.h"
#include "ops/backend.h"

namespace infinilm::cuda {

// DeviceError: attention of such heads does not run on the current device.
void check_head(int head_dim);
RopeStoreArgs rope_args(const RopeStoreParams& p);
cudaError_t run_head_linear(const HeadLinearParams& p, cudaStream_t stream);
cudaError_t run_causal_conv(const CausalConvParams& p, Type type, cudaStream_t stream);
cudaError_t run_delta_rule(const DeltaRuleParams& p, Type type, cudaStream_t stream);

}  // namespace infinilm::cuda
