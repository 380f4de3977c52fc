// The scales of a panel as numbers, for formats that store them otherwise than one float for a group. Numbers of an
// output and scale_groups groups of 32 k are, each [16 outputs]:
//   q4_1, q5_1        scale, then what is added, which is minus the minimum, float16
//   q5_0, iq4_nl      scale, float16
//   mxfp4             scale, bfloat16
//   z4_32 to z4_128   of 1, 2 or 4 groups: scale, float16; zero point, int8
//   q4_k, q5_k        of 8 groups: factor of the scales and of the minima, float16; 3 words of 6-bit numbers, which are
//                     the 12 bytes of a file
//   q3_k, q6_k        of 16 halves of groups: 4 words of int8 scales, in the order of k; their factor, float16
//   iq4_xs            of 8 groups: 2 words of int8 scales; their factor, float16
//   tq2_0             of 8 groups: scale, float16
//   q2_k              4 words of bytes: scale in the low half, minimum in the high one; factors of both, float16
//   iq1, iq2, iq3     of 8 groups: words of 4-bit numbers n, one of each split in the order of k; their factor,
//   float16.
//                     A scale is 2 n + 1 times the factor; of iq1 three bits are n, and the fourth one says whether the
//                     minimum is 9/8 or 7/8 of the scale
//   nvfp4             of 4 halves of groups: a word of e4m3 scales, whose signs count for nothing
// Every product here is exact in float32.
#pragma once

#include "cpu/kernels/pack.h"
#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int most_scale_groups = 8, most_splits = 4;

// Scales and minima as [group][split of it][16].
using ReadScales = void (*)(const char* stored, int num_groups, float* scales, float* minima);

INFINILM_INLINE vec from_bits(uvec v) { return __builtin_convertvector((ivec)v, vec); }

