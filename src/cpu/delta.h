// What a layer with a state computes before its kernel, in double precision.
#pragma once

#include "ops/backend.h"

namespace infinilm::cpu {

// Fills p.gates of the tokens [begin, end): decay, then beta.
void make_gates(const DeltaRuleParams& p, int64_t begin, int64_t end);
// The same of decay, then step.
void make_steps(const SelectiveScanParams& p, int64_t begin, int64_t end);

}  // namespace infinilm::cpu
