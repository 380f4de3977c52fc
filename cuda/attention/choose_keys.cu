// The keys that each token reads of those that it sees (ChooseKeysParams): small heads score them, and the top_k best
// are chosen, of equals the earlier ones; or the best runs of keys.
//
// A block takes a token at a time; a token's scores are a row of scratch in device memory. Scores: a warp has a key, a
// lane some heads, or where there is one head, each thread has a key; queries lie in shared memory as
// [head_dim][heads], so that lanes read neighbours. Scores of runs replace those of their keys. Then the top_k-th
// largest is found digit by digit, 8 bits each, in a histogram in shared memory, and a pass over the keys in their
// order writes the chosen ones. Every sum has one order, so a choice depends on the token and its own keys alone. Reads
// num_keys * (head_dim * sizeof(T) + 6 * 4) bytes a token and multiplies num_keys * num_heads * head_dim times, without
// matrix instructions.
#include "cuda/attention/cache_rows.cuh"
#include "cuda/attention/kernels.h"
#include "cuda/core/launch.cuh"
#include "cuda/core/visit.cuh"

namespace infinilm::cuda {

constexpr int kChooseThreads = 256, kChooseWarps = kChooseThreads / 32, kBins = 256;

// The sequence of a token.
__device__ __forceinline__ int sequence_of(const ChooseKeysArgs& p, int token) {
    int first = 0, last = p.num_seqs - 1;
    while (first < last) {
        const int middle = (first + last + 1) / 2;
        if (p.cu_seqlens_q[middle] <= token)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

// An unsigned number whose order is that of the scores.
__device__ __forceinline__ uint32_t order_of(float score) {
    const uint32_t bits = float_to_bits(score);
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

template <class T, class E>
__global__ void __launch_bounds__(kChooseThreads, 4) choose_keys_kernel(ChooseKeysArgs p) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(int, bins, [kBins]);
    INFINILM_SHARED(int, of_warp, [2][kChooseWarps]);       // keys that are better than the threshold, and as good
    INFINILM_SHARED(uint32_t, found, [2]);                  // the threshold as order_of has it; how many of its equals
    float* const queries = reinterpret_cast<float*>(smem);  // [head_dim][num_heads]
    const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_id());
    const int warp = static_cast<int>(warp_id()), q_size = p.num_heads * p.head_dim;
    float* const scores = p.scores + static_cast<int64_t>(blockIdx.x) * p.scores_stride;

    for (int token = static_cast<int>(blockIdx.x); token < p.num_tokens; token += static_cast<int>(gridDim.x)) {
        const int seq = sequence_of(p, token);
        const int num_keys = p.context_lens[seq] - (p.cu_seqlens_q[seq + 1] - 1 - token);
        const int32_t* const blocks = p.block_table + seq * p.block_table_stride;
        const auto slot_of = [&](int key) { return blocks[key / p.block_size] * p.block_size + key % p.block_size; };
        const auto written_slot = [&](int key) {  // in the cache that attention reads
            return (blocks[key / p.block_size] * p.slot_heads + p.slot_head) * p.block_size + key % p.block_size;
        };
        int32_t* const out = p.slots + static_cast<int64_t>(token) * p.top_k;
        if (num_keys <= p.top_k) {
            for (int key = thread; key < num_keys; key += kChooseThreads) out[key] = written_slot(key);
            continue;
        }

        __syncthreads();  // the token before is done
        const T* const q = static_cast<const T*>(p.q) + token * p.q_stride;
        for (int i = thread; i < q_size; i += kChooseThreads)
            queries[i % p.head_dim * p.num_heads + i / p.head_dim] = to_float(q[i]);
        if (thread == 0) found[0] = 0, found[1] = static_cast<uint32_t>(p.top_k / p.run_keys);
        __syncthreads();
        const auto score_of = [&](const CacheRow<T, E>& row, int head) {
            float score = 0.0f;
#pragma unroll 1  // more rows at once of float32 spill registers
            for (int d = 0; d < p.head_dim; d += 8) {
                float k[8];
                row.load8(d, k);
#pragma unroll
                for (int j = 0; j < 8; ++j) score = __fmaf_rn(queries[(d + j) * p.num_heads + head], k[j], score);
            }
            return score;
        };
        const bool weighted = p.weights != nullptr;
        for (int key = weighted ? warp : thread; key < num_keys; key += weighted ? kChooseWarps : kChooseThreads) {
            const CacheRow<T, E> row(p.k_cache, p.k_scales, p.cache_type, slot_of(key), p.head_dim);
            if (!weighted) {
                scores[key] = score_of(row, 0);
                continue;
            }
            const float* const weights = p.weights + token * p.weights_stride;
            float sum = 0.0f;
            for (int head = lane; head < p.num_heads; head += 32)
                sum = __fmaf_rn(weights[head], fmaxf(score_of(row, head), 0.0f), sum);
            sum = warp_sum(sum);
            if (lane == 0) scores[key] = sum;
        }
        __syncthreads();

        // The score of a run replaces that of a key that is no later, which the threads have read by then.
        const int num_runs = (num_keys + p.run_keys - 1) / p.run_keys;
        for (int first = 0; p.last_runs > 0 && first < num_runs; first += kChooseThreads) {
            const int run = first + thread;
            float best = 0.0f;
            if (run < num_runs) {
                const int begin = run * p.run_keys, end = min(begin + p.run_keys, num_keys);
                best = scores[begin];
                for (int key = begin + 1; key < end; ++key)
                    if (order_of(scores[key]) > order_of(best)) best = scores[key];
                if (run >= num_runs - p.last_runs) best = bits_to_float(0x7f800000u);
            }
            __syncthreads();
            if (run < num_runs) scores[run] = best;
        }
        __syncthreads();

        for (int shift = 24; shift >= 0; shift -= 8) {
            bins[thread] = 0;
            __syncthreads();
            const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8), prefix = found[0];
            for (int run = thread; run < num_runs; run += kChooseThreads) {
                const uint32_t order = order_of(scores[run]);
                if (((order ^ prefix) & known) == 0) atomicAdd(&bins[order >> shift & (kBins - 1)], 1);
            }
            __syncthreads();
            if (thread == 0) {
                int bin = kBins - 1, left = static_cast<int>(found[1]);
                for (; bins[bin] < left; --bin) left -= bins[bin];
                found[0] = prefix | static_cast<uint32_t>(bin) << shift;
                found[1] = static_cast<uint32_t>(left);
            }
            __syncthreads();
        }

        const uint32_t threshold = found[0];
        const int most_equal = static_cast<int>(found[1]);
        int num_better = 0, num_equal = 0;  // of the runs before
        for (int first = 0; first < num_runs; first += kChooseThreads) {
            const int run = first + thread;
            const uint32_t order = run < num_runs ? order_of(scores[run]) : 0;
            const bool better = run < num_runs && order > threshold, equal = run < num_runs && order == threshold;
            const unsigned all_better = __ballot_sync(0xffffffffu, better),
                           all_equal = __ballot_sync(0xffffffffu, equal);
            if (lane == 0) {
                of_warp[0][warp] = __popc(all_better);
                of_warp[1][warp] = __popc(all_equal);
            }
            __syncthreads();
            const unsigned before = (1u << lane) - 1;
            int own_better = num_better + __popc(all_better & before),
                own_equal = num_equal + __popc(all_equal & before);
            for (int i = 0; i < kChooseWarps; ++i) {
                if (i < warp) own_better += of_warp[0][i], own_equal += of_warp[1][i];
                num_better += of_warp[0][i];
                num_equal += of_warp[1][i];
            }
            if (better || (equal && own_equal < most_equal)) {
                int32_t* const to = out + (own_better + min(own_equal, most_equal)) * p.run_keys;
                const int begin = run * p.run_keys, count = min(p.run_keys, num_keys - begin);
                for (int i = 0; i < count; ++i) to[i] = written_slot(begin + i);
            }
            __syncthreads();
        }
    }
}

cudaError_t choose_keys(const ChooseKeysArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const dim3 grid(
        static_cast<unsigned>(args.num_tokens < args.num_score_rows ? args.num_tokens : args.num_score_rows));
    const size_t smem_bytes = sizeof(float) * static_cast<size_t>(args.num_heads) * static_cast<size_t>(args.head_dim);
    const LaunchConfig config{grid, dim3(kChooseThreads), smem_bytes, stream};
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        return visit_cache<T>(args.k_scales,
                              [&](auto e) { return launch<choose_keys_kernel<T, decltype(e)>>(config, args); });
    });
}

}  // namespace infinilm::cuda
