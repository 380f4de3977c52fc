// Linears of heads: each head of a token goes through a weight of its own. What brings queries to the latents of a
// cache, and what attention gives of these to values (LatentSpec of src/model/spec.h).
//
// head_linear_kernel: 16 bits, heads of whole tiles of the packed weight. A warp has a tile of 16 features of one head
// for up to 32 tokens, straight down k: the weight is A of mma_m16n8k16 as it is packed, x is B, both from memory.
// Bytes: each weight once for 32 tokens, x from L1 or L2 by the tiles that share it; decode is bound by the weight.
// head_linear_plain_kernel: all other formats and sizes, and float32: a warp for each feature.
// A row's sum is one chain of mma over k, or that of its lanes and a butterfly, whatever the number of tokens.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/linear/stored_row.cuh"

namespace infinilm::cuda {

constexpr int kHeadWarps = 4, kHeadTiles = 4, kHeadTokens = 8 * kHeadTiles;  // tiles: of 8 tokens
constexpr int kPlainTokens = 4;

template <class T>
__global__ void __launch_bounds__(32 * kHeadWarps) head_linear_kernel(HeadLinearArgs p) {
    begin_kernel();
    const int tile = static_cast<int>(blockIdx.x * kHeadWarps + warp_id()), lane = static_cast<int>(lane_id());
    if (tile >= num_tiles(p.weight)) return;
    const int k = p.weight.k, steps = num_steps(k), out_features = p.out_features;
    const int head = 16 * tile / out_features, first_token = static_cast<int>(blockIdx.y) * kHeadTokens;
    const uint4* weight = static_cast<const uint4*>(p.weight.data) + static_cast<int64_t>(tile) * steps * 32 + lane;
    const T* x[kHeadTiles];  // of this lane's token of each tile, from its columns on; null: there is none
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i) {
        const int token = first_token + 8 * i + lane / 4;
        x[i] = token < p.num_tokens
                   ? static_cast<const T*>(p.x) + token * p.x_stride + head * p.x_head_stride + lane % 4 * 2
                   : nullptr;
    }
    float sums[kHeadTiles][4] = {};
#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
        const uint4 w = load_readonly_16(weight + step * 32);
        const bool has_upper = 16 * step + 8 < k;  // k is a multiple of 8
#pragma unroll
        for (int i = 0; i < kHeadTiles; ++i) {
            if (first_token + 8 * i >= p.num_tokens) break;
            const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(x[i] + 16 * step);
            const uint32_t lower = x[i] ? pairs[0] : 0, upper = x[i] && has_upper ? pairs[4] : 0;
            mma_m16n8k16<T>(sums[i], {w.x, w.y, w.z, w.w}, {lower, upper});
        }
    }
    // A lane has rows lane / 4 and 8 below of tokens 2 (lane % 4) and the next.
    const int feature = 16 * tile - head * out_features + lane / 4;
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int token = first_token + 8 * i + lane % 4 * 2 + j % 2;
            if (token < p.num_tokens)
                static_cast<T*>(p.out)[token * p.out_stride + head * p.out_head_stride + feature + j / 2 * 8] =
                    from_float<T>(sums[i][j]);
        }
}

// 8 columns of a feature, in any format.
template <class T>
__device__ __forceinline__ void weight_columns(const PackedWeight& w, int feature, int vector, float (&values)[8]) {
    if constexpr (sizeof(T) == 4) {
        load8(static_cast<const float*>(w.data) + static_cast<int64_t>(feature) * w.k + vector * 8, values);
    } else if (w.format == WeightFormat::as_type) {
        const uint32_t* words = static_cast<const uint32_t*>(w.data) +
                                (static_cast<int64_t>(feature / 16) * num_steps(w.k) + vector / 2) * 128 +
                                feature % 8 * 16 + feature % 16 / 8 + vector % 2 * 2;
        unpack8<T>(make_uint4(words[0], words[4], words[8], words[12]), values);
    } else {
        stored_row(w, feature, vector, values);
    }
}

template <class T>
__global__ void __launch_bounds__(32 * kHeadWarps) head_linear_plain_kernel(HeadLinearArgs p) {
    begin_kernel();
    const int out_features = p.out_features;
    const int feature = static_cast<int>(blockIdx.x * kHeadWarps + warp_id()), head = feature / out_features;
    const int first_token = static_cast<int>(blockIdx.y) * kPlainTokens;
    if (head >= p.num_heads) return;
    float sums[kPlainTokens] = {};
    for (int vector = static_cast<int>(lane_id()); vector < p.weight.k / 8; vector += 32) {
        float w[8], v[8];
        weight_columns<T>(p.weight, feature, vector, w);
#pragma unroll
        for (int t = 0; t < kPlainTokens; ++t) {
            if (first_token + t >= p.num_tokens) break;
            load8(static_cast<const T*>(p.x) + (first_token + t) * p.x_stride + head * p.x_head_stride + vector * 8, v);
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[t] = __fmaf_rn(w[j], v[j], sums[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < kPlainTokens; ++t) {
        const float sum = warp_sum(sums[t]);
        if (lane_id() == 0 && first_token + t < p.num_tokens)
            static_cast<T*>(
                p.out)[(first_token + t) * p.out_stride + head * p.out_head_stride + feature - head * out_features] =
                from_float<T>(sum);
    }
}

cudaError_t head_linear(const HeadLinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const PackedWeight& w = args.weight;
    const bool whole_tiles = args.out_features % 16 == 0;
    const auto config = [&](int units, int tokens) {
        return LaunchConfig{dim3(ceil_div(units, kHeadWarps), ceil_div(args.num_tokens, tokens)), dim3(32 * kHeadWarps),
                            0, stream};
    };
    return visit(w.type, [&](auto t) {
        using T = decltype(t);
        if constexpr (sizeof(T) == 2)
            if (whole_tiles && w.format == WeightFormat::as_type)
                return launch<head_linear_kernel<T>>(config(num_tiles(w), kHeadTokens), args);
        return launch<head_linear_plain_kernel<T>>(config(args.num_heads * args.out_features, kPlainTokens), args);
    });
}

}  // namespace infinilm::cuda
