// Rows of a table of rotations, computed once a step.
#pragma once

#include <cmath>

#include "ops/backend.h"

namespace infinilm::cpu {

// The rows of tokens [begin, end). Angles in double: at position 100000 a float32 angle is off by 0.004.
inline void rope_rows(const RopeTableParams& p, int64_t begin, int64_t end) {
    const int64_t half = p.inv_freq.shape(0), num_tokens = p.cos_sin.shape(0);
    const float* const inv_freq = p.inv_freq.as<const float>();  // [half]
    const int32_t* const axes = p.axes ? p.axes.as<const int32_t>() : nullptr;
    const auto factor_of = [&p](int32_t position) -> double {
        const double steps = (position + p.scale_offset) / p.scale_positions;  // whole ones
        return p.attention_factor * (1 + p.scale_beta * std::log1p(steps));
    };
    for (int64_t t = begin; t < end; ++t) {
        const int32_t* const at = p.positions.as<const int32_t>() + t;
        float* const row = p.cos_sin.as<float>() + t * p.cos_sin.stride(0);  // [2 * half]
        double factor = 0;
        for (int64_t i = 0; i < half; ++i) {
            const int32_t position = axes ? at[axes[i] * num_tokens] : *at;
            if (i == 0 || axes) factor = factor_of(position);
            const double angle = static_cast<double>(position) * double{inv_freq[i]};
            row[i] = static_cast<float>(std::cos(angle) * factor);
            row[half + i] = static_cast<float>(std::sin(angle) * factor);
        }
    }
}

}  // namespace infinilm::cpu
