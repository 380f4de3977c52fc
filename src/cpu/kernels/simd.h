// The vector layer of the CPU kernels: one float vector of `width` lanes over GCC vector extensions (so + - * / and
// comparisons are written plainly), and one small wrapper for each thing they cannot say. Included only by the sources
// of this folder, each compiled per instruction set with these macros set by src/cpu/meson.build:
//   INFINILM_ISA       the name of the build, which is also the namespace: generic, avx2, avx512, ...
//   INFINILM_FLOATS, INFINILM_INTEGERS
//                      the builds whose kernels of floats and of integers this one has, itself where it is none of:
//                      wider sets of instructions that do nothing for them
//   INFINILM_WIDTH     float lanes: 4, 8 or 16
//   INFINILM_BF16_DOT  1 where bf16 pairs are multiplied by one instruction (or by its emulation)
//   INFINILM_TILES     1 where matrices of bf16 and int8 are multiplied in tiles (or by their emulation), see tile.h
//   INFINILM_EMULATED  1 for emulated512 and emulated_amx: 16 lanes with baseline instructions, to test wide code paths
//                      anywhere; in no package, tests/emulated_isas.py builds these two
// (The 512-bit intrinsics are used in their maskz form with a full mask: gcc 12 warns of its own undefined vector in
// the others, and emits the same instruction.) Everything is static or in the ISA namespace, and no C++ standard header
// is included: an inline function compiled for AVX-512 that had external linkage could be picked by the linker for the
// whole program. Compiled with -ffp-contract=off: a*b+c is fused exactly where fma() is written. No fast-math: order is
// a contract.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/kernels/kernels.h"

#define INFINILM_INLINE static inline __attribute__((always_inline))
#define INFINILM_MEMBER inline __attribute__((always_inline))  // of a class: not static, and never a symbol

namespace infinilm::cpu::INFINILM_ISA {

constexpr int width = INFINILM_WIDTH;  // lanes of vec

typedef float vec __attribute__((vector_size(4 * INFINILM_WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * INFINILM_WIDTH)));  // also the result of comparing two vec
typedef uint32_t uvec __attribute__((vector_size(4 * INFINILM_WIDTH)));
typedef uint16_t hvec __attribute__((vector_size(2 * INFINILM_WIDTH)));  // as many 16-bit elements as vec has lanes
typedef int8_t bvec __attribute__((vector_size(INFINILM_WIDTH)));        // as many bytes
// The same in memory: aligned like the element only, and allowed to alias (weights are mapped bytes).
typedef float vec_mem __attribute__((vector_size(4 * INFINILM_WIDTH), aligned(4), may_alias));
typedef float float_mem __attribute__((aligned(4), may_alias));
typedef uint32_t uvec_mem __attribute__((vector_size(4 * INFINILM_WIDTH), aligned(1), may_alias));  // of any data
typedef uint16_t hvec_mem __attribute__((vector_size(2 * INFINILM_WIDTH), aligned(2), may_alias));
typedef int8_t bvec_mem __attribute__((vector_size(INFINILM_WIDTH), aligned(1), may_alias));

// Stored 16-bit floats. core/dtype.h has the same, with C++ headers that must not be included here.
struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

// Calls f(float{}), f(Bf16{}) or f(F16{}).
template <class F>
INFINILM_INLINE auto visit_element(Element element, F f) {
    switch (element) {
        case Element::bf16: return f(Bf16{});
        case Element::f16: return f(F16{});
        default: return f(float{});
    }
}
INFINILM_INLINE size_t element_bytes(Element element) { return element == Element::f32 ? 4 : 2; }  // of a weight
// As visit_element, of a KV cache, which may also be int8.
template <class F>
INFINILM_INLINE auto visit_cache_element(Element element, F f) {
    return element == Element::int8 ? f(int8_t{}) : visit_element(element, f);
}

// ---- Making vectors ----

INFINILM_INLINE vec zero() { return vec{}; }
INFINILM_INLINE vec set1(float v) { return v - vec{}; }  // v - 0 is v, also for -0; the compiler emits a broadcast
INFINILM_INLINE ivec set1_int(int32_t v) { return v + ivec{}; }
INFINILM_INLINE uvec set1_uint(uint32_t v) { return v + uvec{}; }

// Reinterpretation of the 32 bits of each lane.
INFINILM_INLINE uvec as_uint(vec v) { return (uvec)v; }
INFINILM_INLINE vec as_float(uvec v) { return (vec)v; }
INFINILM_INLINE int32_t as_int(float v) { return __builtin_bit_cast(int32_t, v); }

// Has it loaded once for all instructions that take it, which the compiler lets load it each for themselves otherwise.
INFINILM_INLINE void keep_in_register([[maybe_unused]] ivec& v) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    asm("" : "+v"(v));
#endif
}

