// Draws one token per row of logits: temperature, top_k, top_p, min_p, the draw (SampleParams of src/ops/backend.h).
// And finds the best of a row, in order (FindBestParams): what a rank has to say of its part of a vocabulary. And tells
// log-probabilities, of a token and of the best (LogProbsParams).
//
// Mapping: blocks of 512 threads, as many for a row as there are SMs for, up to a cluster of eight (sm_90), or 16 that
// talk by device memory where there are no clusters. How it works is in sampling.cuh. Bytes: vocab_size * 4 a pass, all
// but the first from L2. Greedy is one pass, everything else three or four, of which one computes weights: about 45
// double operations each, the floor of many rows; that of one row are the barriers of its blocks. Log-probabilities are
// two passes, four with the best.
#include <algorithm>

#include "cuda/core/launch.cuh"
#include "cuda/sampling/sampling.cuh"

namespace infinilm::cuda {

template <class Peers>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(SampleArgs args) {
    begin_kernel();
    INFINILM_SHARED(SharedRow, shared, [1]);
    const int r = static_cast<int>(blockIdx.x) / args.blocks.count, size = args.vocab_size;
    const float* row = args.logits + r * args.logits_stride;  // [vocab_size]
    RowSampler<Peers> sampler(row, size, AllowedRow(args.mask, r), 0, args.blocks, shared[0]);
    uint32_t key, id;
    sampler.find_first(key, id);
    const float largest = logit_of(key);
    if (key <= kKeyOfInfinity || key >= kKeyOfMinusInfinity) {
        if (sampler.leave() && threadIdx.x == 0)
            args.ids[r] = key < kKeyOfInfinity ? nan_logit : key == kKeyOfInfinity ? infinite_logit : no_logit;
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
    if (sampler.leave() && threadIdx.x == 0)
        args.ids[r] = args.token_ids ? args.token_ids[r * args.token_ids_stride + id] : static_cast<int>(id);
}

template <class Peers>
__global__ void __launch_bounds__(kThreads, 1) find_best_kernel(FindBestArgs args) {
    begin_kernel();
    INFINILM_SHARED(SharedRow, shared, [1]);
    const int r = static_cast<int>(blockIdx.x) / args.blocks.count, i = static_cast<int>(threadIdx.x);
    const float* row = args.logits + r * args.logits_stride;  // [n]
    RowSampler<Peers> sampler(row, args.n, AllowedRow(args.mask, r), args.first_id, args.blocks, shared[0]);
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

template <class Peers>
__global__ void __launch_bounds__(kThreads, 1) log_probs_kernel(LogProbsArgs args) {
    begin_kernel();
    INFINILM_SHARED(SharedRow, shared, [1]);
    const int r = static_cast<int>(blockIdx.x) / args.blocks.count, i = static_cast<int>(threadIdx.x),
              size = args.vocab_size;
    const int count = args.num_logprobs[r];
    if (count < 0) return;
    const float* row = args.logits + r * args.logits_stride;  // [vocab_size]
    const int drawn = args.drawn[r];
    int* const ids = args.ids + r * args.width;              // [1 + count]
    float* const logprobs = args.logprobs + r * args.width;  // the same
    RowSampler<Peers> sampler(row, size, AllowedRow({}, r), 0, args.blocks, shared[0]);
    uint32_t key, id;
    sampler.find_first(key, id);
    if (drawn < 0 || key <= kKeyOfInfinity || key >= kKeyOfMinusInfinity) {
        if (sampler.leave() && i <= count) ids[i] = i == 0 ? drawn : -1, logprobs[i] = __uint_as_float(0x7fffffffu);
        return;
    }
    const float largest = logit_of(key);
    const double log_sum = sampler.log_sum(largest);
    int found = 0;  // above -inf
    if (count > 0) {
        sampler.set_reach(largest, INFINITY);
        sampler.keep_first(count);
        found = sampler.list_kept();
    }
    if (!sampler.leave()) return;
    auto write = [&](int place, int token) {
        ids[place] = token;
        logprobs[place] = static_cast<float>(static_cast<double>(row[token]) - static_cast<double>(largest) - log_sum);
    };
    if (i < found) write(1 + i, static_cast<int>(static_cast<uint32_t>(shared[0].sorted[i])));
    if (warp_id() != 0) return;
    if (i == 0) write(0, drawn);
    for (int first = 0; found < count; first += 32) {  // what is -inf, by id
        const bool is_next = first + i < size && row[first + i] == -INFINITY;
        const unsigned next = __ballot_sync(kAll, is_next);
        const int place = found + __popc(next & ((1u << i) - 1));
        if (is_next && place < count) write(1 + place, first + i);
        found += __popc(next);
    }
}

// One block for a row, a thread for a token: a few hundred of them, mostly.
constexpr int kChangeThreads = 256;
__global__ void __launch_bounds__(kChangeThreads) change_logits_kernel(ChangeLogitsArgs args) {
    begin_kernel();
    INFINILM_SHARED(int, is_listed, [1]);
    const int r = static_cast<int>(blockIdx.x);
    int *const begin = args.tokens + 3 * args.rows[2 * r], *const end = args.tokens + 3 * args.rows[2 * r + 1];
    const float* const penalty = args.penalties + 3 * r;
    float* const row = args.logits + r * args.logits_stride;  // [n]
    auto change = [&](int* token, int count) {
        const int column = token[0] - args.first_id;
        if (column < 0 || column >= args.n) return;
        const float was = row[column];
        float x = __int_as_float(token[2]);
        token[2] = __float_as_int(was);
        if (args.undo) {
            row[column] = x;
            return;
        }
        x = __fadd_rn(was, x);
        if (count >= 0) x = x > 0.0f ? __fdiv_rn(x, penalty[0]) : __fmul_rn(x, penalty[0]);
        if (count > 0) {
            x = __fadd_rn(x, -penalty[1]);
            const double times = __dmul_rn(static_cast<double>(penalty[2]), static_cast<double>(count));
            x = static_cast<float>(__dadd_rn(static_cast<double>(x), -times));
        }
        row[column] = x;
    };
    int* const one_more = !args.undo && begin != end && end[-3] < 0 ? end - 3 : end;
    const int last = one_more != end ? args.input_ids[args.logits_rows[r]] : -1;
    if (threadIdx.x == 0) is_listed[0] = 0;
    __syncthreads();
    for (int* token = begin + 3 * threadIdx.x; token < one_more; token += 3 * kChangeThreads) {
        const bool is_last = token[0] == last;
        if (is_last) is_listed[0] = 1;
        change(token, is_last ? max(token[1], 0) + 1 : token[1]);
    }
    __syncthreads();
    if (threadIdx.x == 0 && one_more != end && !is_listed[0]) {
        one_more[0] = last, one_more[2] = 0;
        change(one_more, 1);
    }
}

cudaError_t change_logits(const ChangeLogitsArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    return launch<change_logits_kernel>({dim3(args.num_rows), dim3(kChangeThreads), 0, stream}, args);
}

// Launches with as many blocks for a row as there are SMs for and work, unless the arguments say how many.
template <auto by_cluster, auto by_memory, class Args>
cudaError_t launch_rows(Args args, int size, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    RowBlocks& blocks = args.blocks;
    const bool in_memory = blocks.workspace != nullptr;
    if (blocks.count == 0) {
        int num_sms = 0, major = 0;
        if (cudaError_t error = device_sms(num_sms)) return error;
        if (cudaError_t error = device_attribute(major, cudaDevAttrComputeCapabilityMajor)) return error;
        const int most = in_memory ? kMostBlocks : major >= 9 ? kMostOfCluster : 1;
        constexpr int least = 4096;  // logits for a block
        blocks.count = 1;
        while (blocks.count < most && 2 * blocks.count * least <= size) {
            // Clusters of more than two that fill the device would wait for each other: SMs come in groups of 16 or 18.
            const int places = in_memory ? std::min(num_sms, blocks.places) : blocks.count == 1 ? num_sms : num_sms / 2;
            if (2 * blocks.count * args.num_rows > places) break;
            blocks.count *= 2;
        }
    }
    LaunchConfig config{dim3(static_cast<unsigned>(args.num_rows * blocks.count)), dim3(kThreads), 0, stream};
    if (in_memory && blocks.count > 1) {
        if (args.num_rows * blocks.count > blocks.places) return cudaErrorInvalidValue;
        config.cooperative = true;
        return launch<by_memory>(config, args);
    }
    config.cluster = static_cast<unsigned>(blocks.count);
    return launch<by_cluster>(config, args);
}

cudaError_t sampling_places(int& places) {
    int major = 0, cooperative = 0;
    places = 0;
    if (cudaError_t error = device_attribute(major, cudaDevAttrComputeCapabilityMajor)) return error;
    if (cudaError_t error = device_attribute(cooperative, cudaDevAttrCooperativeLaunch)) return error;
    return major < 9 && cooperative != 0 ? device_sms(places) : cudaSuccess;
}

size_t sampling_workspace_bytes(int blocks) { return sizeof(PublicRow) * static_cast<size_t>(blocks); }

cudaError_t sample(const SampleArgs& args, cudaStream_t stream) {
    return launch_rows<sample_kernel<ClusterPeers>, sample_kernel<MemoryPeers>>(args, args.vocab_size, stream);
}

cudaError_t log_probs(const LogProbsArgs& args, cudaStream_t stream) {
    return launch_rows<log_probs_kernel<ClusterPeers>, log_probs_kernel<MemoryPeers>>(args, args.vocab_size, stream);
}

cudaError_t find_best(const FindBestArgs& args, cudaStream_t stream) {
    return launch_rows<find_best_kernel<ClusterPeers>, find_best_kernel<MemoryPeers>>(args, args.n, stream);
}

}  // namespace infinilm::cuda
