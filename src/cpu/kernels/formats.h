// How a tile reads a format: the weights of a line, x beside them, and how one is multiplied with the other. Included
// by linear.h, whose tiles are templates over these.
//
// Each has
//   line_units       steps of a line, ascending in k; weight(line, unit, part) are the weights of one, of the outputs
//                    [part * width, part * width + width)
//   x_rows           rows of 32 bits that 32 k of a token are; convert() makes them, and each unit takes the next one
//   Sum, add         the accumulator of an output
#pragma once

#include "cpu/kernels/int_dot.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/round_int8.h"
#include "cpu/kernels/simd.h"
#if INFINILM_BF16_TILE
#include "cpu/kernels/tile.h"
#endif

namespace infinilm::cpu::INFINILM_ISA {

constexpr int panel_parts = panel_outputs / width;  // vectors of a panel

// ---- Weights widened to float32, multiplied by float32 x ----

struct FloatX {
    static constexpr Format x_format = Format::f32;
    static constexpr int x_rows = group_size;
    static INFINILM_MEMBER void convert(const float* x, uint32_t* rows) { memcpy(rows, x, group_size * sizeof(float)); }
    static INFINILM_MEMBER vec broadcast(const uint32_t* x) { return set1(*(const float_mem*)x); }
    static INFINILM_MEMBER vec add(vec sum, vec x, vec w) { return fma(x, w, sum); }
};
struct F32 : FloatX {
    static constexpr Format format = Format::f32;
    static constexpr int line_units = 1;
    static INFINILM_MEMBER vec weight(const char* line, int, int part) {
        return load((const float*)line + part * width);
    }
};
struct F16Widened : FloatX {
    static constexpr Format format = Format::f16;
    static constexpr int line_units = 2;
    static INFINILM_MEMBER vec weight(const char* line, int unit, int part) {
        return load((const F16*)line + unit * panel_outputs + part * width);
    }
};
struct Bf16Widened : FloatX {
    static constexpr Format format = Format::bf16;
    static constexpr int line_units = 2;
    static INFINILM_MEMBER vec weight(const char* line, int unit, int part) {
        const uvec pair = load_uint(line + part * sizeof(uvec));
        return as_float(unit == 0 ? pair << 16 : pair & 0xffff0000u);
    }
};

// ---- bf16 weights multiplied by x rounded to bf16 ----

#if INFINILM_BF16_DOT || INFINILM_BF16_TILE
struct PairX {
    static constexpr int x_rows = group_size / 2;
    static INFINILM_MEMBER void convert(const float* x, uint32_t* rows) {
        for (int k = 0; k < group_size; k += width) store((Bf16*)rows + k, load(x + k));
    }
};
#endif
#if INFINILM_BF16_DOT
struct Bf16Dots : PairX {
    static constexpr Format format = Format::bf16;
    static constexpr int line_units = 1;
    static INFINILM_MEMBER dvec broadcast(const uint32_t* x) { return (dvec)set1_uint(*x); }
    static INFINILM_MEMBER dvec weight(const char* line, int, int part) {
        return (dvec)load_uint(line + part * sizeof(uvec));
    }
    static INFINILM_MEMBER vec add(vec sum, dvec x, dvec w) { return dot(sum, w, x); }
};
#endif

#if INFINILM_BF16_TILE
// In matrix tiles: 32 k of a panel are a B tile as they lie, x is A, [16 or 32 tokens][32 k].
struct Bf16Tiles : PairX {
    static constexpr Format format = Format::bf16;
    static constexpr int tile_tokens = 2 * tile_rows;
    using Registers = Tiles;
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
            Tiles::multiply_add<0, first_a, first_b>();
            Tiles::load<first_b + 1>(weights + panel_stride);
            Tiles::multiply_add<1, first_a, first_b + 1>();
            if constexpr (two) {
                Tiles::load<first_a + 1>(x + a_tile);
                Tiles::multiply_add<2, first_a + 1, first_b>();
                Tiles::multiply_add<3, first_a + 1, first_b + 1>();
            }
        }
        Tiles::store<0>(sums), Tiles::store<1>(sums + T * panel_outputs);
        if constexpr (two) Tiles::store<2>(sums + c_tile), Tiles::store<3>(sums + T * panel_outputs + c_tile);
    }
};
#endif

