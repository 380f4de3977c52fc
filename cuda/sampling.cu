// Draws one token per row of logits: temperature, top_k, top_p, min_p, the draw (SampleParams of src/ops/backend.h).
// And finds the best of a row, in order (FindBestParams): what a rank has to say of its part of a vocabulary.
//
// Every filter keeps a prefix of the candidates in order (logit descending, id ascending), and so it is enough to find
// where counts or sums along that order pass a goal. Nothing is sorted: the order is a 32-bit key, and three passes
// (11, 11, 10 bits) fill a histogram and descend into the bin in which the boundary falls; candidates with the very
// same logit weigh the same, so among them it is a division. Weights are integers (exp to a multiple of 2^-45, by the
// arithmetic of src/cpu/sampling.cpp), so sums are exact in any order: integer atomics give the same bits every time,
// and the same token as the CPU. Once a boundary leaves few candidates, they move to a list in shared memory.
//
// What a mask does not allow counts as a logit of -inf: one more load per logit, of a word that a warp shares.
//
// Mapping: one block of 1024 threads per row, no scratch. Bytes: vocab_size * 4 a pass. Greedy is one pass, log
// probabilities one more, everything else three, and up to fifteen for distributions so flat that the list overflows;
// all but the first come from L2. The best of a row: one pass if it is one, else two, and up to eight where the list
// overflows. Floor of a small batch: what one SM reads from L2, about 6 us a pass for 150000 entries, and where a sum
// goes over the whole vocabulary the 40 double operations of each weight. Any alignment.
// Ideas: radix select, flashinfer include/flashinfer/topk.cuh; boundary search instead of a sort for top_p,
// arXiv 2602.01518; sums as integers, src/cpu/sampling.cpp.
#include "device.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace infinilm::cuda {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBins = 2048;    // two per thread
constexpr int kListed = 3072;  // candidates that fit the list
constexpr int kBatch = 8;      // loads in flight per thread
constexpr unsigned kAll = 0xffffffffu;

// ---- the order ---------------------------------------------------------------------------------------------------

// Earlier candidates have smaller keys; -0 ties with 0; NaN comes before everything.
constexpr uint32_t kKeyOfInfinity = 0x007fffffu, kKeyOfMinusInfinity = 0xff800000u;
__device__ __forceinline__ uint32_t order_key(float logit) {
    const uint32_t bits = logit == 0.0f ? 0u : __float_as_uint(logit);
    return logit != logit ? 0u : bits >> 31 ? bits : ~bits & 0x7fffffffu;
}
__device__ __forceinline__ float logit_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key : ~key & 0x7fffffffu);
}

// ---- weights -----------------------------------------------------------------------------------------------------

