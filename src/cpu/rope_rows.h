// Rows of a table of rotations, computed once a step.
#pragma once

#include <cmath>

#include "ops/backend.h"

namespace infinilm::cpu {

// The rows of tokens [begin, end). Angles in double: at position 100000 a float32 angle is off by 0.004.
inline void rope_rows(const RopeTableParams& p, int64_t begin, int64_t end) {
    const int64_t half = p.inv_freq.shape(0);
    const float* const inv_freq = p.inv_freq.as<const float>();  // [half]
    for (int64_t t = begin; t < end; ++t) {
        const int32_t at = p.positions.as<const int32_t>()[t];
        const double position = at;
        const double steps = (at + p.scale_offset) / p.scale_positions;  // whole ones
        const double factor = p.attention_factor * (1 + p.scale_beta * std::log1p(steps));
        float* const row = p.cos_sin.as<float>() + t * p.cos_sin.stride(0);  // [2 * half]
        for (int64_t i = 0; i < half; ++i) {
            const double angle = position * double{inv_freq[i]};
            row[i] = static_cast<float>(std::cos(angle) * factor);
            row[half + i] = static_cast<float>(std::sin(angle) * factor);
        }
    }
}

}  // namespace infinilm::cpu
