// What all linears share: the one order in which an output is summed, the order of packed rows, and the end of an
// output once it is summed. So a row's bits are the same from linear_decode and linear_prefill, for any num_tokens.
//
// The order: k is cut into kSlices slices of whole steps of 16. A slice is one chain of mma_m16n8k16 (weights are A,
// tokens are the columns of B) over its steps, ascending, from zero; the slices are then added in order 0, 1, ..
#pragma once

#include "kernels.h"
#include "ptx.cuh"

namespace infinilm::cuda {

constexpr int kSlices = 8;
__host__ __device__ constexpr int slice_begin(int slice, int steps) {
    return static_cast<int>(static_cast<int64_t>(steps) * slice / kSlices);
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

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
// silu(gate) * up as silu_mul has it of stored values.
template <class T>
__device__ __forceinline__ float silu_mul(float gate, float up) {
    return __fmul_rn(silu(rounded<T>(gate)), rounded<T>(up));
}
// Whether the two rows of a pair become one output.
__host__ __device__ inline bool joins_gate_up(const LinearArgs& args) {
    return args.weight.order == RowOrder::gate_up && !args.gate_up_apart;
}

}  // namespace infinilm::cuda
