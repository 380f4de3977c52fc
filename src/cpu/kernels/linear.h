// What the ways to compute a linear share: how the work is split over workers and segments. Included by linear.cpp and
// linear_tile.cpp.
#pragma once

#include "cpu/kernels/functions.h"

namespace infinilm::cpu::INFINILM_ISA {

// linear_tile.cpp: the linear of the builds with matrix tiles, for args.multiply_bf16. As the functions of the table.
constexpr bool has_tiles = INFINILM_BF16_TILE;
size_t tile_linear_scratch_bytes(const LinearArgs& args);
size_t tile_linear_shared_scratch_bytes(const LinearArgs& args);
void tile_linear_pack_x(const LinearArgs& args, Share share);
void tile_linear(const LinearArgs& args, Share share);

// Outputs [begin, begin + count) of one segment, or of gate and up together.
struct Range {
    const void* weight[2];  // first row; [1]: of up
    int64_t weight_stride[2];
    const float* bias[2];
    int64_t begin, count;
    int rows_per_output;  // 2: gate and up
};

// Row of an output: its only one, or 0: gate, 1: up. Tiles may hang over the end; what they compute there is dropped.
template <class Weight>
INFINILM_INLINE const Weight* row_of(const Range& range, int64_t output, int64_t which) {
    return (const Weight*)range.weight[which] + smaller(output, range.count - 1) * range.weight_stride[which];
}

struct Area {
    int64_t output_begin, output_end, token_begin, token_end;
};

// Over outputs first, so many at once; where these are too few for all workers, over tokens as well.
INFINILM_INLINE Area split_work(const LinearArgs& args, Share share, int64_t split_outputs, int64_t split_tokens) {
    int64_t num_outputs = args.segments[0].out_features;
    if (!args.silu_mul)
        for (int i = 1; i < args.num_segments; ++i) num_outputs += args.segments[i].out_features;
    const int64_t units = (num_outputs + split_outputs - 1) / split_outputs;
    const int64_t groups = (args.num_tokens + split_tokens - 1) / split_tokens;
    const int64_t parts = smaller(share.count, units);
    const int64_t token_parts = parts == 0 ? 1 : smaller(share.count / parts, groups);
    const int64_t part = parts == 0 ? 0 : share.index % parts, token_part = parts == 0 ? 1 : share.index / parts;
    if (token_part >= token_parts) return {0, 0, 0, 0};
    return {units * part / parts * split_outputs, smaller(num_outputs, units * (part + 1) / parts * split_outputs),
            groups * token_part / token_parts * split_tokens,
            smaller(args.num_tokens, groups * (token_part + 1) / token_parts * split_tokens)};
}

// f(range) for the part of every segment that belongs to the share.
template <class F>
INFINILM_INLINE void for_each_range(const LinearArgs& args, const Area& area, F f) {
    int64_t first = 0;  // output of the segment's first row
    for (int i = 0; i < (args.silu_mul ? 1 : args.num_segments); ++i) {
        const int64_t begin = area.output_begin > first ? area.output_begin : first;
        const int64_t end = smaller(area.output_end, first + args.segments[i].out_features);
        const int64_t skip = begin - first;
        first += args.segments[i].out_features;
        if (begin >= end) continue;
        Range range{};
        range.begin = begin, range.count = end - begin, range.rows_per_output = args.silu_mul ? 2 : 1;
        for (int which = 0; which < range.rows_per_output; ++which) {
            const LinearSegment& segment = args.segments[i + which];
            const int64_t skipped_bytes = skip * segment.weight_stride * (int64_t)element_bytes(args.element);
            range.weight[which] = (const char*)segment.weight + skipped_bytes;
            range.weight_stride[which] = segment.weight_stride;
            range.bias[which] = segment.bias ? segment.bias + skip : nullptr;
        }
        f(range);
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
