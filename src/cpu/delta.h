// What CpuBackend gives to the kernels of layers with a state.
#pragma once

#include "cpu/kernels/kernels.h"
#include "ops/backend.h"

namespace infinilm::cpu {

CausalConvArgs conv_args(const CausalConvParams& p);
DeltaRuleArgs delta_args(const DeltaRuleParams& p);
// Fills p.gates of the tokens [begin, end): decay, then beta.
void make_gates(const DeltaRuleParams& p, int64_t begin, int64_t end);

}  // namespace infinilm::cpu
