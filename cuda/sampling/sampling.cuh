// The blocks of a row of logits at work on it: what sampling.cu draws tokens with.
//
// Every filter keeps a prefix of the candidates in order (logit descending, id ascending), and so it is enough to find
// where counts or sums along that order pass a goal. Nothing is sorted. A first pass over the row finds the largest
// logit. A second fills a histogram of 2048 bins, equal parts of the distance from the largest, with counts or sums of
// weights: one of them holds the boundary. A third gathers the candidates of that bin, mostly one or two hundred, into
// a list in shared memory, where each finds its place by comparing itself with all others. The histogram of sums serves
// top_p and the draw, and whatever is kept by top_k is a list from then on, if it fits. Where a bin does not fit the
// list, as many logits are equal, three passes (11, 11, 10 bits) over the row find the 32-bit key, and three the id;
// candidates with the very same logit weigh the same, so among them it is a division.
//
// Weights are integers (exp to a multiple of 2^-45, by the arithmetic of src/cpu/sampling.cpp), so sums are exact in
// any order: integer atomics give the same bits every time, however many blocks there are, and the same token as the
// CPU.
//
// A row is cut up among several blocks (Peers, sampling_peers.cuh). Each adds up a histogram of its part; then each
// adds one part of the bins of all, and they tell each other the totals. A list is copied to every block, and each
// goes on with it for itself, with the same result: no block tells another how to go on.
//
// What a mask does not allow counts as a logit of -inf: one more load per logit, of a word that a warp shares.
// Ideas: radix select, flashinfer include/flashinfer/topk.cuh; boundary search instead of a sort for top_p,
// arXiv 2602.01518; sums as integers, src/cpu/sampling.cpp.
#pragma once

#include "cuda/core/ptx.cuh"
#include "cuda/sampling/kernels.h"
#include "cuda/sampling/sampling_peers.cuh"
#include "cuda/sampling/sampling_weights.cuh"

namespace infinilm::cuda {

// ---- the blocks of a row -----------------------------------------------------------------------------------------

struct SharedRow {
    PublicRow open;                           // to the other blocks
    uint64_t list[kListed], sorted[kListed];  // order_of
    uint64_t warps[kWarps];
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

struct One {
    static constexpr bool kNarrow = true;  // sums fit 32 bits
    __device__ __forceinline__ uint64_t operator()(float) const { return 1; }
    __device__ __forceinline__ uint64_t quick(float, bool& sure) const {
        sure = true;
        return 1;
    }
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

template <class Peers>
class RowSampler {
public:
    // first_id: of the first column, in the bits of what is allowed. All blocks of a row come here, and go on alike up
    // to leave().
    __device__ __forceinline__ RowSampler(const float* row, int vocab_size, AllowedRow allowed, int first_id,
                                          const RowBlocks& blocks, SharedRow& shared)
        : row_(row),
          size_(vocab_size),
          allowed_(allowed),
          first_id_(first_id),
          peers_(blocks, shared.open),
          s_(shared),
          open_(shared.open) {
        const int part = ceil_div(ceil_div(size_, peers_.count()), 32) * 32;
        begin_ = min(size_, peers_.rank() * part), end_ = min(size_, begin_ + part);
    }
    // The last thing that a block does. Whether it is the row's first.
    __device__ __forceinline__ bool leave() const {
        peers_.leave();
        return peers_.rank() == 0;
    }

    // The first of the order: key and id. The smallest() of the others is known then.
    __device__ __forceinline__ void find_first(uint32_t& key, uint32_t& id) {
        uint64_t best = ~uint64_t{0}, last = 0;
        for_row([&](const float (&logits)[kBatch], int first) {
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const uint32_t here = order_key(logits[j]);
                const uint64_t at = order_of(here, static_cast<uint32_t>(first + j * kThreads));
                best = at < best ? at : best;
                last = here < kKeyOfMinusInfinity && here > last ? here : last;
            }
        });
        const auto least = [](uint64_t a, uint64_t b) { return a < b ? a : b; };
        const auto most = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
        best = reduce(best, least), last = reduce(last, most);
        tell(best, last,
             [&](int, uint64_t of_best, uint64_t of_last) { best = least(best, of_best), last = most(last, of_last); });
        key = static_cast<uint32_t>(best >> 32), id = static_cast<uint32_t>(best);
        smallest_ = logit_of(static_cast<uint32_t>(last));
    }
    // From here on what is further than `reach` below the largest, and -inf, are no candidates.
    __device__ __forceinline__ void set_reach(float largest, float reach) { bins_ = {largest, smallest_, reach}; }