// ---- Arithmetic ----

// a * b + c, rounded once where the machine can; a multiply and an add elsewhere (never a slow library fma).
INFINILM_INLINE vec fma(vec a, vec b, vec c) {
#if INFINILM_EMULATED
    return a * b + c;
#elif INFINILM_WIDTH == 16
    return _mm512_fmadd_ps(a, b, c);
#elif INFINILM_WIDTH == 8
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Lane-wise a > b ? a : b, as MAXPS does: a NaN in b is kept, a NaN in a gives b.
INFINILM_INLINE vec max(vec a, vec b) {
#if INFINILM_EMULATED || !defined(__x86_64__)
    return a > b ? a : b;
#elif INFINILM_WIDTH == 16
    return _mm512_maskz_max_ps(0xffff, a, b);
#elif INFINILM_WIDTH == 8
    return _mm256_max_ps(a, b);
#else
    return _mm_max_ps(a, b);
#endif
}

// Lanes [begin, end) of v, `other` in the rest.
INFINILM_INLINE vec keep_lanes(vec v, int64_t begin, int64_t end, float other) {
    ivec lane;
    for (int i = 0; i < width; ++i) lane[i] = i;
    v = lane >= (int32_t)begin ? v : set1(other);
    return lane < (int32_t)end ? v : set1(other);
}

// ---- Reductions, in a fixed order: lane i is combined with lane i + n/2, for n = width, width/2, ... 2 ----

typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

#if !__has_builtin(__builtin_shufflevector)  // gcc 11
template <int... lane, class V>
INFINILM_INLINE auto shufflevector(V a, V b) {
    constexpr int lanes = sizeof(V) / sizeof(float);
    if constexpr (sizeof...(lane) == lanes) {
        typedef decltype(a < b) indices;
        return __builtin_shuffle(a, b, indices{lane...});
    } else {
        typedef float result __attribute__((vector_size(sizeof...(lane) * sizeof(float))));
        return result{(lane < lanes ? a[lane % lanes] : b[lane % lanes])...};
    }
}
#define __builtin_shufflevector(a, b, ...) shufflevector<__VA_ARGS__>(a, b)
#endif

template <class Combine>
INFINILM_INLINE float reduce4(vec4 v, Combine combine) {
    const vec4 pair = combine(v, __builtin_shufflevector(v, v, 2, 3, 2, 3));
    return combine(pair, __builtin_shufflevector(pair, pair, 1, 1, 1, 1))[0];
}
template <class Combine>
INFINILM_INLINE float reduce(vec v, Combine combine) {
#if INFINILM_WIDTH == 16
    const vec8 eight = combine(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#elif INFINILM_WIDTH == 8
    const vec8 eight = v;
#endif
#if INFINILM_WIDTH >= 8
    return reduce4(
        combine(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7)),
        combine);
#else
    return reduce4(v, combine);
#endif
}
INFINILM_INLINE float reduce_add(vec v) {
    return reduce(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
INFINILM_INLINE float reduce_max(vec v) {  // lanes without NaN
    return reduce(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}
// The same of the bits in the lanes as integers; a sum that is too large wraps around.
typedef uint32_t uvec4 __attribute__((vector_size(16)));
INFINILM_INLINE uvec4 bits_of(vec4 v) { return (uvec4)v; }
#if INFINILM_WIDTH >= 8
typedef uint32_t uvec8 __attribute__((vector_size(32)));
INFINILM_INLINE uvec8 bits_of(vec8 v) { return (uvec8)v; }
#endif
INFINILM_INLINE int32_t reduce_add(ivec v) {
    return as_int(reduce(
        (vec)v, [](auto a, auto b) __attribute__((always_inline)) { return (decltype(a))(bits_of(a) + bits_of(b)); }));
}
INFINILM_INLINE float reduce_max(ivec v) {
    return reduce((vec)v, [](auto a, auto b) __attribute__((always_inline)) {
        typedef decltype(a < b) integers;
        return (decltype(a))((integers)a > (integers)b ? (integers)a : (integers)b);
    });
}

// ---- 16-bit floats: exact widening, round-to-nearest-even narrowing; bit for bit what core/dtype.h does, except the
// payload of an f16 NaN ----

// gcc 12 turns __builtin_convertvector into two half conversions and an insert, hence the intrinsics.
INFINILM_INLINE vec widen_bf16(hvec bits) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return as_float((uvec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits) << 16);
#elif !INFINILM_EMULATED && INFINILM_WIDTH == 8
    return as_float((uvec)_mm256_cvtepu16_epi32((__m128i)bits) << 16);
#elif !INFINILM_EMULATED && defined(__aarch64__)
    return as_float((uvec)vshll_n_u16((uint16x4_t)bits, 16));
#else
    return as_float(__builtin_convertvector(bits, uvec) << 16);
#endif
}

INFINILM_INLINE hvec narrow_bf16(vec v) {
#if !INFINILM_EMULATED && INFINILM_BF16_DOT  // subnormals become zero, which the dot product takes them for
    return (hvec)_mm512_maskz_cvtneps_pbh(0xffff, v);
#else
    const uvec u = as_uint(v);
    const uvec rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    const uvec nan = u >> 16 | 0x40u;  // stays a NaN
    return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded, hvec);
#endif
}

INFINILM_INLINE vec widen_f16(hvec bits) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return _mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
#elif !INFINILM_EMULATED && INFINILM_WIDTH == 8
    return _mm256_cvtph_ps((__m128i)bits);
#elif !INFINILM_EMULATED && defined(__aarch64__)
    return (vec)vcvt_f32_f16((float16x4_t)bits);
#else
    const uvec u = __builtin_convertvector(bits, uvec), magnitude = u & 0x7fffu;
    const uvec normal = (magnitude << 13) + 0x38000000u;
    const uvec special = (magnitude << 13) | 0x7f800000u;                                      // infinity, NaN
    const uvec subnormal = as_uint(__builtin_convertvector((ivec)magnitude, vec) * 0x1p-24f);  // exact
    const uvec finite = magnitude < 0x400u ? subnormal : normal;
    return as_float((u & 0x8000u) << 16 | (magnitude >= 0x7c00u ? special : finite));
#endif
}

INFINILM_INLINE hvec narrow_f16(vec v) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return (hvec)_mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
#elif !INFINILM_EMULATED && INFINILM_WIDTH == 8
    return (hvec)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#elif !INFINILM_EMULATED && defined(__aarch64__)
    return (hvec)vcvt_f16_f32((float32x4_t)v);
#else
    const uvec u = as_uint(v), magnitude = u & 0x7fffffffu;
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
    const uvec subnormal = as_uint(as_float(magnitude) + 0.5f) - 0x3f000000u;
    const uvec normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    uvec out = magnitude < 0x38800000u ? subnormal : normal;
    out = magnitude >= 0x477ff000u ? set1_uint(0x7c00u) : out;  // rounds to infinity
    out = magnitude > 0x7f800000u ? set1_uint(0x7e00u) : out;   // NaN
    return __builtin_convertvector(out | (u >> 16 & 0x8000u), hvec);
#endif
}

