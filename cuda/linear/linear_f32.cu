// out = x . weight^T (+ bias) (+ residual), or activation(gate) * up, all in float32: for checks of the whole engine,
// where simple counts and speed does not. Mapping: one warp per (output feature, group of kTokens tokens). Bytes: every
// token group reads the weight once, 4 n k bytes, mostly from L2 after the first; operations 2 n k num_tokens on the
// FMA units, of which the loads leave about a tenth. 16-byte accesses: k a multiple of 8, rows of x aligned (kernels.h,
// Alignment). Order: lane l adds the products of vectors l, l + 32, .. of 8 columns, then the warp's butterfly: for any
// num_tokens.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/linear/linear.cuh"

namespace infinilm::cuda {

constexpr int kTokens = 4, kLinearWarps = 4;

// The sums of one feature for kTokens tokens. row: [k]; x: [tokens], each [k].
__device__ __forceinline__ void dot(float (&sums)[kTokens], const float* row, const float* const (&x)[kTokens],
                                    int tokens, int k) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[t] = 0.0f;
    for (int i = static_cast<int>(lane_id()) * 8; i < k; i += 256) {
        float w[8], v[8];
        load8(row + i, w);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            if (t >= tokens) continue;
            load8(x[t] + i, v);
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[t] = __fmaf_rn(w[j], v[j], sums[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[t] = warp_sum(sums[t]);
}

// One feature of up to kTokens tokens: rows x_row(t) of x and out_row(t) of out.
template <bool kGateUp, class XRow, class OutRow>
__device__ __forceinline__ void compute(const LinearArgs& args, const GroupWeight& weight, int feature, int tokens,
                                        XRow x_row, OutRow out_row) {
    const int k = args.weight.k, width = kGateUp ? args.weight.n / 2 : args.weight.n;
    const float *rows = static_cast<const float*>(weight.data), *x[kTokens];  // [n][k]
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
        x[t] = static_cast<const float*>(args.x) + (t < tokens ? x_row(t) : 0) * args.x_stride;
    float sums[kTokens], ups[kTokens];
    dot(sums, rows + static_cast<int64_t>(feature) * k, x, tokens, k);
    if constexpr (kGateUp) dot(ups, rows + static_cast<int64_t>(feature + width) * k, x, tokens, k);
    if (lane_id() != 0) return;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        if (t >= tokens) continue;
        float y = sums[t] + (weight.bias ? weight.bias[feature] : 0.0f);
        if constexpr (kGateUp)
            y = act_mul<float>(args.activation, y, ups[t] + (weight.bias ? weight.bias[feature + width] : 0.0f));
        y = __fmul_rn(y, weight.scale);
        const int64_t row = out_row(t);
        if (args.residual) y += static_cast<const float*>(args.residual)[row * args.residual_stride + feature];
        static_cast<float*>(args.out)[row * args.out_stride + feature] = y;
    }
}

template <bool kGateUp>
__global__ void __launch_bounds__(32 * kLinearWarps) linear_f32_kernel(LinearArgs args) {
    grid_dependency_wait();
    const int width = kGateUp ? args.weight.n / 2 : args.weight.n;  // of out
    const int feature = static_cast<int>(blockIdx.x * kLinearWarps + warp_id());
    if (feature >= width) return;
    const GroupWeight weight{args.weight.data, args.weight.bias, 1.0f};
    for (int64_t token = static_cast<int64_t>(blockIdx.y) * kTokens; token < args.num_tokens;
         token += static_cast<int64_t>(gridDim.y) * kTokens) {
        const int tokens = static_cast<int>(min(static_cast<int64_t>(kTokens), args.num_tokens - token));
        const auto row = [&](int t) { return token + t; };
        compute<kGateUp>(args, weight, feature, tokens, row, row);
    }
}

template <bool kGateUp>
__global__ void __launch_bounds__(32 * kLinearWarps)
    linear_grouped_f32_kernel(const __grid_constant__ GroupedLinearArgs args) {
    grid_dependency_wait();
    const int width = kGateUp ? args.linear.weight.n / 2 : args.linear.weight.n;
    const int feature = static_cast<int>(blockIdx.x * kLinearWarps + warp_id());
    if (feature >= width) return;
    const int num_items = args.num_items ? *args.num_items : args.most_items;
    for (int i = static_cast<int>(blockIdx.y); i < num_items; i += static_cast<int>(gridDim.y)) {
        const int4 item = args.items[i];
        for (int token = 0; token < item.z; token += kTokens) {
            const int first = item.y + token;
            const auto x_row = [&](int t) -> int64_t { return args.x_rows ? args.x_rows[first + t] : first + t; };
            const auto out_row = [&](int t) -> int64_t { return args.out_rows ? args.out_rows[first + t] : first + t; };
            compute<kGateUp>(args.linear, group_weight(args, item.x), feature, min(kTokens, item.z - token), x_row,
                             out_row);
        }
    }
}

static dim3 f32_grid(const LinearArgs& args, int groups) {
    const int width = joins_gate_up(args) ? args.weight.n / 2 : args.weight.n;
    return dim3(ceil_div(width, kLinearWarps), groups < 65535 ? groups : 65535);
}

cudaError_t linear_f32(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config{f32_grid(args, ceil_div(args.num_tokens, kTokens)), dim3(32 * kLinearWarps), 0, stream};
    return joins_gate_up(args) ? launch<linear_f32_kernel<true>>(config, args)
                               : launch<linear_f32_kernel<false>>(config, args);
}

cudaError_t linear_grouped_f32(const GroupedLinearArgs& args, cudaStream_t stream) {
    const LaunchConfig config{f32_grid(args.linear, args.most_items), dim3(32 * kLinearWarps), 0, stream};
    return joins_gate_up(args.linear) ? launch<linear_grouped_f32_kernel<true>>(config, args)
                                      : launch<linear_grouped_f32_kernel<false>>(config, args);
}

}  // namespace infinilm::cuda