// ---- int8 and int4 weights, multiplied by x as int8 with a scale for each 32 of a token ----

// Row 8 is the scale of x, row 9 the bias of int_dot.h.
template <class Dot>
struct QuantisedX {
    static constexpr int num_quads = group_size / 4, x_rows = num_quads + 2;
    static INFINILM_MEMBER void convert(const float* x, uint32_t* rows) {
        Int8Rounding rounding;
        for (int k = 0; k < group_size; k += width) rounding.see(load(x + k));
        const float scale = rounding.scale();
        ivec sums{};
        for (int k = 0; k < group_size; k += width) {
            const ivec q = rounding.round(load(x + k));
            const bvec bytes = __builtin_convertvector(q, bvec);
            memcpy((char*)rows + k, &bytes, sizeof bytes);
            sums += q;
        }
        // Unsigned, since NaN gives integers of any size; its scale is NaN, whatever they are.
        uint32_t sum = 0;
        for (int i = 0; i < width; ++i) sum += (uint32_t)sums[i];
        const uint32_t bias = 0u - (uint32_t)Dot::offset * sum;
        memcpy(rows + num_quads, &scale, 4);
        memcpy(rows + num_quads + 1, &bias, 4);
    }
    static INFINILM_MEMBER ivec broadcast(const uint32_t* x) { return set1_int((int32_t)*x); }
};
struct Int8 : QuantisedX<Int8Dot> {
    using Dot = Int8Dot;
    static constexpr Format format = Format::int8;
    static constexpr int line_units = 1, group_lines = 8;
    static INFINILM_MEMBER Dot::Weight weight(const char* line, int, int part) {
        return Int8Dot::weight(load_uint(line + part * sizeof(uvec)));
    }
    // The factor of a group's sums: that of the output comes at the end.
    static INFINILM_MEMBER vec group_scale(const char*, int64_t, int) { return set1(1.0f); }
    static INFINILM_MEMBER vec scaled(vec scale_of_x, vec) { return scale_of_x; }
};
// With a scale for each output and group.
template <class Scale>
INFINILM_INLINE vec load_group_scale(const char* scales, int64_t group, int part) {
    return load((const Scale*)scales + group * panel_outputs + part * width);
}
struct Q8_0 : Int8 {
    static constexpr Format format = Format::q8_0;
    static INFINILM_MEMBER vec group_scale(const char* scales, int64_t group, int part) {
        return load_group_scale<F16>(scales, group, part);
    }
    static INFINILM_MEMBER vec scaled(vec scale_of_x, vec scale) { return scale_of_x * scale; }
};
struct Int4 : QuantisedX<Int4Dot> {
    using Dot = Int4Dot;
    static constexpr Format format = Format::int4;
    static constexpr int line_units = 2, group_lines = 4;
    static INFINILM_MEMBER Dot::Weight weight(const char* line, int unit, int part) {
        const uvec bytes = load_uint(line + part * sizeof(uvec));
        return Int4Dot::weight((unit == 0 ? bytes : bytes >> 4) & 0x0f0f0f0fu);
    }
    static INFINILM_MEMBER vec group_scale(const char* scales, int64_t group, int part) {
        return load_group_scale<Bf16>(scales, group, part);
    }
    static INFINILM_MEMBER vec scaled(vec scale_of_x, vec scale) { return scale_of_x * scale; }
};
struct Q4_0 : Int4 {
    static constexpr Format format = Format::q4_0;
    static INFINILM_MEMBER vec group_scale(const char* scales, int64_t group, int part) {
        return load_group_scale<F16>(scales, group, part);
    }
};

}  // namespace infinilm::cpu::INFINILM_ISA
