// How the sums of slices of k become outputs where these lie in fragment order, in linear_decode, linear_grouped and
// linear_split_sm90: added in order, then scale, bias, activation(gate) * up, residual, or RoPE and the write to the
// cache. One thread has rows r and r + 8 of a tile, which is what an epilogue needs together.
#pragma once

#include "cuda/attention/rope.cuh"
#include "cuda/linear/linear.cuh"

namespace infinilm::cuda {

// Which rows of out those of the sums are: the same. linear_grouped.cuh has others.
struct AllRows {
    static constexpr bool kListed = false;  // whether rows of x and of out are listed
    const LinearArgs& args;

    __device__ __forceinline__ int x_row(int token) const { return token; }
    __device__ __forceinline__ int out_row(int token) const { return token; }
    __device__ __forceinline__ float scaled(float y) const { return y; }
};

// Stores y, [token, feature] of out, with the residual added.
template <class T, class Rows>
__device__ __forceinline__ void put(const Rows& rows, int token, int feature, float y) {
    const LinearArgs& args = rows.args;
    token = rows.out_row(token), y = rows.scaled(y);
    if (args.residual)
        y = rounded<T>(y) + to_float(static_cast<const T*>(args.residual)[token * args.residual_stride + feature]);
    const int64_t at = token * args.out_stride + feature;
    if (args.out_float32)
        static_cast<float*>(args.out)[at] = y;
    else
        static_cast<T*>(args.out)[at] = from_float<T>(y);
}

// Turns dimensions i and i + head_dim / 2 of a head, and stores them where they belong.
template <class T>
__device__ __forceinline__ void put_rope(const LinearArgs& args, int token, int head, int i, float first,
                                         float second) {
    const RopeStoreArgs& rope = args.rope;
    const int half = rope.head_dim / 2, num_turned = rope.num_heads + rope.num_kv_heads;
    first = rounded<T>(first), second = rounded<T>(second);
    if (head < num_turned) {
        const float* table = rope.cos_sin + static_cast<int64_t>(token) * rope.rotary_dim + i;
        rotate(first, second, table[0], table[half]);
    }
    T* row = static_cast<T*>(args.out) + token * args.out_stride + static_cast<int64_t>(head) * rope.head_dim;
    if (head >= rope.num_heads) {
        const int64_t slot = rope.slot_mapping[token];
        if (slot < 0) return;
        const bool is_key = head < num_turned;
        row = static_cast<T*>(is_key ? rope.k_cache : rope.v_cache) +
              cache_row(slot, head - (is_key ? rope.num_heads : num_turned), rope.num_kv_heads, rope.block_size) *
                  rope.head_dim;
    }
    row[i] = from_float<T>(first);
    row[i + half] = from_float<T>(second);
}

// activation(gate) * y of [token, feature], whose gate lies in out.
template <class T, class Rows>
__device__ __forceinline__ float times_gate(const Rows& rows, int token, int feature, float y) {
    const LinearArgs& args = rows.args;
    const T* gates = static_cast<const T*>(args.out) + rows.out_row(token) * args.out_stride;
    return act_mul<T>(args.activation, to_float(gates[feature]), y);
}

// The end of the sums of packed rows `row` and row + 8.
template <class T, class F, class Rows>
__device__ __forceinline__ void finish(const Rows& rows, int token, int row, float first, float second) {
    const LinearArgs& args = rows.args;
    const PackedWeight& weight = args.weight;
    const int feature = feature_of_row(weight, row), other = feature_of_row(weight, row + 8);
    if constexpr (F::kRoundedInputs && !F::kBoxScales) {
        const float scale = input_scale<F>(args, rows.x_row(token));
        first = __fmul_rn(first, scale), second = __fmul_rn(second, scale);
    }
    if constexpr (F::kRowScales) {
        const float* scales = row_scales<F>(weight) + row;
        first = __fmul_rn(first, scales[0]), second = __fmul_rn(second, scales[8]);
    }
    if (weight.bias) {
        if (feature < weight.n) first += weight.bias[feature];
        if (other < weight.n) second += weight.bias[other];
    }
    if (!Rows::kListed && args.has_rope) {
        const int head = feature / weight.head_dim;
        put_rope<T>(args, token, head, feature - head * weight.head_dim, first, second);
    } else if (joins_gate_up(args)) {
        put<T>(rows, token, feature, act_mul<T>(args.activation, first, second));
    } else {
        if (args.gate_in_out) {
#pragma unroll 1  // the code of an activation once; the sums change places twice
            for (int i = 0; i < 2; ++i) {
                const int own = i == 0 ? feature : other;
                const float y = own < weight.n ? times_gate<T>(rows, token, own, first) : first;
                first = second, second = y;
            }
        }
        if (feature < weight.n) put<T>(rows, token, feature, first);
        if (other < weight.n) put<T>(rows, token, other, second);
    }
}

// Adds the sums of `count` slices to `sum`, in their order. partial: of the first; the others `stride` further on each.
__device__ __forceinline__ float4 add_slices(float4 sum, const float4* partial, int count, int stride) {
#pragma unroll 4  // not wholly: the next weights take up registers
    for (int slice = 0; slice < count; ++slice) {
        const float4 other = partial[slice * stride];
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    return sum;
}
// Ends the outputs of two tokens from `token` on: x, y are the sums of packed row `row`, z, w of row + 8.
template <class T, class F, class Rows>
__device__ __forceinline__ void finish_tokens(const Rows& rows, float4 sum, int token, int row) {
#pragma unroll 1
    for (int i = 0; i < 2 && token + i < rows.args.num_tokens; ++i) {
        finish<T, F>(rows, token + i, row, sum.x, sum.z);
        sum.x = sum.y, sum.z = sum.w;
    }
}

}  // namespace infinilm::cuda
