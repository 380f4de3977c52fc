// Which kernel a linear takes. All give a row the same bits (linear.cuh), so what is chosen is time alone, as it was
// measured on an H100, or is counted (docs/kernels.md).
#pragma once

#include "cuda/linear/kernels.h"

namespace infinilm::cuda {

#ifndef INFINILM_SM90  // whether the build has the kernels of Hopper
#define INFINILM_SM90 0
#endif

// How linear_prefill divides a product: tiles of 128 packed rows x `tokens`, and k of each among `splits` blocks.
struct PrefillPlan {
    int tokens = 0, splits = 1;
    int64_t cycles = 0;  // of an SM, estimated
};

// The plan that is estimated to take least, of those with args.splits. Smaller tiles and more splits give more blocks,
// so that a small product fills the GPU, but then each byte that is brought into shared memory is used less, and the
// sums of all slices but the first go through the workspace: a block writes its own, and the last one reads all. As
// these are estimates, more splits must save an eighth.
inline PrefillPlan choose_prefill(const LinearArgs& args, int num_sms) {
    const PackedWeight& w = args.weight;
    const int64_t steps = num_steps(w.k), row_blocks = (num_tiles(w) + 7) / 8;
    // Estimated cycles. A step is 16 columns: with tiles of 128 and of 64 it moves bytes of shared memory as 16 to 11,
    // and 717 products a cycle were measured on an H100 with tiles of 128. begin: to begin and end a block; hand_over:
    // to be the last of several; part: to write or read a part.
    constexpr int64_t step_of_128 = 16 * 23, step_of_64 = 11 * 23, begin = 3000, hand_over = 2000, part = 512;
    PrefillPlan best;
    auto consider = [&](int tokens, int splits) {
        const int64_t tiles = row_blocks * ((args.num_tokens + tokens - 1) / tokens);
        if (args.splits != 0 && args.splits != splits) return;
        const bool fits = args.workspace && num_boxes(w) >= kSlices && tiles * split_parts(splits) <= most_split_parts;
        if (splits > 1 && (!fits || (args.splits == 0 && tiles >= num_sms))) return;
        const int64_t waves = (tiles * splits + num_sms - 1) / num_sms;
        int64_t cycles = waves * (begin + steps * (tokens == 64 ? step_of_64 : step_of_128) / splits);
        if (splits > 1) cycles += waves * (kSlices / splits) * part + hand_over + split_parts(splits) * part;
        if (best.tokens == 0 || 8 * cycles < (splits > 1 ? 7 : 8) * best.cycles) best = {tokens, splits, cycles};
    };
    if (w.format == WeightFormat::as_type) consider(128, 1);
    for (int splits = 1; splits <= kSlices; splits *= 2) consider(kSplitTokens, splits);
    return best;
}

// The same of linear_decode from 33 tokens on: the busiest block's bytes, rows of weights and for each group of them
// all rows of x, at 18 a cycle (measured on an H100: 15 to 21).
inline int64_t decode_cycles(const LinearArgs& args, int num_sms) {
    const PackedWeight& w = args.weight;
    const int64_t tile_bytes = int64_t{num_units(w)} * unit_bytes(w.format),
                  x_bytes = int64_t{2} * args.num_tokens * w.k;
    auto bytes = [&](int tiles) {  // of a group
        const int64_t groups = (num_tiles(w) + tiles - 1) / tiles;
        return (groups + num_sms - 1) / num_sms * (tiles * tile_bytes + x_bytes);
    };
    const bool has_wide = w.format == WeightFormat::as_type && args.num_tokens <= 64;
    return (has_wide && bytes(4) < bytes(2) ? bytes(4) : bytes(2)) / 18;
}

// What the two blocks of a cluster of linear_sm90 have in common. With the same tokens or the same rows, each block
// brings half of these to both. With the same tile, each sums half of its slices of k: a product of few tiles has twice
// the blocks.
constexpr int hopper_pair = 2;
enum class HopperPair : int { same_tokens, same_rows, same_tile };

// How linear_sm90 divides a product: tiles of 128 packed rows x `tokens`, by pairs of blocks.
struct HopperPlan {
    int tokens = 0;
    HopperPair pair = HopperPair::same_tokens;
    int64_t cycles = 0;  // of an SM, estimated
};

// So many tokens are linear_decode's on Hopper, too, where wgmma gives most of its products away. But e4m3 by e4m3 is
// wgmma's alone there, as mma.sync multiplies it as f16, with other bits.
constexpr int most_decode_rows_of_hopper(WeightFormat format) {
    return format == WeightFormat::as_type ? 16 : rounds_inputs(format) ? 0 : 32;
}

// How many tokens a tile of linear_split_sm90 may have, and so a call.
constexpr int most_split_tokens(WeightFormat format) { return rounds_inputs(format) ? 64 : 128; }

constexpr bool has_group_scales(WeightFormat format) { return unit_shape(format).scale_bytes > 0; }

inline int hopper_places(const LinearArgs& args, int tile_tokens, HopperPair pair) {  // pairs of blocks with work
    const int row_blocks = (num_tiles(args.weight) + 7) / 8;
    const int token_blocks = (args.num_tokens + tile_tokens - 1) / tile_tokens;
    if (pair == HopperPair::same_tokens) return (row_blocks + 1) / 2 * token_blocks;
    return row_blocks * (pair == HopperPair::same_rows ? (token_blocks + 1) / 2 : token_blocks);
}

// The plan that is estimated to take least, of those with args.splits. Fewer tokens give more tiles, so that a product
// fills the GPU and the last ones leave few SMs idle, but a stage of 64 columns of k does not get cheaper as fast.
// Pairs that share a tile read all of a stage for themselves, and exchange sums. What has not been measured must save a
// tenth.
inline HopperPlan choose_sm90(const LinearArgs& args, int num_sms) {
    const PackedWeight& w = args.weight;
    const bool is_as_type = w.format == WeightFormat::as_type;
    const int64_t stages = (num_steps(w.k) + 3) / 4, at_once = num_sms > 1 ? num_sms / 2 : 1;  // pairs of blocks
    const int64_t weight_bytes = int64_t{32} / unit_steps(w.format) * unit_bytes(w.format);    // of a stage
    // By what was measured on an H100: a call takes 5.8 us and its stages, a stage by itself about tokens + 100 (of
    // quantised weights the instructions that widen them), and all SMs together get 8.4 TB/s from L2. Counted: what two
    // blocks exchange and keep, and how many instructions more a stage has where groups have scales (int4 100, Q4_K
    // 210, Q6_K 300).
    constexpr int64_t begin = 10000, l2_bytes = 4800, hand_over = 1000, hand_over_of_token = 64;
    auto stage_alone = [&](int tokens) -> int64_t {
        if (is_as_type || rounds_inputs(w.format)) return 3 * (tokens + 100);
        return (has_group_scales(w.format) ? 400 : 210) + 9 * tokens / 2;
    };
    HopperPlan best;
    auto consider = [&](int tokens, HopperPair pair) {
        const bool shares = pair == HopperPair::same_tile;
        if (args.splits != 0 && args.splits != (shares ? 2 : 1)) return;
        // These tiles have more sums and scales than a thread has registers.
        if (args.out_float32 && tokens > (rounds_inputs(w.format) ? 64 : 128)) return;
        if (w.format == WeightFormat::fp8_block_pairs && tokens > 64) return;
        const int64_t places = hopper_places(args, tokens, pair), waves = (places + at_once - 1) / at_once;
        if (shares && (num_boxes(w) < kSlices || (args.splits == 0 && waves > 1))) return;
        const int64_t bytes = weight_bytes / (pair == HopperPair::same_rows ? 2 : 1) +
                              128 * tokens / (pair == HopperPair::same_tokens ? 2 : 1);
        const int64_t from_l2 = 2 * (waves > 1 ? at_once : places) * bytes / l2_bytes, alone = stage_alone(tokens);
        int64_t cycles = begin + waves * (shares ? (stages + 1) / 2 : stages) * (from_l2 > alone ? from_l2 : alone);
        if (shares) cycles += hand_over + hand_over_of_token * tokens;
        const bool is_measured = !shares && (is_as_type ? tokens >= 64 : tokens == 128);
        if (best.tokens == 0 || 10 * cycles < (is_measured ? 10 : 9) * best.cycles) best = {tokens, pair, cycles};
    };
    // Pairs of the same rows read less, where no tile of a pair is empty; larger tiles were slower so.
    auto consider_apart = [&](int tokens) {
        const bool same_rows = tokens <= 128 && (args.num_tokens + tokens - 1) / tokens % 2 == 0;
        consider(tokens, same_rows ? HopperPair::same_rows : HopperPair::same_tokens);
    };
    for (int tokens : {128, 64}) consider_apart(tokens);
    if (is_as_type)
        for (int tokens : {176, 192}) consider_apart(tokens);
    if (is_as_type || rounds_inputs(w.format)) {
        consider_apart(32);
        consider(32, HopperPair::same_tile);
    }
    consider(64, HopperPair::same_tile);
    return best;
}

// Rows of an item of linear_grouped where so many rows go to the weights of a layer's experts, or hopper_item_rows of
// linear_grouped_sm90. Most items should be full, and each reads its weight: few rows for each expert make small ones.
// To its weight an item is what a call of a linear is, so wgmma begins where it does in choose_linear(). As items of
// all experts fill the GPU, their tiles are never few.
inline int choose_item_rows(const PackedWeight& w, int64_t num_rows, int64_t num_groups, bool has_sm90) {
    const int64_t mean = num_rows / (num_groups > 0 ? num_groups : 1);
    const int most = most_decode_rows_of_hopper(w.format);
    if (has_sm90 && (mean > most || most == 0)) return hopper_item_rows;
    return mean <= 4 ? 8 : mean <= 24 ? 32 : 64;
}

enum class LinearKernel { f32, decode, split_sm90, sm90, prefill };

// Whether linear_prefill is what many tokens take, and so wants a workspace.
constexpr bool shares_tiles(Element type, bool is_hopper) {
    return type != Element::f32 && !(INFINILM_SM90 && is_hopper);
}

// num_sms: of the device. Those of Hopper are not in every build.
inline LinearKernel choose_linear(const LinearArgs& args, bool is_hopper, int num_sms) {
    const PackedWeight& w = args.weight;
    const int tokens = args.num_tokens;
    if (w.type == Element::f32) return LinearKernel::f32;
    if (!INFINILM_SM90 || !is_hopper) {
        if (tokens <= 32) return LinearKernel::decode;
        if (tokens > max_decode_tokens(w.format)) return LinearKernel::prefill;
        const int64_t rope_cycles = w.order == RowOrder::rope_pairs ? 4000 : 0;  // which decode does besides
        return decode_cycles(args, num_sms) <= choose_prefill(args, num_sms).cycles + rope_cycles
                   ? LinearKernel::decode
                   : LinearKernel::prefill;
    }
    const bool is_as_type = w.format == WeightFormat::as_type;
    const bool splits =
        is_as_type || w.format == WeightFormat::int8 || w.format == WeightFormat::fp8 || rounds_inputs(w.format);
    if (tokens <= most_decode_rows_of_hopper(w.format)) return LinearKernel::decode;
    // Tiles of 128 rows are to linear_sm90 what SMs read; two fifths of them read almost as fast as memory does.
    const int tiles = (num_tiles(w) + 7) / 8;
    if (tokens <= 64 && !splits && (args.out_float32 || 5 * tiles < 2 * num_sms)) return LinearKernel::decode;
    const bool is_small =
        tokens <= 64 ? 5 * tiles < 2 * num_sms : tokens <= most_split_tokens(w.format) && 8 * tiles <= num_sms;
    return splits && is_small ? LinearKernel::split_sm90 : LinearKernel::sm90;
}

// Whether the norm in front and RoPE with the cache behind may be part of it (LinearArgs).
constexpr bool fuses_norm(LinearKernel kernel, int num_tokens, WeightFormat format) {
    return kernel == LinearKernel::decode && num_tokens <= max_norm_tokens(format);
}
constexpr bool fuses_rope(LinearKernel kernel) {
    return kernel == LinearKernel::decode || kernel == LinearKernel::split_sm90;
}

inline cudaError_t launch_linear(LinearKernel kernel, const LinearArgs& args, cudaStream_t stream) {
    switch (kernel) {
        case LinearKernel::f32: return linear_f32(args, stream);
        case LinearKernel::decode: return linear_decode(args, stream);
#if INFINILM_SM90
        case LinearKernel::split_sm90: return linear_split_sm90(args, stream);
        case LinearKernel::sm90: return linear_sm90(args, stream);
#endif
        default: return linear_prefill(args, stream);
    }
}

}  // namespace infinilm::cuda
