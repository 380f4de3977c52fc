// What a layer with a state computes before its kernel, in double precision.
#pragma once

#include "ops/backend.h"

namespace infinilm::cpu {

// Fills `gates`, [2 * num_v_heads], of a token with these a and b: decay, then beta.
void make_gates(const DeltaRuleParams& p, const float* a, const float* b, float* gates);
// The same, [2 * num_heads], of decay, then step.
void make_steps(const SelectiveScanParams& p, const float* dt, float* gates);

}  // namespace infinilm::cpu