template <Format format>
static void read_scales(const char* stored, int num_groups, float* scales, float* minima) {
    constexpr Integers integers = integers_of(format);
    constexpr int64_t row = panel_outputs;
    if constexpr (format == Format::nvfp4) {
        for (int64_t to = 0; to < num_groups * integers.splits * row; to += 4 * row, stored += line_bytes)
            for (int64_t at = 0; at < panel_outputs; at += width) {
                const uvec word = load_uint(stored + 4 * at);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j)  // values are twice as large
                    store(scales + to + j * row + at, as_float((word >> (8 * j) & 0x7fu) << 20) * 0x1p119f);
            }
    } else if constexpr (integers.scale_unit != 0) {
        for (int64_t at = 0; at < panel_outputs; at += width) {
            const vec factor = load((const F16*)(stored + integers.splits * line_bytes) + at) * integers.scale_unit;
#pragma GCC unroll 4
            for (int i = 0; i < integers.splits; ++i) {
                const uvec word = load_uint(stored + i * line_bytes + 4 * at);
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) {
                    const int64_t to = (8 * i + j) * row + at;
                    const uvec n = word >> (4 * j) & (integers.has_min ? 7u : 15u);
                    const vec scale = factor * from_bits(n + n + 1u);
                    store(scales + to, scale);
                    if constexpr (integers.has_min)
                        store(minima + to, scale * (from_bits(word >> (4 * j + 3) & 1u) * 0.25f + 0.875f));
                }
            }
        }
    } else if constexpr (integers.scale_bytes <= 4) {  // one for all groups that are stored together
        constexpr int64_t bytes = integers.scale_bytes * panel_outputs;
        for (int group = 0; group < num_groups; group += integers.scale_groups, stored += bytes)
            for (int64_t at = 0; at < panel_outputs; at += width) {
                const vec scale =
                    format == Format::mxfp4 ? load((const Bf16*)stored + at) : load((const F16*)stored + at);
                vec min = zero();
                if constexpr (integers.has_zero)
                    min = scale * load((const int8_t*)stored + 2 * row + at);
                else if constexpr (integers.has_min)
                    min = -load((const F16*)stored + row + at);
                else if constexpr (format == Format::q5_0)
                    min = scale * (float)integers.offset;
                for (int of_scale = 0; of_scale < integers.scale_groups; ++of_scale) {
                    const int64_t to = (group + of_scale) * row + at;
                    store(scales + to, scale);
                    if constexpr (integers.has_min || format == Format::q5_0) store(minima + to, min);
                }
            }
    } else if constexpr (integers.bits >= 4 && integers.has_min) {
        for (int64_t at = 0; at < panel_outputs; at += width) {
            const vec scale = load((const F16*)stored + at), min = load((const F16*)stored + row + at);
            const auto word = [&](int i) { return load_uint(stored + i * line_bytes + 4 * at); };
            // Byte j: of group j, then of group j + 4, whose upper 2 bits are beside those of group j.
            const uvec first = word(1), second = word(2), third = word(3);
            const uvec low_scales = first & 0x3f3f3f3fu, low_minima = second & 0x3f3f3f3fu;
            const uvec high_scales = (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
            const uvec high_minima = (third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const auto byte = [&](uvec v) { return from_bits(v >> (8 * j) & 0xffu); };
                store(scales + j * row + at, scale * byte(low_scales));
                store(minima + j * row + at, min * byte(low_minima));
                store(scales + (j + 4) * row + at, scale * byte(high_scales));
                store(minima + (j + 4) * row + at, min * byte(high_minima));
            }
        }
    } else {
        for (int64_t at = 0; at < panel_outputs; at += width) {
            constexpr int lines = integers.scale_groups * integers.splits / 4;
            const char* const factors = stored + lines * line_bytes;
            const vec scale = load((const F16*)factors + at);
            const vec min = integers.has_min ? load((const F16*)factors + row + at) : zero();
#pragma GCC unroll 4
            for (int line = 0; line < lines; ++line) {
                const uvec word = load_uint(stored + line * line_bytes + 4 * at);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const int64_t to = (4 * line + j) * row + at;
                    if constexpr (integers.has_min) {
                        store(scales + to, scale * from_bits(word >> (8 * j) & 15u));
                        store(minima + to, min * from_bits(word >> (8 * j + 4) & 15u));
                    } else {
                        const ivec number = (ivec)(word << (24 - 8 * j)) >> 24;
                        store(scales + to, scale * __builtin_convertvector(number, vec));
                    }
                }
            }
        }
    }
}

INFINILM_INLINE ReadScales scale_reader(Format format) {
    switch (format) {
        case Format::q4_1: return read_scales<Format::q4_1>;
        case Format::q5_0: return read_scales<Format::q5_0>;
        case Format::q5_1: return read_scales<Format::q5_1>;
        case Format::q2_k: return read_scales<Format::q2_k>;
        case Format::q3_k: return read_scales<Format::q3_k>;
        case Format::q4_k: return read_scales<Format::q4_k>;
        case Format::q5_k: return read_scales<Format::q5_k>;
        case Format::q6_k: return read_scales<Format::q6_k>;
        case Format::iq4_nl: return read_scales<Format::iq4_nl>;
        case Format::iq4_xs: return read_scales<Format::iq4_xs>;
        case Format::tq2_0: return read_scales<Format::tq2_0>;
        case Format::iq1_s: return read_scales<Format::iq1_s>;
        case Format::iq1_m: return read_scales<Format::iq1_m>;
        case Format::iq2_xxs: return read_scales<Format::iq2_xxs>;
        case Format::iq2_xs: return read_scales<Format::iq2_xs>;
        case Format::iq3_xxs: return read_scales<Format::iq3_xxs>;
        case Format::iq3_s: return read_scales<Format::iq3_s>;
        case Format::mxfp4: return read_scales<Format::mxfp4>;
        case Format::nvfp4: return read_scales<Format::nvfp4>;
        case Format::z4_32: return read_scales<Format::z4_32>;
        case Format::z4_64: return read_scales<Format::z4_64>;
        case Format::z4_128: return read_scales<Format::z4_128>;
        default: return nullptr;  // one float for a group or an output
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