// ---- Memory: `width` elements of any stored type from any address, widened to float32, and back ----

// gcc 12 goes through a table of shuffles otherwise.
INFINILM_INLINE ivec widen_bytes(bvec bytes) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return (ivec)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)bytes);
#elif !INFINILM_EMULATED && INFINILM_WIDTH == 8
    int64_t all;
    memcpy(&all, &bytes, sizeof all);
    return (ivec)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(all));
#else
    return __builtin_convertvector(bytes, ivec);
#endif
}

INFINILM_INLINE hvec load_bits(const void* p) { return *(const hvec_mem*)p; }

INFINILM_INLINE uvec load_uint(const void* p) { return *(const uvec_mem*)p; }
INFINILM_INLINE void store_uint(void* p, uvec v) { *(uvec_mem*)p = v; }

INFINILM_INLINE vec load(const float* p) { return *(const vec_mem*)p; }
INFINILM_INLINE vec load(const Bf16* p) {
#if defined(__x86_64__) && INFINILM_WIDTH == 4
    return (vec)_mm_unpacklo_epi16(__m128i{}, _mm_loadl_epi64((const __m128i_u*)p));  // zeros below the 16 bits
#else
    return widen_bf16(load_bits(p));
#endif
}
INFINILM_INLINE vec load(const F16* p) { return widen_f16(load_bits(p)); }
INFINILM_INLINE vec load(const int8_t* p) { return __builtin_convertvector(widen_bytes(*(const bvec_mem*)p), vec); }

