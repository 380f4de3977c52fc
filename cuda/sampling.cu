// Draws one token per row of logits: temperature, top_k, top_p, min_p, the draw (SampleParams of src/ops/backend.h).
// And finds the best of a row, in order (FindBestParams): what a rank has to say of its part of a vocabulary.
//
// Mapping: blocks of 512 threads, as many for a row as there are SMs for, up to a cluster of eight (sm_90; one before
// it); no memory but theirs. How it works is in sampling.cuh. Bytes: vocab_size * 4 a pass, all but the first from L2.
// Greedy is one pass, log probabilities one more, everything else three or four, of which one computes weights: about
// 45 double operations each, the floor of many rows; that of one row are the barriers of the cluster.
#include "launch.cuh"
#include "sampling.cuh"

namespace infinilm::cuda {

__global__ void __launch_bounds__(kThreads, 1) sample_kernel(SampleArgs args) {
    begin_kernel();
    INFINILM_SHARED(SharedRow, shared, [1]);
    const int r = static_cast<int>(blockIdx.x) / args.blocks, size = args.vocab_size;
    const float* row = args.logits + r * args.logits_stride;  // [vocab_size]
    RowSampler sampler(row, size, AllowedRow(args.mask, r), 0, args.blocks, shared[0]);
    uint32_t key, id;
    sampler.find_first(key, id);
    const float largest = logit_of(key);
    if (key <= kKeyOfInfinity || key >= kKeyOfMinusInfinity) {
        if (!sampler.leave() || threadIdx.x != 0) return;
        args.ids[r] = key < kKeyOfInfinity ? nan_logit : key == kKeyOfInfinity ? infinite_logit : no_logit;
        if (args.logprobs) args.logprobs[r] = __uint_as_float(0x7fffffffu);
        return;
    }
    const float temperature = args.temperature[r], top_p = args.top_p[r], min_p = fminf(args.min_p[r], 1.0f);
    const int top_k = args.top_k[r];
    if (temperature != 0.0f && top_k != 1) {
        Weights weights(largest, temperature, size);
        sampler.set_reach(largest, weights.reach);
        if (top_k > 0 && top_k < size) sampler.keep_first(top_k);
        if (top_p < 1.0f) sampler.keep_share(weights, top_p);
        if (min_p > 0.0f) {
            weights.drop_below(min_p);
            sampler.set_reach(largest, weights.reach);
        }
        id = sampler.draw(weights, fminf(args.random_val[r], 1.0f - 0x1p-24f));
    }
    const float logprob = args.logprobs ? sampler.log_softmax(row[id], largest) : 0.0f;
    if (!sampler.leave() || threadIdx.x != 0) return;
    args.ids[r] = args.token_ids ? args.token_ids[r * args.token_ids_stride + id] : static_cast<int>(id);
    if (args.logprobs) args.logprobs[r] = logprob;
}

__global__ void __launch_bounds__(kThreads, 1) find_best_kernel(FindBestArgs args) {
    begin_kernel();
    INFINILM_SHARED(SharedRow, shared, [1]);
    const int r = static_cast<int>(blockIdx.x) / args.blocks, i = static_cast<int>(threadIdx.x);
    const float* row = args.logits + r * args.logits_stride;  // [n]
    RowSampler sampler(row, args.n, AllowedRow(args.mask, r), args.first_id, args.blocks, shared[0]);
    auto write = [&](int place, uint32_t key, uint32_t id) {  // -inf and what is not there look the same
        const bool any = key < kKeyOfMinusInfinity;
        args.best[r * args.k + place] = any ? row[id] : -INFINITY;
        args.ids[r * args.k + place] = args.first_id + (any ? static_cast<int>(id) : 0);
    };
    uint32_t key, id;
    sampler.find_first(key, id);
    if (args.k == 1 || key < kKeyOfInfinity || key >= kKeyOfMinusInfinity) {  // one, NaN, or nothing
        if (sampler.leave() && i < args.k) write(i, i == 0 ? key : kAll, id);
        return;
    }
    sampler.set_reach(logit_of(key), INFINITY);
    sampler.keep_first(args.k);
    const int found = sampler.list_kept();
    if (!sampler.leave() || i >= args.k) return;
    const uint64_t order = i < found ? shared[0].sorted[i] : kLast;
    write(i, key_of(order), static_cast<uint32_t>(order));
}

// One block for a row, a thread for a token: a few hundred of them, mostly.
constexpr int kChangeThreads = 256;
__global__ void __launch_bounds__(kChangeThreads) change_logits_kernel(ChangeLogitsArgs args) {
    begin_kernel();
    INFINILM_SHARED(int, is_listed, [1]);
    const int r = static_cast<int>(blockIdx.x);
    const int* const part = args.rows + 3 * r;
    const float* const penalty = args.penalties + 3 * r;
    float* const row = args.logits + r * args.logits_stride;  // [n]
    auto change = [&](int id, int count, float bias) {
        const int column = id - args.first_id;
        if (column < 0 || column >= args.n) return;
        float x = __fadd_rn(row[column], bias);
        if (count >= 0) x = x > 0.0f ? __fdiv_rn(x, penalty[0]) : __fmul_rn(x, penalty[0]);
        if (count > 0) {
            x = __fadd_rn(x, -penalty[1]);
            const double times = __dmul_rn(static_cast<double>(penalty[2]), static_cast<double>(count));
            x = static_cast<float>(__dadd_rn(static_cast<double>(x), -times));
        }
        row[column] = x;
    };
    const int last = part[2] ? args.input_ids[args.logits_rows[r]] : -1;
    if (threadIdx.x == 0) is_listed[0] = last < 0;
    __syncthreads();
    for (int i = part[0] + static_cast<int>(threadIdx.x); i < part[1]; i += kChangeThreads) {
        const int* const token = args.tokens + 3 * i;
        const bool is_last = token[0] == last;
        if (is_last) is_listed[0] = 1;
        change(token[0], is_last ? max(token[1], 0) + 1 : token[1], __int_as_float(token[2]));
    }
    __syncthreads();
    if (threadIdx.x == 0 && !is_listed[0]) change(last, 1, 0.0f);
}

cudaError_t change_logits(const ChangeLogitsArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    return launch<change_logits_kernel>({dim3(args.num_rows), dim3(kChangeThreads), 0, stream}, args);
}

// Launches with as many blocks for a row as there are SMs for and work, unless the arguments say how many.
template <auto kernel, class Args>
cudaError_t launch_rows(Args args, int size, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    if (args.blocks == 0) {
        int num_sms = 0, major = 0;
        if (cudaError_t error = device_sms(num_sms)) return error;
        if (cudaError_t error = device_attribute(major, cudaDevAttrComputeCapabilityMajor)) return error;
        const bool has_clusters = major >= 9;
        constexpr int least = 4096;  // logits for a block
        args.blocks = 1;
        // Clusters of more than two that fill the device would wait for each other: SMs come in groups of 16 or 18.
        while (has_clusters && args.blocks < kMostBlocks && 2 * args.blocks * least <= size &&
               2 * args.blocks * args.num_rows <= (args.blocks == 1 ? num_sms : num_sms / 2))
            args.blocks *= 2;
    }
    LaunchConfig config{dim3(static_cast<unsigned>(args.num_rows * args.blocks)), dim3(kThreads), 0, stream};
    config.cluster = static_cast<unsigned>(args.blocks);
    return launch<kernel>(config, args);
}

cudaError_t sample(const SampleArgs& args, cudaStream_t stream) {
    return launch_rows<sample_kernel>(args, args.vocab_size, stream);
}

cudaError_t find_best(const FindBestArgs& args, cudaStream_t stream) {
    return launch_rows<find_best_kernel>(args, args.n, stream);
}

}  // namespace infinilm::cuda
