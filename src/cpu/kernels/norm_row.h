// RMSNorm of one row, shared by norm.cpp (a row is a token) and rope.cpp (a row is one head of q or k).
// out = x / sqrt(mean(x^2) + eps) * weight, in float32. The sum of squares uses four vector accumulators in a fixed
// order, so that a row has the same bits wherever it is computed.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

// Sum of squares of x[n]; with ADD, residual[n] becomes scale * (residual + multiplier * x) first, and the sum is over
// that.
template <bool ADD>
INFINILM_INLINE float sum_squares(const float* x, float* residual, int64_t n, float multiplier = 1, float scale = 1) {
    const vec m = set1(multiplier), s = set1(scale);
    vec sum[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * width <= n; i += 4 * width)
        for (int k = 0; k < 4; ++k) {
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
    return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
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