    // Keeps the first `count` candidates. If they fit, they are a list from here on.
    __device__ __forceinline__ void keep_first(int count) {
        Goal target{static_cast<double>(count), false};
        fill_bins(One{});
        if (!descend(row_share_, 0, target, false)) return;  // there are fewer
        const uint64_t before = open_.boundary.before;
        const int bin = open_.boundary.found;
        has_all_ = before + open_.boundary.amount <= kListed;
        const bool is_listed = list_bins(has_all_ ? 0 : bin, bin);
        if (has_all_)
            listed_ = count;  // in order, and all of them
        else if (is_listed)
            keep(s_.sorted[count - static_cast<int>(before) - 1]);
        else
            keep(find_on_row(One{}, target, before));
    }
    // Keeps the shortest prefix that has that share of the sum over all that are kept.
    __device__ __forceinline__ void keep_share(const Weights& weights, float share) {
        keep(find_share(weights, static_cast<double>(share), false));
        if (has_all_) listed_ = open_.boundary.found + 1;
        sums_end_ = bin_;
    }
    // The id of the first candidate whose running sum exceeds that share of the sum over all that are kept.
    __device__ __forceinline__ uint32_t draw(const Weights& weights, float share) {
        return static_cast<uint32_t>(find_share(weights, static_cast<double>(share), true));
    }
    // All that are kept, at most kListed, in order: how many there are in `sorted`.
    __device__ __forceinline__ int list_kept() {
        if (!has_all_) list_bins(0, kBins - 1);
        return listed_;
    }

    // The logarithm of the sum of e^(logit - largest).
    __device__ __forceinline__ double log_sum(float largest) {
        constexpr float one = 0x1p44f;  // sums of 2^19 fit; in fixed point any order gives the same bits
        uint64_t sum = 0;
        for_row([&](const float (&others)[kBatch], int) {
#pragma unroll
            for (int j = 0; j < kBatch; ++j) sum += static_cast<uint64_t>(expf(others[j] - largest) * one);
        });
        sum = reduce(sum, [](uint64_t a, uint64_t b) { return a + b; });
        uint64_t total = 0;
        tell(sum, 0, [&](int, uint64_t of_sum, uint64_t) { total += of_sum; });
        return log(static_cast<double>(total) / static_cast<double>(one));
    }

private:
    // ---- the blocks ----

    // f(part, a, b) of the two words that each block gives, which all its threads have.
    template <class F>
    __device__ __forceinline__ void tell(uint64_t a, uint64_t b, F f) {
        if (peers_.count() == 1) return f(0, a, b);
        uint64_t (&told)[2] = open_.told[turn_];
        if (threadIdx.x == 0) told[0] = a, told[1] = b;
        peers_.share(told);
        for (int part = 0; part < peers_.count(); ++part) {
            const uint64_t* const other = peers_.of(told, part);
            f(part, other[0], other[1]);
        }
        turn_ ^= 1;  // no block writes here before all have passed the barrier of another turn
    }

    // ---- candidates ----