INFINILM_INLINE void store(float* p, vec v) { *(vec_mem*)p = v; }
INFINILM_INLINE void store(Bf16* p, vec v) { *(hvec_mem*)p = narrow_bf16(v); }
INFINILM_INLINE void store(F16* p, vec v) { *(hvec_mem*)p = narrow_f16(v); }

// The first n elements, 0 <= n <= width; the other lanes are zero, and nothing beyond the n elements is touched.
INFINILM_INLINE vec load_partial(const float* p, int n) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    vec v{};
    memcpy(&v, p, (size_t)n * 4);
    return v;
#endif
}
INFINILM_INLINE hvec load_bits_partial(const void* p, int n) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return (hvec)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
#else
    hvec v{};
    memcpy(&v, p, (size_t)n * 2);
    return v;
#endif
}
INFINILM_INLINE vec load_partial(const Bf16* p, int n) { return widen_bf16(load_bits_partial(p, n)); }
INFINILM_INLINE vec load_partial(const F16* p, int n) { return widen_f16(load_bits_partial(p, n)); }
INFINILM_INLINE vec load_partial(const int8_t* p, int n) {
    bvec v{};
    memcpy(&v, p, (size_t)n);
    return __builtin_convertvector(widen_bytes(v), vec);
}

// Writes the first n lanes, 0 <= n <= width.
INFINILM_INLINE void store_partial(float* p, vec v, int n) { memcpy(p, &v, (size_t)n * 4); }
INFINILM_INLINE void store_partial(Bf16* p, vec v, int n) {
    const hvec bits = narrow_bf16(v);
    memcpy(p, &bits, (size_t)n * 2);
}
INFINILM_INLINE void store_partial(F16* p, vec v, int n) {
    const hvec bits = narrow_f16(v);
    memcpy(p, &bits, (size_t)n * 2);
}

// ---- Tables of 16 bytes ----

// The same table in each 16 bytes of a vector.
INFINILM_INLINE uvec repeat(const void* table) {
    uvec all;
    for (size_t at = 0; at < sizeof all; at += 16) memcpy((char*)&all + at, table, 16);
    return all;
}
// The bytes of the table that the bytes of `index` name, each 0 to 15.
INFINILM_INLINE uvec look_up(uvec table, uvec index) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return (uvec)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif !INFINILM_EMULATED && INFINILM_WIDTH == 8
    return (uvec)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif !INFINILM_EMULATED && defined(__aarch64__)
    return (uvec)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
    uint8_t values[sizeof table], bytes[sizeof index];
    memcpy(values, &table, sizeof values);
    memcpy(bytes, &index, sizeof bytes);
    for (uint8_t& byte : bytes) byte = values[byte];
    memcpy(&index, bytes, sizeof index);
    return index;
#endif
}

// Whether any byte has none of these bits.
INFINILM_INLINE bool any_byte_lacks(uvec bytes, uint8_t bits) {
#if !INFINILM_EMULATED && INFINILM_WIDTH == 16
    return _mm512_testn_epi8_mask((__m512i)bytes, _mm512_set1_epi8((char)bits)) != 0;
#else
    uint8_t each[sizeof bytes];
    memcpy(each, &bytes, sizeof bytes);
    bool any = false;
    for (const uint8_t byte : each) any |= (byte & bits) == 0;
    return any;
#endif
}

// ---- Functions ----