// exp_vectorised of src/cpu/sampling.cpp, operation by operation: e^x for x in [-700, 0] to 1 ulp.
__device__ __forceinline__ double exp_exact(double x) {
    const double shifted = __dadd_rn(__dmul_rn(x, 0x1.71547652b82fep0), 0x1.8p52), n = __dadd_rn(shifted, -0x1.8p52);
    const double r = __dadd_rn(__dadd_rn(x, -__dmul_rn(n, 0x1.62e42fee00000p-1)), -__dmul_rn(n, 0x1.a39ef35793c76p-33));
    constexpr double coefficients[] = {
        1.0 / 6227020800.0, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720,          1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
    double p = coefficients[0];
#pragma unroll
    for (int i = 1; i < 14; ++i) p = __dadd_rn(__dmul_rn(p, r), coefficients[i]);
    uint64_t bits, exponent;
    memcpy(&bits, &p, 8);
    memcpy(&exponent, &shifted, 8);
    bits += exponent << 52;
    memcpy(&p, &bits, 8);
    return p;
}

// exp((logit - largest) / temperature) in units of 1 / one; 0 for what weighs less than least.
struct Weights {
    float largest, reach;  // nothing further than `reach` below the largest weighs anything
    double temperature, inverse, one, least = 0;

    __device__ __forceinline__ Weights(float largest_logit, float t, int vocab_size) : largest(largest_logit) {
        reach = fminf(__fmul_rn(32.0f, t), 3.402823466e38f);
        temperature = static_cast<double>(t);
        inverse = 1.0 / temperature;
        const int width = 32 - __clz(vocab_size);
        one = static_cast<double>(uint64_t{1} << (45 < 63 - width ? 45 : 63 - width));
    }
    __device__ __forceinline__ uint64_t operator()(float logit) const {
        if (!(__fadd_rn(largest, -logit) <= reach)) return 0;
        // The quotient, correctly rounded (Markstein 1990): two corrections of a product.
        const double x = __dadd_rn(static_cast<double>(logit), -static_cast<double>(largest));
        double quotient = __dmul_rn(x, inverse);
#pragma unroll
        for (int i = 0; i < 2; ++i) quotient = __fma_rn(__fma_rn(-quotient, temperature, x), inverse, quotient);
        const double rounded = __dadd_rn(__dmul_rn(exp_exact(quotient), one), 0x1p52);
        uint64_t weight;
        memcpy(&weight, &rounded, 8);
        weight &= 0xfffffffffffffu;
        return static_cast<double>(weight) >= least ? weight : 0;
    }
};

// ---- a block at work on a row ------------------------------------------------------------------------------------

struct SharedRow {
    uint32_t low[kBins], high[kBins];  // a bin is low + 2^32 high
    float list_logits[kListed];
    int list_ids[kListed];
    uint64_t warps[kWarps];
    uint64_t before;  // of the bin that was found
    int bin, listed;
};

// Running counts or sums pass at `goal`: when they reach it, or (strict) when they exceed it.
struct Goal {
    double amount;
    bool strict;
    __device__ __forceinline__ bool passed_by(uint64_t running) const {
        const double value = static_cast<double>(running);
        return strict ? value > amount : value >= amount;
    }
};

// The first `count` of the candidates with this key, and all with a smaller one.
struct Prefix {
    uint32_t key;
    uint64_t count;
};

struct One {
    __device__ __forceinline__ uint64_t operator()(float) const { return 1; }
};

// The bits of the tokens that a row may draw.
struct AllowedRow {
    const uint32_t* words;  // null: all are set
    __device__ __forceinline__ AllowedRow(const AllowedArgs& args, int row) : words(nullptr) {
        const int mask = args.allowed ? args.allowed_row[row] : -1;
        if (mask >= 0) words = args.allowed + mask * args.allowed_stride;
    }
    __device__ __forceinline__ float operator()(float logit, uint32_t id) const {
        return !words || words[id / 32] >> id % 32 & 1 ? logit : -INFINITY;
    }
};

class RowSampler {
public:
    // first_id: of the first column, in the bits of what is allowed.
    __device__ __forceinline__ RowSampler(const float* row, int vocab_size, AllowedRow allowed, int first_id,
                                          SharedRow& shared)
        : row_(row), size_(vocab_size), allowed_(allowed), first_id_(first_id), s_(shared) {}

    // The first of the order: key and id.
    __device__ __forceinline__ void find_first(uint32_t& key, uint32_t& id) {
        uint64_t best = ~uint64_t{0};
        for_candidates([&](float logit, int i) {
            const uint64_t at = static_cast<uint64_t>(order_key(logit)) << 32 | static_cast<uint32_t>(i);
            best = at < best ? at : best;
        });
        best = reduce(best, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
        key = static_cast<uint32_t>(best >> 32), id = static_cast<uint32_t>(best);
    }

    // Keeps up to where the running amount passes the goal: `goal` itself, or that share of the sum over all kept.
    template <class Amount>
    __device__ __forceinline__ Prefix find_boundary(const Amount& amount, double goal, bool is_share, bool strict) {
        Goal target{goal, strict};
        Prefix found{0, 0};
        uint64_t before = 0;
        uint32_t known = 0;  // the bits of found.key that are found
#pragma unroll 1
        for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
            clear();
            for_candidates([&](float logit, int) {
                const uint32_t key = order_key(logit);
                if (key < kept_.key && !((key ^ found.key) & known)) add(key >> shift, amount(logit));
            });
            if (threadIdx.x == 0 && kept_.count && !((kept_.key ^ found.key) & known))
                add(kept_.key >> shift, kept_.count * amount(logit_of(kept_.key)));
            found.key |= descend(before, target, is_share && shift == 21) << shift;
            known = kAll << shift;
            if (shift == 21 && listed_ < 0) make_list(found.key | ~known);
        }
        // Candidates of one key weigh the same: the first of them to pass, by bisection.
        const uint64_t each = amount(logit_of(found.key));
        uint64_t low = 1, high = size_;
        while (low < high) {
            const uint64_t middle = (low + high) / 2;
            if (target.passed_by(before + middle * each))
                high = middle;
            else
                low = middle + 1;
        }
        found.count = low;
        return found;
    }
    __device__ __forceinline__ void keep(Prefix prefix) { kept_ = prefix; }

    // The last id of a prefix.
    __device__ __forceinline__ uint32_t last_id(Prefix prefix) {
        Goal target{static_cast<double>(prefix.count), false};
        uint64_t before = 0;
        uint32_t id = 0, known = 0;
#pragma unroll 1
        for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
            if (shift > 0 && size_ >> shift == 0) continue;  // no id has these bits
            clear();
            for_candidates([&](float logit, int i) {
                const uint32_t at = static_cast<uint32_t>(i);
                if (order_key(logit) == prefix.key && !((at ^ id) & known)) add(at >> shift, 1);
            });
            id |= descend(before, target, false) << shift;
            known = kAll << shift;
        }
        return id;
    }

    // All of a prefix of at most kBins candidates, in any order: keys into the lower halves of the bins, ids into the
    // upper ones. Their number.
    __device__ __forceinline__ int gather(Prefix prefix, uint32_t last) {
        if (threadIdx.x == 0) s_.listed = 0;
        __syncthreads();
        for_candidates([&](float logit, int id) {
            const uint32_t key = order_key(logit);
            if (key > prefix.key || (key == prefix.key && static_cast<uint32_t>(id) > last)) return;
            const int at = atomicAdd(&s_.listed, 1);
            s_.low[at] = key, s_.high[at] = static_cast<uint32_t>(id);
        });
        __syncthreads();
        return s_.listed;
    }

    // log softmax of the allowed logits at one of them.
    __device__ __forceinline__ float log_softmax(float logit, float largest) {
        listed_ = -1;
        constexpr float one = 0x1p44f;  // sums of 2^19 fit; in fixed point any order gives the same bits
        uint64_t sum = 0;
        for_candidates([&](float other, int) { sum += static_cast<uint64_t>(expf(other - largest) * one); });
        sum = reduce(sum, [](uint64_t a, uint64_t b) { return a + b; });
        const double log_sum = log(static_cast<double>(sum) / static_cast<double>(one));
        return static_cast<float>(static_cast<double>(logit) - static_cast<double>(largest) - log_sum);
    }

private:
    // f(logit, id) for every candidate: of the row, or of the list.
    template <class F>
    __device__ __forceinline__ void for_candidates(F f) const {
        if (listed_ >= 0) {
            for (int i = threadIdx.x; i < listed_; i += kThreads) f(s_.list_logits[i], s_.list_ids[i]);
            return;
        }
        for (int first = threadIdx.x; first < size_; first += kThreads * kBatch) {
            float logits[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = first + j * kThreads;
                logits[j] = i < size_ ? row_[i] : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j)
                if (const int i = first + j * kThreads; i < size_)
                    f(allowed_(logits[j], static_cast<uint32_t>(first_id_ + i)), i);
        }
    }

    // A list of all kept candidates up to a key, if they are few: all that later passes look at.
    __device__ __forceinline__ void make_list(uint32_t last_key) {
        if (threadIdx.x == 0) s_.listed = 0;
        __syncthreads();
        last_key = last_key < kept_.key ? last_key : kept_.key;
        for_candidates([&](float logit, int id) {
            if (order_key(logit) > last_key) return;
            const int at = atomicAdd(&s_.listed, 1);  // in any order: nothing depends on it
            if (at < kListed) s_.list_logits[at] = logit, s_.list_ids[at] = id;
        });
        __syncthreads();
        if (s_.listed <= kListed) listed_ = s_.listed;
    }

    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < kBins; i += kThreads) s_.low[i] = s_.high[i] = 0;
        __syncthreads();
    }
    // In two halves, as shared memory has no 64-bit atomic addition; each wrap of the low half is seen by one thread.
    __device__ __forceinline__ void add(uint32_t digit, uint64_t amount) {
        if (amount == 0) return;
        const uint32_t low = static_cast<uint32_t>(amount), old = atomicAdd(&s_.low[digit % kBins], low);
        const uint32_t high = static_cast<uint32_t>(amount >> 32) + (old + low < old);
        if (high) atomicAdd(&s_.high[digit % kBins], high);
    }

    // The first bin that passes the goal (first made absolute, if it is a share of the total), with what runs `before`
    // the bins; adds to that what lies before the bin found.
    __device__ __forceinline__ uint32_t descend(uint64_t& before, Goal& goal, bool is_share) {
        __syncthreads();
        uint64_t bins[2], mine = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int bin = 2 * threadIdx.x + j;
            bins[j] = static_cast<uint64_t>(s_.high[bin]) << 32 | s_.low[bin];
            mine += bins[j];
        }
        const uint64_t up_to_mine = warp_scan(mine);
        if (lane_id() == 31) s_.warps[warp_id()] = up_to_mine;
        __syncthreads();
        const uint64_t warps = warp_scan(s_.warps[lane_id()]);
        const uint64_t earlier = __shfl_sync(kAll, warps, static_cast<int>(warp_id() + 31) % 32);
        const uint64_t total = __shfl_sync(kAll, warps, 31);
        if (is_share) goal.amount = __dmul_rn(goal.amount, static_cast<double>(total));
        uint64_t running = before + up_to_mine - mine + (warp_id() ? earlier : 0);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint64_t after = running + bins[j];
            if (bins[j] && goal.passed_by(after) && (running == 0 || !goal.passed_by(running))) {
                s_.bin = 2 * threadIdx.x + j;
                s_.before = running;
            }
            running = after;
        }
        __syncthreads();
        before = s_.before;
        return static_cast<uint32_t>(s_.bin);
    }

    // Sum over the lanes up to this one.
    __device__ static __forceinline__ uint64_t warp_scan(uint64_t value) {
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const uint64_t other = __shfl_up_sync(kAll, value, offset);
            if (static_cast<int>(lane_id()) >= offset) value += other;
        }
        return value;
    }
    template <class Op>
    __device__ __forceinline__ uint64_t reduce(uint64_t value, Op op) {
        auto over_lanes = [&](uint64_t v) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(kAll, v, offset));
            return v;
        };
        value = over_lanes(value);
        __syncthreads();
        if (lane_id() == 0) s_.warps[warp_id()] = value;
        __syncthreads();
        return over_lanes(s_.warps[lane_id()]);
    }

    const float* row_;  // [size_]
    int size_;
    AllowedRow allowed_;
    int first_id_;
    SharedRow& s_;
    int listed_ = -1;       // candidates in the list; -1: all of the row
    Prefix kept_{kAll, 0};  // of the order
};

