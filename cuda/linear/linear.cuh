// What all linears share: the one order in which an output is summed, the order of packed rows, and the end of an
// output once it is summed. So a row's bits are the same from linear_decode and linear_prefill, for any num_tokens.
//
// The order: k is cut into kSlices slices of whole boxes of 64 columns, in every format (slice_begin). A slice is one
// chain of mma_m16n8k16 (weights are A, tokens are the columns of B) over its steps of 16, ascending, from zero. The
// slices are then added in order 0, 1, .., and that is multiplied by the scale of its row, if the format has scales of
// rows.
#pragma once

#include <type_traits>

#include "cuda/linear/kernels.h"
#include "cuda/linear/weight_formats.cuh"

namespace infinilm::cuda {

// The first box of a slice of k; slices of fewer than 8 boxes are empty in part.
__host__ __device__ constexpr int first_box(int slice, int boxes) {
    return static_cast<int>(static_cast<int64_t>(boxes) * slice / kSlices);
}
// The first unit of a slice, counted in the units of a format.
template <class F>
constexpr int kBoxUnits = kBoxColumns / (16 * F::kUnitSteps);
template <class F>
__host__ __device__ constexpr int slice_begin(int slice, int units) {
    const int begin = first_box(slice, (units + kBoxUnits<F> - 1) / kBoxUnits<F>) * kBoxUnits<F>;
    return begin < units ? begin : units;
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

// Returns the divisor for which activation(gate) * up is gate / divisor * up, after it has changed gate and up
// (clamped_swiglu) or the gate (relu2, sigmoid). silu divides by 1 + e^-x. gelu of tanh is x / 2 * (1 + tanh(u)), which
// is x / (1 + e^-2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ __forceinline__ float activation_divisor(Activation activation, float& gate, float& up) {
    if (activation == Activation::clamped_swiglu) {
        gate = gate > 7.0f ? 7.0f : gate;  // a NaN stays one
        up = __fadd_rn(up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up, 1.0f);
        return 1.0f + expf(__fmul_rn(gate, -1.702f));
    }
    if (activation == Activation::relu2) {
        gate = gate < 0.0f ? 0.0f : __fmul_rn(gate, gate);
        return 1.0f;
    }
    if (activation == Activation::sigmoid) {
        const float divisor = 1.0f + expf(-gate);
        gate = 1.0f;
        return divisor;
    }
    const float u = activation == Activation::silu
                        ? gate
                        : __fmul_rn(1.5957691f, __fmul_rn(gate, __fmaf_rn(__fmul_rn(gate, gate), 0.044715f, 1.0f)));
    return 1.0f + expf(-u);
}
template <class T>
__device__ __forceinline__ float act_mul(Activation activation, float gate, float up) {
    gate = rounded<T>(gate), up = rounded<T>(up);
    const float divisor = activation_divisor(activation, gate, up);
    return __fmul_rn(gate / divisor, up);
}
// The same of four stored values, without branches between them where sizes are usual.
__device__ __forceinline__ void act_mul4(Activation activation, float (&gate)[4], float (&up)[4]) {
    float divisor[4];
    auto find_divisors = [&](auto which) {
#pragma unroll
        for (int i = 0; i < 4; ++i) divisor[i] = activation_divisor(which.value, gate[i], up[i]);
    };
    switch (activation) {
        case Activation::silu: find_divisors(std::integral_constant<Activation, Activation::silu>{}); break;
        case Activation::gelu_tanh: find_divisors(std::integral_constant<Activation, Activation::gelu_tanh>{}); break;
        case Activation::relu2: find_divisors(std::integral_constant<Activation, Activation::relu2>{}); break;
        default: find_divisors(std::integral_constant<Activation, Activation::clamped_swiglu>{});
    }
    bool usual = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) usual &= fabsf(gate[i]) > 0x1p-60f && fabsf(gate[i]) < 0x1p60f && divisor[i] < 0x1p60f;
    if (usual) {
#pragma unroll
        for (int i = 0; i < 4; ++i) gate[i] = divide_usual(gate[i], divisor[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) gate[i] = gate[i] / divisor[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) gate[i] = __fmul_rn(gate[i], up[i]);
}
// The same of eight, each in T.
template <class T>
__device__ __forceinline__ uint4 act_mul8(Activation activation, uint4 gate, uint4 up) {
    const uint32_t g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        float y[4] = {unpack_low<T>(g[i]), unpack_high<T>(g[i]), unpack_low<T>(g[i + 1]), unpack_high<T>(g[i + 1])};
        float f[4] = {unpack_low<T>(u[i]), unpack_high<T>(u[i]), unpack_low<T>(u[i + 1]), unpack_high<T>(u[i + 1])};
        act_mul4(activation, y, f);
        out[i] = pack2<T>(y[0], y[1]), out[i + 1] = pack2<T>(y[2], y[3]);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}
// The scales of packed rows, where the format has them: [num_tiles * 16].
__device__ __forceinline__ const float* row_scales(const PackedWeight& w) {
    return reinterpret_cast<const float*>(static_cast<const uint8_t*>(w.data) + units_bytes(w));
}
// The same where the format is known, without a choice at run time.
template <class F>
__device__ __forceinline__ const float* row_scales(const PackedWeight& w) {
    const int64_t bytes = static_cast<int64_t>(unit_bytes_of<F>) * num_tiles(w) * units_of<F>(w.k);
    return reinterpret_cast<const float*>(static_cast<const uint8_t*>(w.data) + bytes);
}
// The scales of a row of rounded inputs, which lie behind its numbers.
__host__ __device__ __forceinline__ const float* input_scales(const LinearArgs& args, int64_t row) {
    return reinterpret_cast<const float*>(static_cast<const uint16_t*>(args.x) + row * args.x_stride + args.weight.k);
}
// Returns the scale of a whole row, or 1 where there is none.
template <class F>
__device__ __forceinline__ float input_scale(const LinearArgs& args, int row) {
    if constexpr (!F::kRoundedInputs || F::kBoxScales) return 1.0f;
    return *input_scales(args, row);
}
__device__ __forceinline__ const GroupWeight& group_weight(const GroupedLinearArgs& args, int group) {
    return args.weights ? args.weights[group] : args.inline_weights[group - args.first_group];
}
// Whether the two rows of a pair become one output.
__host__ __device__ inline bool joins_gate_up(const LinearArgs& args) {
    return args.weight.order == RowOrder::gate_up && !args.gate_up_apart;
}

}  // namespace infinilm::cuda
