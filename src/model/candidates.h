// Sampling from a vocabulary that is divided over ranks without bringing all its logits together: a row that is greedy,
// or keeps top_k, needs the best of each rank's part alone. In the order of their ids' parts, and within a part best
// first, they are ordered as SampleParams orders candidates: equal logits by id. So `sample` over them draws the token
// that it draws over all logits.
#pragma once

#include <span>

#include "core/tensor.h"

namespace infinilm {

inline constexpr int max_candidates = 64;  // of a row and a rank; with more, all logits are brought together

// The best of a row, best first; equal logits by id. NaN anywhere in the row is the first of them, so that it is
// noticed. Where the row is shorter: -inf, which is never drawn.
void find_best(std::span<const float> logits, int32_t first_id, std::span<float> best, std::span<int32_t> ids);

}  // namespace infinilm
