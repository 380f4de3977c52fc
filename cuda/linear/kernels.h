// The kernels of linears. See core/types.h for what holds of all launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/attention/kernels.h"
#include "cuda/linear/packed_weight.h"

namespace infinilm::cuda {

// ---- linears -----------------------------------------------------------------------------------------------------

// out[t, f] = epilogue(sum over k of prologue(x[t]) . weight[f] + bias[f]).
// Rounding, so that fused and unfused are the same bits: a normed x is rounded to T, and a sum (with bias) is rounded
// to T before it is turned by RoPE, goes through activation(gate) * up or meets the residual.
struct LinearArgs {
    const void* x;  // [num_tokens, k] T
    int64_t x_stride;
    int num_tokens;
    PackedWeight weight;
    const float* norm_weight = nullptr;  // prologue: x[t] becomes rms_norm(x[t]) * norm_weight ([k])
    float norm_eps = 0;
    const void* residual = nullptr;  // [num_tokens, n] T, added at the end; may be out
    int64_t residual_stride = 0;
    void* out =
        nullptr;  // [num_tokens, n] T; gate_up: [num_tokens, n / 2], activation(gate) * up; float if out_float32
    int64_t out_stride = 0;
    bool out_float32 = false;
    Activation activation = Activation::silu;
    bool gate_up_apart = false;  // with gate_up: out is [num_tokens, n], gates, then ups
    bool gate_in_out = false;    // natural: out has the gates, [num_tokens, n] T, and becomes activation(gate) * sum
    bool has_rope = false;  // epilogue of rope_pairs without q_norm, rotary_dim == head_dim: of out only q is written,
    RopeStoreArgs rope{};   // turned; k (turned) and v go to the cache alone
    // The workspace, of linear_prefill, is zero before its first use and serves one stream: its kernels run one by one.
    void* workspace = nullptr;  // split_workspace_bytes, aligned to 256; null: one block sums all of k
    int splits = 0;  // blocks that divide k of a tile: 1, 2 (also of linear_sm90), 4, 8; 0: linear_choice.h says
};

// Every linear sums k in this many slices of whole boxes of columns, which are added in their order (linear.cuh).
constexpr int kSlices = 8, kBoxColumns = 64;
constexpr int num_boxes(const PackedWeight& w) { return (w.k + kBoxColumns - 1) / kBoxColumns; }

// The workspace: how many blocks of a tile have come, then the sums of parts of k. The first block of a tile has one
// part, all its slices, and the others have one for each slice: only so are slices added in their order.
constexpr int kSplitRows = 128, kSplitTokens = 64;  // of a tile
constexpr int kSplitBytes = kSplitRows * kSplitTokens * 4, most_split_parts = 512;
constexpr int split_parts(int splits) { return splits == 1 ? 0 : kSlices - kSlices / splits + 1; }  // of a tile
constexpr int most_split_tiles = most_split_parts / split_parts(2);
constexpr size_t split_counter_bytes = 1024;
static_assert(most_split_tiles * sizeof(unsigned) <= split_counter_bytes);
constexpr size_t split_workspace_bytes = split_counter_bytes + size_t{kSplitBytes} * most_split_parts;

// linear_choice.h says which of these a linear takes. At most this many tokens may go through linear_decode, and this
// many with a norm, which every block computes again. Quantised weights, which have more kernels, have fewer.
constexpr int max_decode_tokens(WeightFormat format) { return format == WeightFormat::as_type ? 96 : 64; }
constexpr int max_norm_tokens(WeightFormat format) {  // rounded inputs are normed before
    return format == WeightFormat::as_type ? 16 : rounds_inputs(format) ? 0 : 8;
}
cudaError_t linear_decode(const LinearArgs&, cudaStream_t);      // num_tokens as above; all of LinearArgs
cudaError_t linear_prefill(const LinearArgs&, cudaStream_t);     // any num_tokens; without norm and rope
cudaError_t linear_sm90(const LinearArgs&, cudaStream_t);        // the same on Hopper (wgmma)
cudaError_t linear_split_sm90(const LinearArgs&, cudaStream_t);  // the same with rope; as_type, int8 and fp8
cudaError_t linear_f32(const LinearArgs&, cudaStream_t);         // Element::f32, without norm and rope

// ---- inputs in 8 bits ----------------------------------------------------------------------------------------------

// Rows of e4m3 for weights of fp8 and fp8_blocks. A row is its numbers, zeros up to a multiple of 32, then float32
// scales: for fp8 that of its largest number, for fp8_blocks those of 128 columns each. So a row depends on itself
// alone. Within 16 columns t of the numbers 2 t, 2 t + 8, 2 t + 1, 2 t + 9 are neighbours, as weights have them
// (weight_formats.cuh). Two numbers count as one of 16 bits: LinearArgs for such rows have x_stride and the weight's k
// so.
struct RoundInputsArgs {
    const void* x;       // [num_rows, k] T
    int64_t x_stride;    // a multiple of 8
    void* out;           // [num_rows] rows as above; may be x, for up to most_columns_in_place
    int64_t out_stride;  // in numbers of 16 bits, a multiple of 8
    int num_rows, k;
    bool box_scales;  // for fp8_blocks
    Element type;
};
cudaError_t round_inputs(const RoundInputsArgs&, cudaStream_t);
constexpr int most_columns_in_place = 16384, kRoundedGroup = 128;
constexpr int64_t rounded_row_bytes(int64_t k, bool box_scales) {
    return (k + 31) / 32 * 32 + 16 * (box_scales ? (k + 511) / 512 : 1);
}
// A weight of fp8 or fp8_blocks as kernels see it beside such rows. The scales of the latter must be those of 128
// columns.
inline PackedWeight as_pairs(PackedWeight weight) {
    weight.k = 16 * num_units(weight);
    weight.format = weight.format == WeightFormat::fp8 ? WeightFormat::fp8_pairs : WeightFormat::fp8_block_pairs;
    return weight;
}

// ---- linears of listed rows --------------------------------------------------------------------------------------

// One of several weights of one shape: of an expert, or of an adapter.
struct GroupWeight {
    const void* data = nullptr;   // as PackedWeight has it
    const float* bias = nullptr;  // or null
    float scale = 1;              // of a sum with its bias
};
constexpr int kInlineWeights = 32;

// out[t] = scale * (x[s] . weight + bias) (+ residual[t]) of the rows of items: each item is some rows and the weight
// that they go through. Row i is s = x_rows[i] of x, and t = out_rows[i] of out and residual. The bits are those of
// linear_decode.
struct GroupedLinearArgs {
    LinearArgs linear;           // without norm and rope; num_tokens: rows of x; data and bias are not read
    const GroupWeight* weights;  // [num_groups] on the device; or null: these, from group first_group on
    GroupWeight inline_weights[kInlineWeights];
    int first_group;
    const int4* items;     // [num_items] on the device: group, first row, number of rows (at most `tile`), 0
    const int* num_items;  // on the device; or null: most_items
    int most_items;        // no less than num_items
    int tile;              // 8, 32 or 64; of linear_grouped_sm90 hopper_item_rows
    const int* x_rows;     // null: row i is s = i
    const int* out_rows;   // null: row i is t = i
    const void* maps;      // of linear_grouped_sm90: of the weights, [num_groups] on the device
};
cudaError_t linear_grouped(const GroupedLinearArgs&, cudaStream_t);
cudaError_t linear_grouped_f32(const GroupedLinearArgs&, cudaStream_t);  // Element::f32
// The same on Hopper (wgmma), of 16-bit outputs, scales that are 1, and rows of x and out that are those of the items.
cudaError_t linear_grouped_sm90(const GroupedLinearArgs&, cudaStream_t);
constexpr int hopper_item_rows = 128, weight_map_bytes = 128;
// maps: [count][weight_map_bytes] in memory of the host, of weights that have one shape.
cudaError_t make_weight_maps(const PackedWeight& shape, const GroupWeight* weights, int count, void* maps);

// ---- linears of heads --------------------------------------------------------------------------------------------

// out[t, h] = x[t, h] . weight[h]: features [h * out_features, (h + 1) * out_features) of a weight in natural order.
struct HeadLinearArgs {
    const void* x;  // [num_tokens, num_heads, k] T
    int64_t x_stride, x_head_stride;
    int num_tokens, num_heads, out_features;  // of a head
    PackedWeight weight;
    void* out;  // [num_tokens, num_heads, out_features] T
    int64_t out_stride, out_head_stride;
};
cudaError_t head_linear(const HeadLinearArgs&, cudaStream_t);

}  // namespace infinilm::cuda
