// The one layout of packed weights, the same for every instruction set. A panel is 16 outputs: 64-byte lines, each with
// the next k (in_features) of all 16, in 16 lanes of 32 bits:
//   f32   [k][16]              a line holds 1 k
//   bf16  [k / 2][16][2]       2
//   f16   [k / 2][2][16]       2, one behind the other: they are widened 16 at a time
//   f8    [k / 4][16][4]       4 in the order 0, 2, 1, 3 (f8_place): f8_row, f8_32 and f8_128
// Integers of b bits have b lines for each group of 32 k. A lane has 4 k beside each other, one a byte: k 4n .. 4n + 3
// are quad n of the group. Integers of 8 bits are signed, others are not, and have a plane of lines for each bit of b,
// the widest first: in a plane of p bits, a line holds 8 / p quads, quad n in the bits from p * (n % (8 / p)) on of
// each byte. So 4 bits are the low halves of a line's bytes, then the high ones; 6 bits are the lower 4 in four lines
// and the upper 2 in two.
//
// Scales of f8 are float32: [panels][16] of f8_row, as those of int8, and [panels][k / 32 or k / 128][16]. They are
// 2 ** 120 times as large as they count, which is what widening to float32 leaves out (formats.h).
//
// What an integer q stands for is scale * (q - offset) - minimum, or scale * values[q]. Scales of int8 are float32
// [panels][16], one for each output. Those of others are [panels][k / (32 * scale_groups)][scale_bytes * 16], in which
// number i of an output is at [i][16]; see read_scales.h.
//
// k is padded with zeros to whole groups of 32, at least one, outputs to whole pairs of panels.
#pragma once

#include "cpu/kernels/kernels.h"
#include "numerics/quantise.h"

namespace infinilm::cpu {

constexpr int panel_outputs = 16;
constexpr int line_bytes = 64;
constexpr int group_size = quantise::group;  // of k
constexpr int int4_offset = 8;

constexpr float f8_scale_factor = 0x1p120f, f8_to_scale = 0x1p-120f;
static inline constexpr int f8_place(int k) { return k == 1 ? 2 : k == 2 ? 1 : k; }  // of k 0 to 3 in a lane

// What formats of integers differ in.
struct Integers {
    int bits;
    int offset = 0;
    int scale_groups = 1;  // groups of 32 k whose scales are stored together
    int scale_bytes = 2;   // of an output, of so many groups; int8: has one for all k
    int splits = 1;        // of a group's 32 k: each has a scale, and a minimum, of its own
    bool has_min = false;
    bool has_zero = false;    // a byte is stored, which the minimum is a multiple of: scale * zero
    bool has_values = false;  // an integer is the number of one of PackedWeight::values
    float scale_unit = 0;     // not 0: scales are odd multiples of the block's factor times this
};
static inline constexpr Integers zero_points(int scale_groups) {
    return {.bits = 4, .scale_groups = scale_groups, .scale_bytes = 3, .has_min = true, .has_zero = true};
}
// 4 bits for each split of 256 k, and a factor in float16.
static inline constexpr Integers odd_multiples(Integers integers) {
    integers.scale_groups = 8, integers.scale_bytes = 4 * integers.splits + 2;
    return integers;
}
static inline constexpr Integers integers_of(Format format) {
    switch (format) {
        case Format::int8: return {.bits = 8, .scale_bytes = 0};
        case Format::q8_0: return {.bits = 8};
        case Format::int4:
        case Format::q4_0: return {.bits = 4, .offset = int4_offset};
        case Format::q4_1: return {.bits = 4, .scale_bytes = 4, .has_min = true};
        case Format::q5_0: return {.bits = 5, .offset = 16};
        case Format::q5_1: return {.bits = 5, .scale_bytes = 4, .has_min = true};
        case Format::q2_k: return {.bits = 2, .scale_groups = 8, .scale_bytes = 20, .splits = 2, .has_min = true};
        case Format::q3_k: return {.bits = 3, .offset = 4, .scale_groups = 8, .scale_bytes = 18, .splits = 2};
        case Format::q4_k: return {.bits = 4, .scale_groups = 8, .scale_bytes = 16, .has_min = true};
        case Format::q5_k: return {.bits = 5, .scale_groups = 8, .scale_bytes = 16, .has_min = true};
        case Format::q6_k: return {.bits = 6, .offset = 32, .scale_groups = 8, .scale_bytes = 18, .splits = 2};
        case Format::z4_32: return zero_points(1);
        case Format::z4_64: return zero_points(2);
        case Format::z4_128: return zero_points(4);
        case Format::tq2_0: return {.bits = 2, .offset = 1, .scale_groups = 8, .scale_bytes = 2};
        case Format::iq4_xs: return {.bits = 4, .scale_groups = 8, .scale_bytes = 10, .has_values = true};
        case Format::iq1_s: return odd_multiples({.bits = 2, .has_min = true, .scale_unit = 1.0f});
        case Format::iq1_m: return odd_multiples({.bits = 2, .splits = 4, .has_min = true, .scale_unit = 1.0f});
        case Format::iq2_xxs: return odd_multiples({.bits = 3, .has_values = true, .scale_unit = 0.125f});
        case Format::iq2_xs: return odd_multiples({.bits = 3, .splits = 2, .has_values = true, .scale_unit = 0.125f});
        case Format::iq3_xxs: return odd_multiples({.bits = 4, .has_values = true, .scale_unit = 0.25f});
        case Format::iq3_s: return odd_multiples({.bits = 4, .has_values = true, .scale_unit = 1.0f});
        case Format::nvfp4: return {.bits = 4, .scale_groups = 2, .scale_bytes = 4, .splits = 2, .has_values = true};
        case Format::iq4_nl:
        case Format::mxfp4: return {.bits = 4, .has_values = true};
        default: return {.bits = 0};  // floats
    }
}

static inline constexpr bool is_f8(Format format) {
    return format == Format::f8_row || format == Format::f8_32 || format == Format::f8_128;
}
static inline constexpr int lines_of_group(Format format) {
    const int bits = integers_of(format).bits;
    if (bits > 0) return bits;
    return format == Format::f32 ? group_size : is_f8(format) ? group_size / 4 : group_size / 2;
}
static inline constexpr int64_t num_groups(int64_t in_features) {
    return in_features == 0 ? 1 : (in_features + group_size - 1) / group_size;
}
static inline constexpr int64_t panel_bytes(Format format, int64_t in_features) {
    return num_groups(in_features) * lines_of_group(format) * line_bytes;
}
static inline constexpr int64_t scale_bytes_of_group(Format format) {
    if (format == Format::f8_32) return 4 * panel_outputs;
    if (format == Format::f8_128) return 4 * panel_outputs / 4;  // those of 128 k lie together
    const Integers integers = integers_of(format);
    return integers.bits == 0 ? 0 : integers.scale_bytes * panel_outputs / integers.scale_groups;
}
// Where the scales of group `group` of an f8 panel are: a group may have its own, or share those of four, or of all.
static inline constexpr int64_t f8_scales_at(int64_t scale_bytes_of_group, int64_t group) {
    constexpr int64_t bytes = sizeof(float) * panel_outputs;
    return group * scale_bytes_of_group / bytes * bytes;
}
static inline constexpr int64_t scale_bytes_of_panel(Format format, int64_t in_features) {
    if (format == Format::int8 || format == Format::f8_row) return 4 * panel_outputs;
    return scale_bytes_of_group(format) * num_groups(in_features);
}

}  // namespace infinilm::cpu
