// Products of int8 activations with integer weights, four k at a time, added up in int32: exact, so that every
// instruction set gives the same sums. Int8Dot is for signed bytes, UnsignedDot for bytes of few bits. A vector holds
// `width` outputs of 4 k each (a half, a quarter or the whole of a line of pack.h), x is the 4 k of one token in every
// lane.
//
// What an instruction takes may be a weight plus an offset; what that adds to a sum is known beforehand, and is taken
// away by `bias`, which is -offset * (sum of x). A sum is of no more than a group of 32 k: |w| <= 128 and |x| <= 127,
// so that nothing overflows.
#pragma once

#include "cpu/kernels/pack.h"
#include "cpu/kernels/simd.h"

#if INFINILM_EMULATED || defined(__AVX512VNNI__)
#define INFINILM_VNNI 1
#else
#define INFINILM_VNNI 0
#endif

namespace infinilm::cpu::INFINILM_ISA {

// Four bytes of each lane from one lane of 32 bits.
INFINILM_INLINE ivec byte_of(ivec v, int j) { return v << (24 - 8 * j) >> 24; }

#if INFINILM_VNNI

// sum + the four products of unsigned w with signed x
INFINILM_INLINE ivec dot_unsigned(ivec sum, uvec w, ivec x) {
#if INFINILM_EMULATED
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum += (ivec)(w >> (8 * j) & 0xffu) * byte_of(x, j);
    return sum;
#else
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#endif
}

struct Int8Dot {
    using Weight = uvec;
    using Sum = ivec;
    static constexpr int offset = 128;
    static INFINILM_MEMBER Weight weight(uvec bytes) { return bytes ^ 0x80808080u; }
    static INFINILM_MEMBER Sum start(ivec bias) { return bias; }
    static INFINILM_MEMBER Sum add(Sum sum, Weight w, ivec x) { return dot_unsigned(sum, w, x); }
    static INFINILM_MEMBER ivec total(Sum sum, ivec) { return sum; }
};
// Products of bytes from 0 to 2 ** bits - 1; one sum adds up so many quads.
template <int bits, int offset_, int quads>
struct UnsignedDot {
    using Weight = uvec;
    using Sum = ivec;
    static constexpr int offset = offset_;
    static INFINILM_MEMBER Weight weight(uvec bytes) { return bytes; }
    static INFINILM_MEMBER Sum start(ivec bias) { return bias; }
    static INFINILM_MEMBER Sum add(Sum sum, Weight w, ivec x) { return dot_unsigned(sum, w, x); }
    static INFINILM_MEMBER ivec total(Sum sum, ivec) { return sum; }
};

#elif defined(__AVX2__)

typedef int16_t svec __attribute__((vector_size(4 * INFINILM_WIDTH)));  // pairs of k

// Sums of neighbouring products of unsigned w with signed x; they must fit 16 bits.
INFINILM_INLINE svec pairs_unsigned(uvec w, ivec x) {
#if INFINILM_WIDTH == 16
    return (svec)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
#else
    return (svec)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
#endif
}
INFINILM_INLINE ivec add_pairs(svec v) {
#if INFINILM_WIDTH == 16
    return (ivec)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1));
#else
    return (ivec)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1));
#endif
}

// |w| times x with the sign of w: 2 * 128 * 127 fits 16 bits, with an offset of 128 it would not.
struct Int8Dot {
    struct Weight {
        uvec magnitude;
#if INFINILM_WIDTH == 16
        __mmask64 negative;
#else
        uvec sign;
#endif
    };
    using Sum = ivec;
    static constexpr int offset = 0;
    static INFINILM_MEMBER Weight weight(uvec bytes) {
#if INFINILM_WIDTH == 16
        return {(uvec)_mm512_abs_epi8((__m512i)bytes), _mm512_cmplt_epi8_mask((__m512i)bytes, __m512i{})};
#else
        return {(uvec)_mm256_abs_epi8((__m256i)bytes), bytes};
#endif
    }
    static INFINILM_MEMBER Sum start(ivec) { return ivec{}; }
    static INFINILM_MEMBER Sum add(Sum sum, Weight w, ivec x) {
#if INFINILM_WIDTH == 16
        const ivec signed_x = (ivec)_mm512_mask_sub_epi8((__m512i)x, w.negative, __m512i{}, (__m512i)x);
#else
        const ivec signed_x = (ivec)_mm256_sign_epi8((__m256i)x, (__m256i)w.sign);
#endif
        return sum + add_pairs(pairs_unsigned(w.magnitude, signed_x));
    }
    static INFINILM_MEMBER ivec total(Sum sum, ivec) { return sum; }
};
// Pairs are added up in 16 bits where their sum fits.
template <int bits, int offset_, int quads>
struct UnsignedDot {
    static constexpr bool fits = quads * 2 * ((1 << bits) - 1) * 127 < 1 << 15;
    using Weight = uvec;
    using Sum = decltype([] {
        if constexpr (fits)
            return svec{};
        else
            return ivec{};
    }());
    static constexpr int offset = offset_;
    static INFINILM_MEMBER Weight weight(uvec bytes) { return bytes; }
    static INFINILM_MEMBER Sum start(ivec) { return Sum{}; }
    static INFINILM_MEMBER Sum add(Sum sum, Weight w, ivec x) {
        if constexpr (fits)
            return sum + pairs_unsigned(w, x);
        else
            return sum + add_pairs(pairs_unsigned(w, x));
    }
    static INFINILM_MEMBER ivec total(Sum sum, ivec bias) {
        if constexpr (fits)
            return add_pairs(sum) + bias;
        else
            return sum + bias;
    }
};

#else  // signed bytes by signed bytes

struct Int8Dot {
    using Weight = uvec;
    using Sum = ivec;
    static constexpr int offset = 0;
    static INFINILM_MEMBER Weight weight(uvec bytes) { return bytes; }
    static INFINILM_MEMBER Sum start(ivec) { return ivec{}; }
    static INFINILM_MEMBER Sum add(Sum sum, Weight w, ivec x) {
#if defined(__ARM_FEATURE_DOTPROD)
        return (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#elif defined(__aarch64__)
        const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
        const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
        return sum + (ivec)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#elif defined(__SSE2__)
        // The bytes of even and of odd k as 16 bits.
        const auto even = [](auto v) { return _mm_srai_epi16(_mm_slli_epi16((__m128i)v, 8), 8); };
        const auto odd = [](auto v) { return _mm_srai_epi16((__m128i)v, 8); };
        return sum + (ivec)_mm_madd_epi16(even(w), even(x)) + (ivec)_mm_madd_epi16(odd(w), odd(x));
#else
        for (int j = 0; j < 4; ++j) sum += byte_of((ivec)w, j) * byte_of(x, j);
        return sum;
#endif
    }
    static INFINILM_MEMBER ivec total(Sum sum, ivec) { return sum; }
};
template <int bits, int offset_, int quads>
struct UnsignedDot : Int8Dot {
    static constexpr int offset = offset_;
    static INFINILM_MEMBER Sum start(ivec bias) { return bias; }
};

#endif

}  // namespace infinilm::cpu::INFINILM_ISA
