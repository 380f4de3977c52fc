// RMSNorm of one row, shared by norm.cpp (a row is a token) and rope.cpp (a row is one head of q or k).
// out = x / sqrt(mean(x^2) + eps) * weight, in float32. The sum of squares uses four accumulators of 16 lanes in a
// fixed order, so that a row has the same bits wherever it is computed.
#pragma once

#include "cpu/kernels/lane_sums.h"

namespace infinilm::cpu::INFINILM_ISA {

// Sum of squares of x[n]; with ADD, residual[n] becomes scale * (residual + multiplier * x) first, and the sum is over
// that.
template <bool ADD>
INFINILM_INLINE float sum_squares(const float* x, float* residual, int64_t n, float multiplier = 1, float scale = 1) {
    const vec m = set1(multiplier), s = set1(scale);
    constexpr int vectors = 4 * sum_parts;
    vec sum[vectors];
    for (int k = 0; k < vectors; ++k) sum[k] = zero();
    int64_t i = 0;
    for (; i + vectors * width <= n; i += vectors * width)
        for (int k = 0; k < vectors; ++k) {
            vec v = load(x + i + k * width);
            if (ADD) {
                v = (v * m + load(residual + i + k * width)) * s;
                store(residual + i + k * width, v);
            }
            sum[k] = fma(v, v, sum[k]);
        }
    for (int k = 0; i < n; i += width, ++k) {
        const int left = n - i < width ? (int)(n - i) : width;
        vec v = left == width ? load(x + i) : load_partial(x + i, left);
        if (ADD) {
            v = (v * m + (left == width ? load(residual + i) : load_partial(residual + i, left))) * s;
            if (left == width)
                store(residual + i, v);
            else
                store_partial(residual + i, v, left);
        }
        sum[k] = fma(v, v, sum[k]);
    }
    vec parts[sum_parts];
    for (int k = 0; k < sum_parts; ++k)
        parts[k] = (sum[k] + sum[k + sum_parts]) + (sum[k + 2 * sum_parts] + sum[k + 3 * sum_parts]);
    return add_lanes(parts);
}

// out[n] = x[n] * scale * weight[n]; out may be x.
template <class W>
INFINILM_INLINE void scale_row(const float* x, float scale, const W* weight, float* out, int64_t n) {
    const vec s = set1(scale);
    int64_t i = 0;
    for (; i + width <= n; i += width) store(out + i, load(x + i) * s * load(weight + i));
    if (i < n) {
        const int left = (int)(n - i);
        store_partial(out + i, load_partial(x + i, left) * s * load_partial(weight + i, left), left);
    }
}

INFINILM_INLINE float rms_scale(float sum_of_squares, int64_t n, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / (float)n + eps);
}

}  // namespace infinilm::cpu::INFINILM_ISA