__global__ void __launch_bounds__(kThreads) sample_kernel(SampleArgs args) {
    begin_kernel();
    INFINILM_SHARED(SharedRow, shared, [1]);
    const int r = static_cast<int>(blockIdx.x), size = args.vocab_size;
    const float* row = args.logits + r * args.logits_stride;  // [vocab_size]
    RowSampler sampler(row, size, AllowedRow(args.mask, r), 0, shared[0]);
    uint32_t key, id;
    sampler.find_first(key, id);
    const float largest = logit_of(key);
    if (key <= kKeyOfInfinity || key == kKeyOfMinusInfinity) {
        if (threadIdx.x != 0) return;
        args.ids[r] = key < kKeyOfInfinity ? nan_logit : key == kKeyOfInfinity ? infinite_logit : no_logit;
        if (args.logprobs) args.logprobs[r] = __uint_as_float(0x7fffffffu);
        return;
    }
    const float temperature = args.temperature[r], top_p = args.top_p[r], min_p = args.min_p[r];
    const int top_k = args.top_k[r];
    if (temperature != 0.0f && top_k != 1) {
        Weights weights(largest, temperature, size);
        if (top_k > 0 && top_k < size) sampler.keep(sampler.find_boundary(One{}, top_k, false, false));
        if (top_p < 1.0f) sampler.keep(sampler.find_boundary(weights, static_cast<double>(top_p), true, false));
        weights.least = __dmul_rn(static_cast<double>(fminf(min_p, 1.0f)), weights.one);
        const float goal = fminf(args.random_val[r], 1.0f - 0x1p-24f);
        id = sampler.last_id(sampler.find_boundary(weights, static_cast<double>(goal), true, true));
    }
    const float logprob = args.logprobs ? sampler.log_softmax(row[id], largest) : 0.0f;
    if (threadIdx.x != 0) return;
    args.ids[r] = args.token_ids ? args.token_ids[r * args.token_ids_stride + id] : static_cast<int>(id);
    if (args.logprobs) args.logprobs[r] = logprob;
}

