// The one layout of packed weights, the same for every instruction set. A panel is 16 outputs: 64-byte lines, each with
// the next k (in_features) of all 16, in 16 lanes of 32 bits:
//   f32   [k][16]              a line holds 1 k
//   bf16  [k / 2][16][2]       2
//   f16   [k / 2][2][16]       2, one behind the other: they are widened 16 at a time
//   int8  [k / 4][16][4]       4
//   int4  [k / 8][16][4]       8: byte j of a lane has k j in its low half and k j + 4 in its high one, each plus 8
//   q8_0, q4_0  as int8 and int4; the names are those of GGUF files, whose integers and scales they keep
// k is padded with zeros to whole groups of 32, at least one, outputs to whole pairs of panels. Scales of int8 are
// float32 [panels][16], one per output. Those of int4 (bfloat16), q8_0 and q4_0 (float16) are [panels][k / 32][16], one
// per output and group.
#pragma once

#include "cpu/kernels/kernels.h"
#include "numerics/quantise.h"

namespace infinilm::cpu {

constexpr int panel_outputs = 16;
constexpr int line_bytes = 64;
constexpr int group_size = quantise::group;  // of k
constexpr int int4_offset = 8;

static inline constexpr int k_per_line(Format format) {
    switch (format) {
        case Format::f32: return 1;
        case Format::int8:
        case Format::q8_0: return 4;
        case Format::int4:
        case Format::q4_0: return 8;
        default: return 2;
    }
}
static inline constexpr int64_t num_groups(int64_t in_features) {
    return in_features == 0 ? 1 : (in_features + group_size - 1) / group_size;
}
static inline constexpr int64_t panel_bytes(Format format, int64_t in_features) {
    return num_groups(in_features) * (group_size / k_per_line(format)) * line_bytes;
}
static inline constexpr int64_t scale_bytes_of_group(Format format) {
    const bool grouped = format == Format::int4 || format == Format::q8_0 || format == Format::q4_0;
    return grouped ? 2 * panel_outputs : 0;
}
static inline constexpr int64_t scale_bytes_of_panel(Format format, int64_t in_features) {
    if (format == Format::int8) return 4 * panel_outputs;
    return scale_bytes_of_group(format) * num_groups(in_features);
}

}  // namespace infinilm::cpu