// e^x to about 1 ulp: x = n ln2 + r, |r| <= ln2 / 2, e^r by a polynomial, 2^n multiplied in two halves so that results
// down to the smallest subnormal are right. -inf -> 0, large -> inf, NaN -> NaN.
INFINILM_INLINE vec exp(vec x) {
    // Beyond these the answer is 0 or infinity; the comparisons are false for NaN, which goes through.
    x = x < -104.0f ? set1(-104.0f) : x;
    x = x > 89.0f ? set1(89.0f) : x;
    const vec shift = set1(0x1.8p23f);  // adding it rounds to an integer, which is left in the low bits
    const vec shifted = fma(x, set1(0x1.715476p0f), shift);
    const vec n = shifted - shift;
    // ln2 in two parts; n times the first is exact.
    vec r = fma(n, set1(-0x1.62e4p-1f), x);
    r = fma(n, set1(-0x1.7f7d1cp-20f), r);
    // Minimax on [-ln2/2, ln2/2], with the first two coefficients held at 1.
    vec p = set1(0x1.6850e4p-10f);
    p = fma(p, r, set1(0x1.123bccp-7f));
    p = fma(p, r, set1(0x1.555b98p-5f));
    p = fma(p, r, set1(0x1.55548ep-3f));
    p = fma(p, r, set1(0x1.fffff8p-2f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    const ivec exponent = (ivec)shifted - 0x4b400000;
    const ivec half = exponent >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((exponent - half + 127) << 23);
}

INFINILM_INLINE vec silu(vec x) { return x / (1.0f + exp(-x)); }
INFINILM_INLINE vec quick_gelu(vec x) { return x / (1.0f + exp(x * -1.702f)); }
// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
INFINILM_INLINE vec gelu_tanh(vec x) {
    const vec u = x * fma(x * x, set1(0.044715f), set1(1.0f));
    return x / (1.0f + exp(u * -1.5957691f));
}
// x times the share of the normal distribution below x, 1/2 + c p(s): an odd function of c, which is x within 5.3 of
// zero, and s = 2 (c / 5.3)^2 - 1. The polynomial was fitted in Chebyshev points to an error of 1e-7, and reaches 1/2
// at both ends, so that the share is 0 and 1 beyond them.
INFINILM_INLINE vec gelu(vec x) {
    vec c = x > 5.3f ? set1(5.3f) : x;
    c = c < -5.3f ? set1(-5.3f) : c;
    const vec s = fma(c * c, set1(0x1.23a25p-4f), set1(-1.0f));
    vec p = set1(-0x1.48aaaap-11f);
    p = fma(p, s, set1(0x1.b5b5aep-10f));
    p = fma(p, s, set1(-0x1.8bb88ap-10f));
    p = fma(p, s, set1(0x1.f79886p-10f));
    p = fma(p, s, set1(-0x1.604170p-8f));
    p = fma(p, s, set1(0x1.3ab93ap-7f));
    p = fma(p, s, set1(-0x1.b88dfcp-7f));
    p = fma(p, s, set1(0x1.31ebc0p-6f));
    p = fma(p, s, set1(-0x1.9d5f0ap-6f));
    p = fma(p, s, set1(0x1.071e2ap-5f));
    p = fma(p, s, set1(-0x1.445fe6p-5f));
    p = fma(p, s, set1(0x1.938daap-5f));
    p = fma(p, s, set1(-0x1.107576p-4f));
    p = fma(p, s, set1(0x1.113022p-3f));
    return x * max(zero(), fma(c, p, set1(0.5f)));
}
// See core/activation.h. A NaN stays one: a comparison with it is false.
INFINILM_INLINE vec relu(vec x) { return x < 0.0f ? set1(0.0f) : x; }
INFINILM_INLINE vec relu2(vec x) { return relu(x) * relu(x); }
// e^c - 1 - c is a series of c within 1 of zero, where the difference would lose most of its digits.
INFINILM_INLINE vec xielu(vec x, float alpha_p, float alpha_n) {
    const vec c = x > -1e-6f ? set1(-1e-6f) : x;
    vec series = set1(1.0f / 39916800);
    series = fma(series, c, set1(1.0f / 3628800));
    series = fma(series, c, set1(1.0f / 362880));
    series = fma(series, c, set1(1.0f / 40320));
    series = fma(series, c, set1(1.0f / 5040));
    series = fma(series, c, set1(1.0f / 720));
    series = fma(series, c, set1(1.0f / 120));
    series = fma(series, c, set1(1.0f / 24));
    series = fma(series, c, set1(1.0f / 6));
    series = fma(series, c, set1(0.5f));
    const vec bend = c > -1.0f ? series * c * c : exp(c) - 1.0f - c;
    const vec below = (bend + (c - x)) * alpha_n, above = x * x * alpha_p;
    return fma(x, set1(0.5f), x > 0.0f ? above : below);
}
INFINILM_INLINE vec clamped_swiglu(vec gate, vec up) {
    gate = gate > 7.0f ? set1(7.0f) : gate;
    up = up > 7.0f ? set1(7.0f) : up;
    up = up < -7.0f ? set1(-7.0f) : up;
    return gate / (1.0f + exp(gate * -1.702f)) * (up + 1.0f);
}
// ln(1 + e^x) = max(x, 0) + ln(1 + u), u = e^-|x|, and ln(1 + u) = 2 artanh(s), s = u / (2 + u), which is at most 1 /
// 3: eight terms of the series leave less than 2e-9 of it.
INFINILM_INLINE vec softplus(vec x) {
    const vec u = exp(x < 0.0f ? x : -x), s = u / (u + 2.0f), square = s * s;
    vec sum = set1(1.0f / 15);
    for (int n = 13; n > 0; n -= 2) sum = fma(sum, square, set1(1.0f / (float)n));
    return (x < 0.0f ? zero() : x) + 2.0f * s * sum;
}
// activation(gate) * up of an activation that is one of gates (is_gate).
INFINILM_INLINE vec gated(Activation activation, vec gate, vec up) {
    return activation == Activation::sigmoid ? up / (1.0f + exp(-gate)) : softplus(gate) * up;
}
INFINILM_INLINE vec clamped_silu(vec gate, vec up, float limit) {
    gate = silu(gate);
    gate = gate > limit ? set1(limit) : gate;
    up = up > limit ? set1(limit) : up;
    up = up < -limit ? set1(-limit) : up;
    return gate * up;
}
INFINILM_INLINE vec activate(Activation activation, vec x) {
    if (activation == Activation::relu2) return relu2(x);
    if (activation == Activation::gelu) return gelu(x);
    if (activation == Activation::quick_gelu) return quick_gelu(x);
    if (activation == Activation::relu) return relu(x);
    return activation == Activation::silu ? silu(x) : gelu_tanh(x);
}
INFINILM_INLINE vec act_mul(Activation activation, vec gate, vec up) {
    return activation == Activation::clamped_swiglu ? clamped_swiglu(gate, up) : activate(activation, gate) * up;
}

// cap * tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap)): off by some 1e-7 of the cap.
INFINILM_INLINE vec soft_cap(vec x, float cap) { return cap - 2 * cap / (1.0f + exp(x * (2 / cap))); }

// ---- Dot product of bf16 pairs ----

#if INFINILM_BF16_DOT
typedef uint16_t dvec __attribute__((vector_size(4 * INFINILM_WIDTH)));
// The lanes of `low`, then those of `high`, in pairs.
INFINILM_INLINE dvec narrow_pairs(vec low, vec high) {
#if !INFINILM_EMULATED
    return (dvec)_mm512_maskz_cvtne2ps_pbh(0xffffffffu, high, low);
#else
    const hvec halves[2] = {narrow_bf16(low), narrow_bf16(high)};
    dvec pairs;
    memcpy(&pairs, halves, sizeof pairs);
    return pairs;
#endif
}
// acc[i] + a[2i+1] * b[2i+1], then + a[2i] * b[2i]: the products are exact in float32, so each step rounds once. The
// instruction also takes subnormals as zero, which the emulation does not.
INFINILM_INLINE vec dot(vec acc, dvec a, dvec b) {
#if !INFINILM_EMULATED
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    const uvec ua = (uvec)a, ub = (uvec)b;
    acc = acc + as_float(ua & 0xffff0000u) * as_float(ub & 0xffff0000u);
    return acc + as_float(ua << 16) * as_float(ub << 16);
#endif
}
#endif

}  // namespace infinilm::cpu::INFINILM_ISA