    // f(logits, first) for kBatch of this block's part of the row at a time: the j-th has the id first + j * kThreads,
    // and those behind the end are -inf.
    template <class F>
    __device__ __forceinline__ void for_row(F f) const {
        for (int first = begin_ + static_cast<int>(threadIdx.x); first < end_; first += kThreads * kBatch) {
            float logits[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = first + j * kThreads;
                logits[j] = i < end_ ? row_[i] : -INFINITY;
            }
            if (allowed_.words) {
#pragma unroll
                for (int j = 0; j < kBatch; ++j)
                    if (const int i = first + j * kThreads; i < end_)
                        logits[j] = allowed_(logits[j], static_cast<uint32_t>(first_id_ + i));
            }
            f(logits, first);
        }
    }
    // f(logit, id) for every one that is kept of the bins first_bin_ to bin_, of this block's part.
    template <class F>
    __device__ __forceinline__ void for_candidates(F f) const {
        for_row([&](const float (&logits)[kBatch], int first) {
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int bin = bins_(logits[j]), id = first + j * kThreads;
                if (bin >= first_bin_ && bin <= bin_ && counts(logits[j], id)) f(logits[j], id);
            }
        });
    }

    __device__ __forceinline__ bool counts(float logit, int id) const {
        return bins_.holds(logit) && (logit > kept_logit_ || (logit == kept_logit_ && id <= kept_id_));
    }
    __device__ __forceinline__ void keep(uint64_t last) {
        kept_logit_ = logit_of(key_of(last)), kept_id_ = static_cast<int>(static_cast<uint32_t>(last));
    }

    // Lists all that are kept of these bins, in order, in every block. False: they do not fit.
    __device__ __forceinline__ bool list_bins(int first, int last) {
        first_bin_ = first, bin_ = last;
        if (threadIdx.x == 0) open_.part.listed = 0;
        __syncthreads();
        for_candidates([&](float logit, int id) {
            const int at = atomicAdd(&open_.part.listed, 1);
            if (at < kListed) open_.part.low[at] = static_cast<uint32_t>(id), open_.part.high[at] = order_key(logit);
        });
        peers_.share(open_.part);
        int total = 0;
        for (int block = 0; block < peers_.count(); ++block) {
            const PublicRow::Part& part = *peers_.of(&open_.part, block);
            const int count = part.listed, i = static_cast<int>(threadIdx.x);
            if (total + count <= kListed && i < count) s_.list[total + i] = order_of(part.high[i], part.low[i]);
            total = min(total + count, kListed + 1);
        }
        peers_.sync();  // before anyone fills bins
        if (total > kListed) return false;
        listed_ = total;
        const int i = static_cast<int>(threadIdx.x);
        if (i < total) {
            const uint64_t mine = s_.list[i];
            int place = 0;  // as many come before
#pragma unroll 8
            for (int j = 0; j < total; ++j) place += s_.list[j] < mine;
            s_.sorted[place] = mine;
        }
        __syncthreads();
        return true;
    }

    // ---- boundaries ----

    template <class Amount>
    __device__ __forceinline__ void fill_bins(const Amount& amount) {
        clear();
        for_row([&](const float (&logits)[kBatch], int first) {
#pragma unroll
            for (int j = 0; j < kBatch; j += 2) {
                bool any[2], sure[2];
                uint64_t amounts[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) any[k] = counts(logits[j + k], first + (j + k) * kThreads);
                if (!any[0] && !any[1]) continue;
#pragma unroll
                for (int k = 0; k < 2; ++k) amounts[k] = amount.quick(logits[j + k], sure[k]);
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (any[k]) add(bins_(logits[j + k]), sure[k] ? amounts[k] : amount(logits[j + k]), amount);
            }
        });
    }

    // The first candidate whose running sum passes a share of the sum over all that are kept.
    __device__ __forceinline__ uint64_t find_share(const Weights& weights, double share, bool strict) {
        Goal target{share, strict};
        if (has_all_) return find_on_list(weights, target, true, 0);
        if (sums_end_ >= 0 && weights.least == 0) {  // the sums are known, and end in that bin
            peers_.sync();                           // some may be reading what was found before
            target.amount = __dmul_rn(target.amount, static_cast<double>(sum_));
            uint64_t running = row_share_.running;
#pragma unroll
            for (int j = 0; j < kThreadBins; ++j) {
                const int bin = row_share_.first + j;
                if (j < row_share_.count && bin >= sums_end_)
                    row_share_.bins[j] = bin == sums_end_ ? sum_ - running : 0;
                running += row_share_.bins[j];
            }
            find_bin(row_share_, target);
        } else {
            fill_bins(weights);
            descend(row_share_, 0, target, true);
        }
        const uint64_t before = open_.boundary.before;
        const int bin = open_.boundary.found;
        return list_bins(bin, bin) ? find_on_list(weights, target, false, before)
                                   : find_on_row(weights, target, before);
    }

