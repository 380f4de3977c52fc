// How a tile reads a format: the weights of a line, x beside them, and how one is multiplied with the other. Included
// by linear.h, whose tiles are templates over these.
//
// Each has
//   x_groups         groups of 32 k that convert() makes rows of
//   x_rows           rows of 32 bits that these are of a token
// and those of floats
//   line_units       steps of a line, ascending in k, each of which takes the next row of x; weight(line, scales, unit,
//                    part) are the weights of one, of the outputs [part * width, part * width + width)
//   has_scales       `scales` are those of the line, [16]
//   add              the accumulator of an output
#pragma once

#include "cpu/kernels/int_dot.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/read_scales.h"
#include "cpu/kernels/round_int8.h"
#include "cpu/kernels/simd.h"
#if INFINILM_TILES
#include "cpu/kernels/tile.h"
#endif

namespace infinilm::cpu::INFINILM_ISA {

constexpr int panel_parts = panel_outputs / width;  // vectors of a panel
constexpr int int8_x_groups = 2;                    // of 32 k of x that have one scale beside int8 weights

// ---- Weights widened to float32, multiplied by float32 x ----

struct FloatX {
    static constexpr Format x_format = Format::f32;
    static constexpr int x_groups = 1, x_rows = group_size;
    static constexpr bool has_scales = false;
    static INFINILM_MEMBER void convert(const float* x, uint32_t* rows) { memcpy(rows, x, group_size * sizeof(float)); }
    static INFINILM_MEMBER vec broadcast(const uint32_t* x) { return set1(*(const float_mem*)x); }
    static INFINILM_MEMBER vec add(vec sum, vec x, vec w) { return fma(x, w, sum); }
};
struct F32 : FloatX {
    static constexpr Format format = Format::f32;
    static constexpr int line_units = 1;
    static INFINILM_MEMBER vec weight(const char* line, const char*, int, int part) {
        return load((const float*)line + part * width);
    }
};
struct F16Widened : FloatX {
    static constexpr Format format = Format::f16;
    static constexpr int line_units = 2;
    static INFINILM_MEMBER vec weight(const char* line, const char*, int unit, int part) {
        return load((const F16*)line + unit * panel_outputs + part * width);
    }
};
struct Bf16Widened : FloatX {
    static constexpr Format format = Format::bf16;
    static constexpr int line_units = 2;
    static INFINILM_MEMBER vec weight(const char* line, const char*, int unit, int part) {
        const uvec pair = load_uint(line + part * sizeof(uvec));
        return as_float(unit == 0 ? pair << 16 : pair & 0xffff0000u);
    }
};
// e4m3 times its scale, rounded to float32: what these weights are as plain numbers. The 7 bits of exponent and
// mantissa are placed where float32 has theirs, which is 2 ** 120 too small since the exponents are counted from other
// numbers; the scales make up for it. That is right of subnormal ones as well, which become subnormal ones of float32.
struct F8Widened : FloatX {
    static constexpr Format format = Format::f8_row;
    static constexpr int line_units = 4;
    static constexpr bool has_scales = true;
    typedef int16_t svec __attribute__((vector_size(4 * INFINILM_WIDTH)));
    static INFINILM_MEMBER vec weight(const char* line, const char* scales, int unit, int part) {
        const uvec quad = load_uint(line + part * sizeof(uvec));
        // Two at a time, as the upper 16 bits of floats: the even bytes of a lane, then the odd ones.
        const uvec pair = (uvec)((unit < 2 ? (svec)quad << 8 : (svec)quad) >> 4) & 0x87f087f0u;
        const uvec bits = unit % 2 == 0 ? pair << 16 : pair & 0xffff0000u;
        return as_float(bits) * load((const float*)scales + part * width);
    }
};

// ---- bf16 weights multiplied by x rounded to bf16 ----

#if INFINILM_BF16_DOT || INFINILM_TILES
struct PairX {
    static constexpr int x_groups = 1, x_rows = group_size / 2;
    static constexpr bool has_scales = false;
    static INFINILM_MEMBER void convert(const float* x, uint32_t* rows) {
        for (int k = 0; k < group_size; k += width) store((Bf16*)rows + k, load(x + k));
    }
};
#endif
#if INFINILM_BF16_DOT
struct Bf16Dots : PairX {
    static constexpr Format format = Format::bf16;
    static constexpr int line_units = 1;
    static constexpr bool reads_whole_panels = true;  // see multiply() of linear.h
    static INFINILM_MEMBER dvec broadcast(const uint32_t* x) { return (dvec)set1_uint(*x); }
    static INFINILM_MEMBER dvec weight(const char* line, const char*, int, int part) {
        return (dvec)load_uint(line + part * sizeof(uvec));
    }
    static INFINILM_MEMBER vec add(vec sum, dvec x, dvec w) { return dot(sum, w, x); }
};
#endif

#if INFINILM_TILES
// In matrix tiles: 32 k of a panel are a B tile as they lie, x is A, [16 or 32 tokens][32 k].
struct Bf16Tiles : PairX {
    static constexpr Format format = Format::bf16;
    static constexpr int tile_tokens = 2 * tile_rows, least_tokens = tile_rows, tile_panels = 2, tile_words = x_rows;
    using Registers = Tiles;
    static constexpr TileShapes tile_shapes = bf16_shapes;
    // See TileArgs. Sums are C tiles as they lie.
    template <int T>
    static INFINILM_MEMBER void multiply(int64_t k_groups, const uint32_t* x, const char* weights, int64_t panel_stride,
                                         int64_t ahead, float* sums, bool first) {
        constexpr int c_tile = tile_rows * panel_outputs, a_tile = tile_rows * x_rows;
        constexpr bool two = T > tile_rows;
        if (first) {
            Tiles::clear<0>(), Tiles::clear<1>(), Tiles::clear<2>(), Tiles::clear<3>();
        } else {
            Tiles::load<0>(sums), Tiles::load<1>(sums + T * panel_outputs);
            if constexpr (two) Tiles::load<2>(sums + c_tile), Tiles::load<3>(sums + T * panel_outputs + c_tile);
        }
        for (int64_t group = 0; group < k_groups; ++group, x += T * x_rows, weights += tile_bytes) {
#pragma GCC unroll 16
            for (int line = 0; line < tile_bytes; line += line_bytes) {
                __builtin_prefetch(weights + line + ahead);
                __builtin_prefetch(weights + panel_stride + line + ahead);
            }
            Tiles::load<first_a>(x);
            Tiles::load<first_b>(weights);
            Tiles::multiply_add_bf16<0, first_a, first_b>();
            Tiles::load<first_b + 1>(weights + panel_stride);
            Tiles::multiply_add_bf16<1, first_a, first_b + 1>();
            if constexpr (two) {
                Tiles::load<first_a + 1>(x + a_tile);
                Tiles::multiply_add_bf16<2, first_a + 1, first_b>();
                Tiles::multiply_add_bf16<3, first_a + 1, first_b + 1>();
            }
        }
        Tiles::store<0>(sums), Tiles::store<1>(sums + T * panel_outputs);
        if constexpr (two) Tiles::store<2>(sums + c_tile), Tiles::store<3>(sums + T * panel_outputs + c_tile);
    }
};
#endif

#if INFINILM_BF16_DOT || INFINILM_TILES
// e4m3 beside x rounded to bf16: bf16 has every number of e4m3, so that codes are made bf16, and scales are left to the
// sums of what shares them, whose products stay exact. k 0 and 1 of a lane are its even bytes, 2 and 3 the odd ones.
struct E4m3Codes {
    typedef int16_t svec __attribute__((vector_size(4 * INFINILM_WIDTH)));
    static INFINILM_MEMBER uvec even(uvec quad) { return to_bf16((svec)quad << 8, quad); }
    static INFINILM_MEMBER uvec odd(uvec quad) { return to_bf16((svec)quad, quad); }

private:
    // Converts the codes in the upper bytes of 16 bits. Exponents are counted from 127 instead of 7. Subnormal numbers
    // of e4m3, which few weights are, are normal ones of bf16 and come from a table: the lower bytes of 0 to 7 times
    // 2 ** -9, then the upper ones.
    static INFINILM_MEMBER uvec to_bf16(svec codes, uvec quad) {
        const uvec bits = (uvec)(codes >> 4) & 0x87f087f0u, normal = bits + (120u << 23 | 120u << 7);
        if (__builtin_expect(!any_byte_lacks(quad, 0x78), true)) return normal;
        constexpr uvec4 table = {0xc0800000u, 0x60402000u, 0x3b3b3b00u, 0x3c3c3c3cu};
        const uvec mantissas = ((uvec)codes >> 8 & 0x00070007u) | ((uvec)codes & 0x07000700u) | 0x08000800u;
        const uvec subnormal = look_up(repeat(&table), mantissas) | (bits & 0x80008000u);
        const uvec is_normal = (uvec)(((svec)bits & (int16_t)0x7f80) != 0);
        return (is_normal & normal) | (~is_normal & subnormal);
    }
};
// Sums of `Multiplied` that share a scale, times it.
template <class Multiplied_>
struct Scaled : Multiplied_ {
    using Multiplied = Multiplied_;
};
// The panels of a block are made bf16 before it is multiplied with many tokens,
template <class Multiplied_>
struct MadeBf16 : Scaled<Multiplied_> {
    static INFINILM_MEMBER void expand(const char* line, char* to) {
        for (int part = 0; part < panel_parts; ++part, line += sizeof(uvec), to += sizeof(uvec)) {
            const uvec quad = load_uint(line);
            store_uint(to, E4m3Codes::even(quad)), store_uint(to + line_bytes, E4m3Codes::odd(quad));
        }
    }
};
#endif
#if INFINILM_BF16_DOT
// .. and in registers beside a few, which wait for weights to come from memory.
struct E4m3Dots : Bf16Dots {
    static constexpr Format format = Format::f8_row;
    static constexpr int line_units = 2, most_tokens = 4;
    static constexpr int panels_alone = 4;  // each output waits for two products of a line, one after the other
    static INFINILM_MEMBER dvec weight(const char* line, const char*, int unit, int part) {
        const uvec quad = load_uint(line + part * sizeof(uvec));
        return (dvec)(unit == 0 ? E4m3Codes::even(quad) : E4m3Codes::odd(quad));
    }
};
#endif

// ---- Integers, multiplied by x as int8 with a scale for each 32 * x_groups of a token ----
//
// Besides, each has
//   Dot               of int_dot.h
//   bytes(lines, quad, part)    weights of a group of 32 k plus `plus`, as bytes; weight() as Dot takes them
//   splits            parts of a group's k; each has a sum and a scale of its own
//   has_min           what a scale and a sum make is minus minimum * (sum of x) as well
//   has_read_scales   scales come by read_scales.h; else scaled() gives the factor of a sum

// Rows 0 to x_quads - 1 are x. The next one is its scale, then come (of each split) the bias of int_dot.h or, of
// formats with minima, minus the sum of x as a float.
template <class Dot_, int x_groups_ = 1, int splits_ = 1, bool has_min_ = false>
struct QuantisedX {
    using Dot = Dot_;
    static constexpr int x_groups = x_groups_, splits = splits_;
    static constexpr int num_quads = group_size / 4, x_quads = x_groups * num_quads, x_rows = x_quads + 1 + splits;
    static constexpr bool has_min = has_min_, has_read_scales = false;
    INFINILM_MEMBER void read(const PackedWeight&) {}  // what all lines share
    static INFINILM_MEMBER void convert(const float* x, uint32_t* rows) {
        constexpr int size = x_groups * group_size;
        Int8Rounding rounding;
        for (int k = 0; k < size; k += width) rounding.see(load(x + k));
        const float scale = rounding.scale();
        uvec sums[splits] = {};  // of NaN integers of any size, whose scale is NaN whatever they are
        for (int k = 0; k < size; k += width) {
            const ivec q = rounding.round(load(x + k));
            const bvec bytes = __builtin_convertvector(q, bvec);
            memcpy((char*)rows + k, &bytes, sizeof bytes);
            if constexpr (width <= size / splits) sums[k * splits / size] += (uvec)q;
        }
        memcpy(rows + x_quads, &scale, 4);
        for (int split = 0; split < splits; ++split) {
            int32_t sum = reduce_add((ivec)sums[split]);
            if constexpr (width > size / splits)
                for (int k = split * size / splits; k < (split + 1) * size / splits; ++k)
                    sum += ((const int8_t*)rows)[k];
            const float minus_sum = -scale * (float)sum;
            const uint32_t bias = 0u - (uint32_t)Dot::offset * (uint32_t)sum;
            memcpy(rows + x_quads + 1 + split, has_min ? (const void*)&minus_sum : (const void*)&bias, 4);
        }
    }
    static INFINILM_MEMBER ivec broadcast(const uint32_t* x) { return set1_int((int32_t)*x); }
    static INFINILM_MEMBER vec broadcast_float(const uint32_t* x) { return set1(*(const float_mem*)x); }
};

// Quad `quad` of a plane of so many bits, moved to the left by `shift`.
template <int bits, int shift>
INFINILM_INLINE uvec read_plane(const char* lines, int quad, int part) {
    constexpr int per_line = 8 / bits;
    constexpr uint32_t mask = (((1u << bits) - 1) << shift) * 0x01010101u;
    const uvec bytes = load_uint(lines + quad / per_line * line_bytes + part * sizeof(uvec));
    const int by = quad % per_line * bits - shift;
    return (by < 0 ? bytes << -by : bytes >> by) & mask;
}
// Unsigned bytes of so many bits.
template <int bits>
INFINILM_INLINE uvec read_planes(const char* lines, int quad, int part) {
    static_assert(bits >= 2 && bits <= 6);
    constexpr int widest = bits & 4 ? 4 : 2, rest = bits - widest;
    uvec bytes = read_plane<widest, 0>(lines, quad, part);
    if constexpr (rest > 0) bytes |= read_plane<rest, widest>(lines + widest * line_bytes, quad, part);
    return bytes;
}

template <int x_groups>
struct SignedBytes : QuantisedX<Int8Dot, x_groups> {
    static constexpr int group_lines = 8, plus = 0;
    static INFINILM_MEMBER uvec bytes(const char* lines, int quad, int part) {
        return load_uint(lines + quad * line_bytes + part * sizeof(uvec));
    }
    static INFINILM_MEMBER Int8Dot::Weight weight(const char* lines, int quad, int part) {
        return Int8Dot::weight(bytes(lines, quad, part));
    }
};
struct Int8 : SignedBytes<int8_x_groups> {
    // The scale of the output comes at the end.
    static INFINILM_MEMBER vec group_scale(const char*, int64_t, int) { return set1(1.0f); }
    static INFINILM_MEMBER vec scaled(vec scale_of_x, vec) { return scale_of_x; }
};
// One float for each output and group.
template <class Scale>
struct GroupScales {
    static INFINILM_MEMBER vec group_scale(const char* scales, int64_t group, int part) {
        return load((const Scale*)scales + group * panel_outputs + part * width);
    }
    static INFINILM_MEMBER vec scaled(vec scale_of_x, vec scale) { return scale_of_x * scale; }
};
struct Q8_0 : SignedBytes<1>, GroupScales<F16> {};
// Numbers of `bits` bits, in the planes of pack.h.
template <int bits, int offset, int splits = 1, bool has_min = false>
struct Planes : QuantisedX<UnsignedDot<bits, offset, 8 / splits>, 1, splits, has_min>, GroupScales<float> {
    static constexpr int group_lines = bits, plus = offset;
    static constexpr bool has_read_scales = true;
    static INFINILM_MEMBER uvec bytes(const char* lines, int quad, int part) {
        return read_planes<bits>(lines, quad, part);
    }
    static INFINILM_MEMBER auto weight(const char* lines, int quad, int part) {
        return UnsignedDot<bits, offset, 8 / splits>::weight(bytes(lines, quad, part));
    }
};
template <class Scale>
struct Int4 : Planes<4, int4_offset>, GroupScales<Scale> {
    static constexpr bool has_read_scales = false;
    using GroupScales<Scale>::group_scale, GroupScales<Scale>::scaled;
};
// Numbers of 3 or 4 bits that stand for one of as many values each.
template <int bits, int splits = 1>
struct Values : QuantisedX<Int8Dot, 1, splits>, GroupScales<float> {
    static constexpr int group_lines = bits, plus = 0;
    static constexpr bool has_read_scales = true;
    INFINILM_MEMBER void read(const PackedWeight& weight) { values = repeat(weight.values); }
    INFINILM_MEMBER uvec bytes(const char* lines, int quad, int part) const {
        return look_up(values, read_planes<bits>(lines, quad, part));
    }
    INFINILM_MEMBER Int8Dot::Weight weight(const char* lines, int quad, int part) const {
        return Int8Dot::weight(bytes(lines, quad, part));
    }
    uvec values{};
};

#if INFINILM_TILES
// In matrix tiles: 64 k of a panel as bytes are a B tile, 32 k half of one; x is A, [16 tokens][32 * x_groups k].
template <class F>
struct IntegerTiles : F {
    static constexpr int tile_tokens = tile_rows, least_tokens = tile_rows, tile_panels = 1, tile_words = F::x_quads;
    using Registers = Tiles;
    static constexpr TileShapes tile_shapes = int8_shapes;
    static constexpr bool stored_as_bytes = F::group_lines == 8;
};
#endif

}  // namespace infinilm::cpu::INFINILM_ISA
