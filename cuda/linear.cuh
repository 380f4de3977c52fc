// What all linears share: the one order in which an output is summed, the order of packed rows, and the end of an
// output once it is summed. So a row's bits are the same from linear_decode and linear_prefill, for any num_tokens.
//
// The order: k is cut into kSlices slices of whole units (kernels.h). A slice is one chain of mma_m16n8k16 (weights are
// A, tokens are the columns of B) over its steps of 16, ascending, from zero; with scales of groups of columns (int4)
// every 32 columns are such a chain, and a slice is the sum of scale * chain by fused multiply-adds, ascending, from
// zero. The slices are then added in order 0, 1, .., and that is multiplied by the scale of its row (int8, fp8).
#pragma once

#include "kernels.h"
#include "weight_formats.cuh"

namespace infinilm::cuda {

constexpr int kSlices = 8;
__host__ __device__ constexpr int slice_begin(int slice, int units) {
    return static_cast<int>(static_cast<int64_t>(units) * slice / kSlices);
}

// The feature of a packed row; for gate_up, gates are 0 .. n / 2 - 1 and ups n / 2 .. n - 1. May be n or more: padding.
__host__ __device__ inline int feature_of_row(const PackedWeight& w, int row) {
    const int tile = row / 16, r = row % 16;
    if (w.order == RowOrder::gate_up) return 8 * tile + r % 8 + r / 8 * (w.n / 2);
    if (w.order == RowOrder::rope_pairs) {
        const int tiles_per_head = w.head_dim / 16;
        return tile / tiles_per_head * w.head_dim + tile % tiles_per_head * 8 + r % 8 + r / 8 * (w.head_dim / 2);
    }
    return row;
}

// relu2, silu, or x / 2 * (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
__device__ __forceinline__ float activate(Activation activation, float x) {
    if (activation == Activation::relu2) return x < 0.0f ? 0.0f : __fmul_rn(x, x);  // a NaN stays one
    const float u = activation == Activation::silu
                        ? x
                        : __fmul_rn(1.5957691f, __fmul_rn(x, __fmaf_rn(__fmul_rn(x, x), 0.044715f, 1.0f)));
    return x / (1.0f + expf(-u));
}
// activation(gate) * up as act_mul has it of stored values.
template <class T>
__device__ __forceinline__ float act_mul(Activation activation, float gate, float up) {
    gate = rounded<T>(gate), up = rounded<T>(up);
    if (activation != Activation::clamped_swiglu) return __fmul_rn(activate(activation, gate), up);
    gate = gate > 7.0f ? 7.0f : gate;  // a NaN stays one
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return __fmul_rn(gate / (1.0f + expf(__fmul_rn(gate, -1.702f))), __fadd_rn(up, 1.0f));
}
// The scales of packed rows, where the format has them: [num_tiles * 16].
__device__ __forceinline__ const float* row_scales(const PackedWeight& w) {
    return reinterpret_cast<const float*>(static_cast<const uint8_t*>(w.data) + units_bytes(w));
}
__device__ __forceinline__ const GroupWeight& group_weight(const GroupedLinearArgs& args, int group) {
    return args.weights ? args.weights[group] : args.inline_weights[group - args.first_group];
}
// Whether the two rows of a pair become one output.
__host__ __device__ inline bool joins_gate_up(const LinearArgs& args) {
    return args.weight.order == RowOrder::gate_up && !args.gate_up_apart;
}

}  // namespace infinilm::cuda