    // On the list, by every block for itself. Its place is `found`.
    __device__ __forceinline__ uint64_t find_on_list(const Weights& weights, Goal& target, bool is_share,
                                                     uint64_t before) {
        const int i = static_cast<int>(threadIdx.x);
        const uint64_t mine = i < listed_ ? weights(logit_of(key_of(s_.sorted[i]))) : 0;
        __syncthreads();  // others may be reading what was found before
        uint64_t total = 0;
        const uint64_t running = before + scan(mine, total);  // before this one
        if (is_share) target.amount = __dmul_rn(target.amount, static_cast<double>(total));
        if (mine && target.passed_by(running + mine) && (running == 0 || !target.passed_by(running)))
            open_.boundary.found = i, open_.boundary.before = running + mine;
        __syncthreads();
        sum_ = open_.boundary.before;
        return s_.sorted[open_.boundary.found];
    }

    // Among candidates that are too many for the list: by the digits of their keys, then by those of their ids.
    template <class Amount>
    __device__ __forceinline__ uint64_t find_on_row(const Amount& amount, Goal& target, uint64_t before) {
        const uint32_t key = find_digits(target, before, [&](float logit, int) { return order_key(logit); }, amount);
        // Candidates of one key weigh the same: the first of them to pass, by bisection.
        const uint64_t each = amount(logit_of(key));
        uint64_t low = 1, high = size_;
        while (low < high) {
            const uint64_t middle = (low + high) / 2;
            if (target.passed_by(before + middle * each))
                high = middle;
            else
                low = middle + 1;
        }
        sum_ = before + low * each;
        Goal of_ids{static_cast<double>(low), false};
        uint64_t none = 0;
        const uint32_t id = find_digits(
            of_ids, none, [&](float logit, int i) { return order_key(logit) == key ? static_cast<uint32_t>(i) : kAll; },
            One{});
        return order_of(key, id);
    }
    // The first digit word (kAll: none) up to which amounts pass the goal; `before` becomes what runs before it.
    template <class Digits, class Amount>
    __device__ __forceinline__ uint32_t find_digits(Goal& target, uint64_t& before, Digits digits_of,
                                                    const Amount& amount) {
        Share share;
        uint32_t found = 0, known = 0;  // the bits of it that are found
#pragma unroll 1
        for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
            clear();
            for_candidates([&](float logit, int id) {
                const uint32_t digits = digits_of(logit, id);
                if (digits != kAll && !((digits ^ found) & known)) add(digits >> shift, amount(logit), amount);
            });
            descend(share, before, target, false);
            before = open_.boundary.before;
            found |= static_cast<uint32_t>(open_.boundary.found) << shift;
            known = kAll << shift;
        }
        return found;
    }

    // ---- histograms ----

