// How weights are rounded to int8, int4 and fp8: written once, for the lanes of a CPU's vector and for one thread of a
// GPU, so that all devices hold the same numbers. C++17 without standard headers: it is compiled for every instruction
// set and by nvcc.
//
// Lanes L: Float and Int hold a value for each lane; static functions set1(float), absolute(Float), fma(a, b, c),
// bf16(Float), rounded to bfloat16, nearest(Float), to Int with ties to even, and to_float(Int).
#pragma once

#ifdef __CUDACC__
#define INFINILM_QUANTISE static __device__ __forceinline__
#else
#define INFINILM_QUANTISE static inline __attribute__((always_inline))
#endif

namespace infinilm::quantise {

constexpr int group = 32;  // of in_features: what shares a scale of int4

// 1 / v, or 0 where there is nothing to divide: smaller ones have an infinite inverse.
template <class L>
INFINILM_QUANTISE typename L::Float inverse_or_zero(typename L::Float v) {
    return L::absolute(v) > 0x1p-119f ? 1.0f / v : L::set1(0.0f);
}

// The integer next to v / scale in [lowest, highest], given 1 / scale.
template <class L>
INFINILM_QUANTISE typename L::Int integer(typename L::Float v, typename L::Float inverse, float lowest, float highest) {
    v = v * inverse;
    v = v > highest ? L::set1(highest) : v;
    v = v < lowest ? L::set1(lowest) : v;
    return L::nearest(v);
}

// int8: in [-127, 127], with one scale for an output, whose largest weight in size is given.
template <class L>
INFINILM_QUANTISE typename L::Float int8_scale(typename L::Float largest) {
    return largest / 127.0f;
}
template <class L>
INFINILM_QUANTISE typename L::Int int8(typename L::Float v, typename L::Float inverse) {
    return integer<L>(v, inverse, -127.0f, 127.0f);
}

// int4: in [-8, 7], with one bfloat16 scale for a group. It is searched: the sum of squared errors is least for one
// between the largest weight / 8, which reaches it, and somewhat less, which is finer for all others.
template <class L>
INFINILM_QUANTISE typename L::Int int4(typename L::Float v, typename L::Float inverse) {
    return integer<L>(v, inverse, -8.0f, 7.0f);
}
// value(k): that of the group, of `count` weights.
template <class L, class Value>
INFINILM_QUANTISE typename L::Float int4_scale(const Value& value, int count = group) {
    using Float = typename L::Float;
    constexpr int candidates = 16;
    Float largest = L::set1(0.0f);  // in size, with its sign: -8 is there, 8 is not
    for (int k = 0; k < count; ++k) {
        const Float v = value(k);
        largest = L::absolute(v) > L::absolute(largest) ? v : largest;
    }
    Float best_scale = L::set1(0.0f), best_error = L::set1(__builtin_inff());
    for (int c = 0; c < candidates; ++c) {
        const Float scale = L::bf16(largest / (-8.5f + 0.125f * (float)c));
        const Float inverse = inverse_or_zero<L>(scale);
        Float error = L::set1(0.0f);
        for (int k = 0; k < count; ++k) {
            const Float v = value(k);
            const Float d = v - scale * L::to_float(int4<L>(v, inverse));  // the product is exact: fused or not
            error = L::fma(d, d, error);
        }
        best_scale = error < best_error ? scale : best_scale;
        best_error = error < best_error ? error : best_error;
    }
    return best_scale;
}

// fp8 (e4m3: 4 bits of exponent, 3 of mantissa, no infinities): one scale for an output, that takes its largest weight
// to the largest number there is.
constexpr float fp8_largest = 448.0f;

}  // namespace infinilm::quantise