// One block on an SM: with room for two a thread has 32 registers, and spills one.
__global__ void __launch_bounds__(kThreads, 1) find_best_kernel(FindBestArgs args) {
    begin_kernel();
    INFINILM_SHARED(SharedRow, shared, [1]);
    const int r = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x);
    const float* row = args.logits + r * args.logits_stride;  // [n]
    RowSampler sampler(row, args.n, AllowedRow(args.mask, r), args.first_id, shared[0]);
    auto write = [&](int place, uint32_t key, uint32_t id) {  // -inf and what is not there look the same
        const bool any = key < kKeyOfMinusInfinity;
        args.best[r * args.k + place] = any ? row[id] : -INFINITY;
        args.ids[r * args.k + place] = args.first_id + (any ? static_cast<int>(id) : 0);
    };
    if (args.k == 1) {
        uint32_t key, id;
        sampler.find_first(key, id);
        if (i == 0) write(0, key, id);
        return;
    }
    Prefix prefix{kAll, 0};
    uint32_t last = 0;
    if (args.k < args.n) {
        prefix = sampler.find_boundary(One{}, args.k, false, false);
        last = sampler.last_id(prefix);
    }
    const int found = sampler.gather(prefix, last);
    if (i >= args.k) return;
    if (i >= found) return write(i, kAll, 0);
    const uint32_t key = shared[0].low[i], id = shared[0].high[i];
    int place = 0;  // as many come before
    for (int j = 0; j < found; ++j) {
        const uint32_t other = shared[0].low[j];
        place += other < key || (other == key && shared[0].high[j] < id);
    }
    write(place, key, id);
}

cudaError_t sample(const SampleArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    return launch<sample_kernel>({dim3(args.num_rows), dim3(kThreads), 0, stream}, args);
}

cudaError_t find_best(const FindBestArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    return launch<find_best_kernel>({dim3(args.num_rows), dim3(kThreads), 0, stream}, args);
}

}  // namespace infinilm::cuda