    // The bins that a thread has when all blocks have added theirs, and what runs before them.
    struct Share {
        uint64_t running = 0, bins[kThreadBins] = {};
        int first = 0, count = 0;  // of them
    };

    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < kBins; i += kThreads) open_.part.low[i] = open_.part.high[i] = 0;
        __syncthreads();
    }
    // In two halves, as shared memory has no 64-bit atomic addition; each wrap of the low half is seen by one thread.
    template <class Amount>
    __device__ __forceinline__ void add(uint32_t digit, uint64_t amount, const Amount&) {
        if constexpr (Amount::kNarrow) {
            atomicAdd(&open_.part.low[digit % kBins], static_cast<uint32_t>(amount));
            return;
        }
        const uint32_t low = static_cast<uint32_t>(amount), old = atomicAdd(&open_.part.low[digit % kBins], low);
        const uint32_t high = static_cast<uint32_t>(amount >> 32) + (old + low < old);
        if (high) atomicAdd(&open_.part.high[digit % kBins], high);
    }

    // Finds the first bin that passes the goal (first made absolute, if it is a share of the total): bin, what runs
    // before it, and what it holds, in shared memory. False: none does.
    __device__ __forceinline__ bool descend(Share& share, uint64_t before, Goal& goal, bool is_share) {
        peers_.share(open_.part);
        const int blocks = peers_.count(), rank = peers_.rank(), bins = kBins / blocks, each = max(1, bins / kThreads);
        const int mine = static_cast<int>(threadIdx.x) * each;
        share = {};
        share.first = rank * bins + mine;
        share.count = mine < bins ? each : 0;
        if (share.count)
            for (int i = 0; i < blocks; ++i) {
                // So that not all read from the same one at a time.
                const PublicRow::Part& part = *peers_.of(&open_.part, (rank + i) % blocks);
#pragma unroll
                for (int j = 0; j < kThreadBins; ++j)
                    if (j < share.count)
                        share.bins[j] +=
                            static_cast<uint64_t>(part.high[share.first + j]) << 32 | part.low[share.first + j];
            }
        uint64_t own = 0, of_block = 0, total = 0;
#pragma unroll
        for (int j = 0; j < kThreadBins; ++j) own += share.bins[j];
        share.running = before + scan(own, of_block);
        tell(of_block, 0, [&](int block, uint64_t of_other, uint64_t) {
            share.running += block < rank ? of_other : 0;
            total += of_other;
        });
        if (is_share) goal.amount = __dmul_rn(goal.amount, static_cast<double>(total));
        if (!goal.passed_by(before + total)) return false;
        find_bin(share, goal);
        return true;
    }
    __device__ __forceinline__ void find_bin(const Share& share, const Goal& goal) {
        uint64_t running = share.running;
#pragma unroll
        for (int j = 0; j < kThreadBins; ++j) {
            const uint64_t after = running + share.bins[j];
            if (share.bins[j] && goal.passed_by(after) && (running == 0 || !goal.passed_by(running)))
                for (int block = 0; block < peers_.count(); ++block)
                    *peers_.of(&open_.boundary, block) = {running, share.bins[j], share.first + j};
            running = after;
        }
        peers_.sync();
        peers_.receive(open_.boundary);
    }

    // The sum over the threads before this one, and over all.
    __device__ __forceinline__ uint64_t scan(uint64_t mine, uint64_t& total) {
        const uint64_t up_to_mine = warp_scan(mine);
        if (lane_id() == 31) s_.warps[warp_id()] = up_to_mine;
        __syncthreads();
        const uint64_t warps = warp_scan(lane_id() < kWarps ? s_.warps[lane_id()] : 0);
        const uint64_t earlier = __shfl_sync(kAll, warps, static_cast<int>(warp_id() + 31) % 32);
        total = __shfl_sync(kAll, warps, 31);
        return up_to_mine - mine + (warp_id() ? earlier : 0);
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
        auto over = [&](uint64_t v, int lanes) {
#pragma unroll
            for (int offset = lanes / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(kAll, v, offset));
            return v;
        };
        value = over(value, 32);
        __syncthreads();
        if (lane_id() == 0) s_.warps[warp_id()] = value;
        __syncthreads();
        return over(s_.warps[lane_id() % kWarps], kWarps);
    }

    const float* row_;        // [size_]
    int size_, begin_, end_;  // the row, and this block's part of it
    AllowedRow allowed_;
    int first_id_;
    Peers peers_;
    SharedRow& s_;
    PublicRow& open_;
    Bins bins_;
    float smallest_ = 0;            // above -inf
    float kept_logit_ = -INFINITY;  // of the last candidate that is kept
    int kept_id_ = -1;
    int first_bin_ = 0, bin_ = kBins - 1;  // whose candidates for_candidates looks at, or that are listed
    int listed_ = 0;
    bool has_all_ = false;  // the list, of all that are kept
    uint64_t sum_ = 0;      // up to the boundary that was found last
    Share row_share_;       // of the sums of the row
    int sums_end_ = -1;     // the last bin of row_share_ that is kept; -1: there are none
    int turn_ = 0;
};

}  // namespace infinilm::cuda
