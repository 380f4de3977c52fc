// Attention in float32, for checks: one warp per (query token, head), straight down the keys it sees.
//
// Grid (ceil(max_query_len / 4), num_heads, num_seqs), 128 threads, a token to each warp. 32 keys at a time, from
// multiples of 32: a lane has one key's score, then some columns of the output. Online softmax (Milakov & Gimelshein
// 2018). Bytes: the keys and values once for every query row, from the caches; the floor is elsewhere, this one is
// plain. Keys that are not seen take no part.
#include "cuda/attention/cache_rows.cuh"
#include "cuda/attention/kernels.h"
#include "cuda/core/launch.cuh"

namespace infinilm::cuda {

constexpr int kWarps = 4;

// E: an element of the cache. kMaxColumns: of a lane.
template <class E, int kMaxColumns>
__global__ void __launch_bounds__(kWarps * 32, 4) attention_f32_kernel(const AttentionArgs p) {
    grid_dependency_wait();
    INFINILM_SHARED(float, weights, [kWarps][32]);
    const int seq = blockIdx.z, head = blockIdx.y, token = blockIdx.x * kWarps + warp_id(), lane = lane_id();
    const int first_token = p.cu_seqlens_q[seq], query_len = p.cu_seqlens_q[seq + 1] - first_token;
    if (token >= query_len) return;
    const int context = p.context_lens[seq], position = context - query_len + token;
    const int window = p.sliding_window > 0 ? min(p.sliding_window, context) : context;
    const int begin = p.chunked ? position / p.sliding_window * p.sliding_window : max(0, position + 1 - window);
    const bool sees_all_behind = p.two_way_seqs && p.two_way_seqs[seq];
    const int end = sees_all_behind ? context : p.two_way ? min(context, position + window) : position + 1;
    const int kv_head = head / (p.num_heads / p.num_kv_heads);
    const int* blocks = p.block_table + seq * p.block_table_stride;
    auto key_row = [&](int key) {
        const int64_t block = blocks[key / p.block_size];
        return (block * p.num_kv_heads + kv_head) * p.block_size + key % p.block_size;
    };
    const float* q = static_cast<const float*>(p.q) + (first_token + token) * p.q_stride + int64_t{head} * p.head_dim;

    float m = -INFINITY, l = 0.0f, o[kMaxColumns] = {};
    for (int first = begin / 32 * 32; first < end; first += 32) {
        const int key = first + lane;
        float score = -INFINITY;
        if (key >= begin && key < end) {
            const CacheRow<float, E> k(p.k_cache, p.k_scales, p.cache_type, key_row(key), p.head_dim);
            score = 0.0f;
            for (int i = 0; i < p.head_dim; i += 8) {
                float a[8], b[8];
                load8(q + i, a);
                k.load8(i, b);
#pragma unroll
                for (int j = 0; j < 8; ++j) score = __fmaf_rn(a[j], b[j], score);
            }
            score *= p.softmax_scale;
            if (p.score_cap > 0) score = __fmul_rn(p.score_cap, tanhf(score / p.score_cap));
            if (p.position_bias)
                score = __fadd_rn(score, p.position_bias[head * p.position_bias_stride + key - position]);
        }
        const float before = m;
        m = fmaxf(m, warp_max(score));
        const float shift = m == -INFINITY ? 0.0f : m;  // no score is a number: the end is NaN
        const float weight = expf(score - shift), factor = expf(before - shift);
        l = __fmaf_rn(l, factor, warp_sum(weight));
#pragma unroll
        for (int i = 0; i < kMaxColumns; ++i) o[i] *= factor;
        weights[warp_id()][lane] = weight;
        __syncwarp();
        for (int other = max(first, begin); other < min(first + 32, end); ++other) {
            const CacheRow<float, E> v(p.v_cache, p.v_scales, p.cache_type, key_row(other), p.head_dim);
            const float w = weights[warp_id()][other - first];
#pragma unroll
            for (int i = 0; i < kMaxColumns; ++i)
                if (lane + 32 * i < p.value_dim) o[i] = __fmaf_rn(w, v.at(lane + 32 * i), o[i]);
        }
        __syncwarp();
    }
    if (p.sinks) l = __fadd_rn(l, expf(p.sinks[head] - m));
    float* out = static_cast<float*>(p.out) + (first_token + token) * p.out_stride + int64_t{head} * p.value_dim;
#pragma unroll
    for (int i = 0; i < kMaxColumns; ++i)
        if (lane + 32 * i < p.value_dim) out[lane + 32 * i] = o[i] / l;
}

cudaError_t attention_f32(const AttentionArgs& p, cudaStream_t stream) {
    if (p.num_seqs == 0 || p.max_query_len == 0) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.max_query_len, kWarps)), static_cast<unsigned>(p.num_heads),
                    static_cast<unsigned>(p.num_seqs));
    const LaunchConfig config{grid, dim3(kWarps * 32), 0, stream};
    return visit_cache<float>(p.k_scales, [&](auto e) {
        using E = decltype(e);
        return p.value_dim <= 256 ? launch<attention_f32_kernel<E, 8>>(config, p)
                                  : launch<attention_f32_kernel<E, 18>>(config, p);
    });
}

}  // namespace infinilm::cuda
