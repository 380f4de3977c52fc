// out = x . weight^T (+ bias) (+ residual), or activation(gate) * up, all in float32: for checks of the whole engine,
// where simple counts and speed does not. Mapping: one warp per (output feature, group of kTokens tokens). Bytes: every
// token group reads the weight once, 4 n k bytes, mostly from L2 after the first; operations 2 n k num_tokens on the
// FMA units, of which the loads leave about a tenth. 16-byte accesses: k a multiple of 8, rows of x aligned (kernels.h,
// Alignment). Order: lane l adds the products of vectors l, l + 32, .. of 8 columns, then the warp's butterfly: for any
// num_tokens.
#include "launch.cuh"
#include "linear.cuh"
#include "norm.cuh"

namespace infinilm::cuda {

constexpr int kTokens = 4, kLinearWarps = 4;

// The sums of one feature for kTokens tokens. row: [k]; x: [tokens, k] with x_stride.
__device__ __forceinline__ void dot(float (&sums)[kTokens], const float* row, const float* x, int64_t x_stride,
                                    int tokens, int k) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[t] = 0.0f;
    for (int i = static_cast<int>(lane_id()) * 8; i < k; i += 256) {
        float w[8], v[8];
        load8(row + i, w);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            if (t >= tokens) continue;
            load8(x + t * x_stride + i, v);
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[t] = __fmaf_rn(w[j], v[j], sums[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[t] = warp_sum(sums[t]);
}

template <bool kGateUp>
__global__ void __launch_bounds__(32 * kLinearWarps) linear_f32_kernel(LinearArgs args) {
    const PackedWeight& weight = args.weight;
    const int width = kGateUp ? weight.n / 2 : weight.n;  // of out
    const int feature = static_cast<int>(blockIdx.x * kLinearWarps + warp_id());
    if (feature >= width) return;
    const float* rows = static_cast<const float*>(weight.data);  // [n][k]
    for (int64_t token = static_cast<int64_t>(blockIdx.y) * kTokens; token < args.num_tokens;
         token += static_cast<int64_t>(gridDim.y) * kTokens) {
        const int tokens = static_cast<int>(min(static_cast<int64_t>(kTokens), args.num_tokens - token));
        const float* x = static_cast<const float*>(args.x) + token * args.x_stride;  // [tokens, k]
        float sums[kTokens], ups[kTokens];
        dot(sums, rows + static_cast<int64_t>(feature) * weight.k, x, args.x_stride, tokens, weight.k);
        if constexpr (kGateUp)
            dot(ups, rows + static_cast<int64_t>(feature + width) * weight.k, x, args.x_stride, tokens, weight.k);
        if (lane_id() != 0) continue;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            if (t >= tokens) continue;
            float y = sums[t] + (weight.bias ? weight.bias[feature] : 0.0f);
            if constexpr (kGateUp)
                y = act_mul<float>(args.activation, y, ups[t] + (weight.bias ? weight.bias[feature + width] : 0.0f));
            if (args.residual)
                y += static_cast<const float*>(args.residual)[(token + t) * args.residual_stride + feature];
            static_cast<float*>(args.out)[(token + t) * args.out_stride + feature] = y;
        }
    }
}

cudaError_t linear_f32(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const bool gate_up = joins_gate_up(args);
    const int width = gate_up ? args.weight.n / 2 : args.weight.n, groups = ceil_div(args.num_tokens, kTokens);
    const dim3 grid(ceil_div(width, kLinearWarps), groups < 65535 ? groups : 65535);
    const LaunchConfig config{grid, dim3(32 * kLinearWarps), 0, stream};
    return gate_up ? launch<linear_f32_kernel<true>>(config, args) : launch<linear_f32_kernel<false>>(config, args);
}

}  // namespace infinilm::cuda
