// Layers of experts, and adapters, by linear_grouped: what the backend has for them besides its table of ops.
#pragma once

#include <functional>
#include <memory>

#include "cuda/core/host.h"
#include "ops/backend.h"

namespace infinilm::cuda {

// DeviceError: more experts than kernels take. is_hopper: of the current device; fp8_inputs: linears of FP8 weights
// round what they read to FP8, too.
std::unique_ptr<PreparedExperts> make_experts(Backend::SharedLinears gate_up, Backend::SharedLinears down,
                                              bool is_hopper, bool fp8_inputs);
// These enqueue, and return the error of a launch.
cudaError_t run_route(const RouteParams& p, cudaStream_t stream);
// activate: applies the activation to what p.inner holds where no linear does, and leaves the result in `inner`, its
// first columns.
cudaError_t run_experts(const ExpertsParams& p, Element type, cudaStream_t stream,
                        const std::function<cudaError_t(const TensorView& inner)>& activate);
cudaError_t run_lora(const LoraParams& p, cudaStream_t stream);

}  // namespace infinilm::cuda
