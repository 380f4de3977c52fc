// How a row is sampled without sorting its vocabulary. Every filter (top_k, top_p, min_p) keeps a prefix of the
// candidates in order, and the draw needs only running sums, so it is enough to know each bucket of nearby logits by
// its count and sum, and to order the one bucket in which a boundary falls.
//
// That gives the same answer as adding weights in order, because the sums are exact: a weight is exp((logit - max) /
// temperature) rounded to a multiple of 2^-45, kept as an integer. (What is rounded off is below the 2^-24 resolution
// of random_val by far, even summed over the vocabulary.) So threads may add up parts of a row in any order. Rows are
// dealt to the workers, and the last few rows are cut up among them; a row never depends on another.
//
// The logits that a mask allows are copied out first: they are mostly few, and then all that follows is short.
#include "cpu/sampling.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

namespace infinilm::cpu {

namespace {

constexpr int num_buckets = 1024;
constexpr float reach = 32;  // a candidate this many temperatures below the largest weighs less than 2^-46: nothing
constexpr int max_weight_bits = 45;
constexpr int64_t stretch = 512;  // candidates handled at once: their weights stay in L1
// Candidates of a row that a thread takes at once, where several work on a row: a few times what a region of threads
// costs.
constexpr int64_t share_size = 16 * stretch;

// e^x for x in [-700, 0] to 1 ulp, exactly 1 at 0. Plain arithmetic, so that the loop around it is vectorised: with
// std::exp a row of 150000 takes three times as long.
inline double exp_vectorised(double x) {
    constexpr double magic = 0x1.8p52;  // adding it leaves the rounded integer in the low bits
    const double shifted = x * 0x1.71547652b82fep0 + magic, n = shifted - magic;
    const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
    // Taylor: |r| <= 0.35, so the first term left out is below 4e-18. Written out: a loop here would not be unrolled
    // early enough for the loop around it to be vectorised.
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return std::bit_cast<double>(std::bit_cast<uint64_t>(p) + (std::bit_cast<uint64_t>(shifted) << 52));
}

}  // namespace

struct Candidate {
    float logit;
    int32_t id;
    bool operator<(const Candidate& other) const { return logit != other.logit ? logit > other.logit : id < other.id; }
};

// What a logit means in a row: the bucket of its distance from the largest, and its weight. Loops take a copy, which
// the compiler keeps in registers.
struct Scale {
    float largest = 0, reach = 0, lowest = 0, per_bucket = 0;
    double temperature = 0, one = 0;  // one: the weight of the largest logit

    bool reaches(float logit) const { return largest - logit <= reach; }
    int bucket(float logit) const {  // never falls as the logit falls: buckets are in the order of candidates
        return static_cast<int>(std::min((largest - logit) * per_bucket, float{num_buckets - 1}));
    }
    uint64_t weight(float logit) const {
        const double x = (double{logit > lowest ? logit : lowest} - largest) / temperature;
        return std::bit_cast<uint64_t>(exp_vectorised(x) * one + 0x1p52) & 0xfffffffffffffu;
    }
};

// What one thread finds in its part of a row.
struct RowPart {
    float largest;
    bool nan;
    std::array<int32_t, num_buckets> counts;  // candidates of each bucket
    std::array<uint64_t, num_buckets> sums;   // of their weights
    std::vector<float> logits;                // candidates that are copied out
    std::vector<int32_t> ids;
};

// The candidates of one row, bucketed by their distance from the largest logit. "Kept" is a prefix of the order: all of
// the buckets before `last_bucket_`, and the first `last_count_` of that one.
class RowSampler {
public:
    // pool: what works on a row; null: the caller alone.
    explicit RowSampler(ThreadPool* pool) : pool_(pool), parts_(pool ? static_cast<size_t>(pool->size()) : 1) {}

    // logits: [vocab_size]; allowed: the bits of those that may be drawn, or null: all.
    // Its token id, or a SampleFault.
    int32_t sample(const float* logits, const uint32_t* allowed, int64_t vocab_size, float temperature, int32_t top_k,
                   float top_p, float min_p, float random_val) {
        logits_ = logits;
        size_ = vocab_size;
        compact_ = false;
        ordered_ = -1;
        if (allowed) copy_allowed(allowed);
        if (const std::optional<SampleFault> fault = find_largest()) return static_cast<int32_t>(*fault);
        if (temperature == 0) return first_largest();
        start(temperature);
        if (top_k > 0 && top_k < size_) keep_count(top_k);
        // Without top_p no sum over more than min_p leaves is needed.
        if (min_p > 0 && top_p >= 1 && min_p_bucket(min_p) + 1 < last_bucket_) {
            last_bucket_ = min_p_bucket(min_p) + 1;
            last_count_ = everything;
        }
        if (last_bucket_ < num_buckets - 1) copy_out();
        sum_buckets();
        if (top_p < 1) keep_share(top_p);
        if (min_p > 0) keep_above(min_p);
        return draw(random_val);
    }

    // The logarithm of the sum of e^logit, or what is wrong with the logits, [vocab_size]; the sum is one of weights.
    std::optional<double> log_sum(const float* logits, int64_t vocab_size) {
        logits_ = logits;
        size_ = vocab_size;
        compact_ = false;
        if (find_largest()) return {};
        start(1);
        for (RowPart& part : parts_) part.sums[0] = 0;
        for_stretches([scale = scale_](RowPart& part, const float* logits, const int32_t*, int64_t n, int64_t) {
            uint64_t weights[stretch];
            for (int64_t i = 0; i < n; ++i) weights[i] = scale.weight(logits[i]);
            for (int64_t i = 0; i < n; ++i) part.sums[0] += scale.reaches(logits[i]) ? weights[i] : 0;
        });
        uint64_t sum = 0;
        for (const RowPart& part : parts_) sum += part.sums[0];
        return double{scale_.largest} + std::log(static_cast<double>(sum) / scale_.one);
    }

private:
    static constexpr int64_t everything = std::numeric_limits<int64_t>::max();

    void make_room() {
        if (static_cast<int64_t>(left_ids_.size()) >= size_) return;
        left_logits_.resize(static_cast<size_t>(size_));
        left_ids_.resize(static_cast<size_t>(size_));
    }

    // From here on the candidates are those whose bits are set, in the order of their ids.
    void copy_allowed(const uint32_t* allowed) {
        make_room();
        float* out = left_logits_.data();
        int32_t* ids = left_ids_.data();
        for (int64_t first = 0; first < size_; first += 32) {
            uint32_t bits = allowed[first / 32];
            if (first + 32 > size_) bits &= ~uint32_t{0} >> (first + 32 - size_);
            if (bits == ~uint32_t{0}) {
                std::copy_n(logits_ + first, 32, out);
                for (int i = 0; i < 32; ++i) ids[i] = static_cast<int32_t>(first) + i;
                out += 32, ids += 32;
                continue;
            }
            for (; bits; bits &= bits - 1) {
                *ids = static_cast<int32_t>(first) + std::countr_zero(bits);
                *out++ = logits_[*ids++];
            }
        }
        num_left_ = out - left_logits_.data();
        compact_ = true;
    }

    std::optional<SampleFault> find_largest() {
        constexpr float least = -std::numeric_limits<float>::infinity();
        for (RowPart& part : parts_) part.largest = least, part.nan = false;
        for_stretches([&](RowPart& part, const float* logits, const int32_t*, int64_t n, int64_t) {
            // Eight running maxima, so that the loop is vectorised; NaN is seen as the one value that differs from
            // itself.
            float largest[8];
            std::fill(largest, largest + 8, least);
            int64_t i = 0;
            int nan = 0;
            for (; i + 8 <= n; i += 8)
                for (int k = 0; k < 8; ++k) {
                    largest[k] = logits[i + k] > largest[k] ? logits[i + k] : largest[k];
                    nan |= logits[i + k] != logits[i + k];
                }
            for (; i < n; ++i) {
                largest[0] = std::max(largest[0], logits[i]);
                nan |= logits[i] != logits[i];
            }
            part.largest = std::max(part.largest, *std::max_element(largest, largest + 8));
            part.nan |= nan != 0;
        });
        scale_.largest = least;
        bool nan = false;
        for (const RowPart& part : parts_) scale_.largest = std::max(scale_.largest, part.largest), nan |= part.nan;
        if (nan) return SampleFault::nan;
        if (!std::isinf(scale_.largest)) return {};
        return scale_.largest > 0 ? SampleFault::infinite : SampleFault::empty;
    }

    int32_t first_largest() const {
        const float* logits = compact_ ? left_logits_.data() : logits_;
        const auto at = std::find(logits, logits + num_left(), scale_.largest) - logits;
        return compact_ ? left_ids_[static_cast<size_t>(at)] : static_cast<int32_t>(at);
    }

    void start(float temperature) {
        Scale& s = scale_;
        s.temperature = temperature;
        s.one = std::ldexp(
            1.0, std::min(max_weight_bits, 63 - static_cast<int>(std::bit_width(static_cast<uint64_t>(size_)))));
        s.reach = std::min(reach * temperature, std::numeric_limits<float>::max());
        s.lowest = std::max(s.largest - 2 * s.reach, -std::numeric_limits<float>::max());
        s.per_bucket = std::min(num_buckets / s.reach, 1e30f);  // finite, or 0 * infinity would be NaN
        last_bucket_ = num_buckets - 1;
        last_count_ = everything;
    }

    int64_t num_left() const { return compact_ ? num_left_ : size_; }

    // Calls f(part, logits, ids or null, n, id of the first) over the row, or over the candidates that are left of it.
    // Which thread's part a stretch goes to does not matter: counts, sums and maxima are the same in any order, and
    // what is copied out is put in order.
    template <class F>
    void for_stretches(F f) {
        const int64_t size = num_left();
        auto over = [&](int64_t begin, int64_t end, RowPart& part) {
            for (int64_t i = begin; i < end; i += stretch)
                f(part, (compact_ ? left_logits_.data() : logits_) + i, compact_ ? left_ids_.data() + i : nullptr,
                  std::min(stretch, end - i), i);
        };
        if (!pool_ || size < 2 * share_size) return over(0, size, parts_[0]);
        pool_->run(static_cast<int>((size + share_size - 1) / share_size), [&](int share, int thread) {
            over(share * share_size, std::min((share + 1) * share_size, size), parts_[static_cast<size_t>(thread)]);
        });
    }

    // The candidates whose bucket passes, with their ids, into every part.
    template <class Passes>
    void collect(Passes passes) {
        for (RowPart& part : parts_) part.logits.clear(), part.ids.clear();
        for_stretches(
            [&, scale = scale_](RowPart& part, const float* logits, const int32_t* ids, int64_t n, int64_t first) {
                for (int64_t i = 0; i < n; ++i)
                    if (scale.reaches(logits[i]) && passes(scale.bucket(logits[i]))) {
                        part.logits.push_back(logits[i]);
                        part.ids.push_back(ids ? ids[i] : static_cast<int32_t>(first + i));
                    }
            });
    }

    // The candidates of bucket b in order; from bucket last_bucket_ only those kept.
    std::span<const Candidate> order(int b) {
        if (ordered_ != b) {
            collect([b](int bucket) { return bucket == b; });
            order_.clear();
            for (const RowPart& part : parts_)
                for (size_t i = 0; i < part.ids.size(); ++i) order_.push_back({part.logits[i], part.ids[i]});
            if (!std::is_sorted(order_.begin(), order_.end())) std::sort(order_.begin(), order_.end());
            ordered_ = b;
        }
        const int64_t size = static_cast<int64_t>(order_.size());
        return {order_.data(), static_cast<size_t>(b == last_bucket_ ? std::min(size, last_count_) : size)};
    }

    // top_k: finds the bucket of candidate k by counting.
    void keep_count(int64_t k) {
        for (RowPart& part : parts_) part.counts.fill(0);
        for_stretches([scale = scale_](RowPart& part, const float* logits, const int32_t*, int64_t n, int64_t) {
            for (int64_t i = 0; i < n; ++i) part.counts[scale.bucket(logits[i])] += scale.reaches(logits[i]);
        });
        int64_t before = 0, here = 0;
        int b = 0;
        for (;; ++b, before += here) {
            here = 0;
            for (const RowPart& part : parts_) here += part.counts[b];
            if (b == num_buckets - 1 || before + here >= k) break;
        }
        last_bucket_ = b;
        last_count_ = k - before;
    }

    // From here on only the candidates up to last_bucket_ are looked at, mostly far fewer than the vocabulary.
    void copy_out() {
        collect([last = last_bucket_](int bucket) { return bucket <= last; });
        make_room();
        num_left_ = 0;
        for (const RowPart& part : parts_) {
            std::ranges::copy(part.logits, left_logits_.data() + num_left_);
            std::ranges::copy(part.ids, left_ids_.data() + num_left_);
            num_left_ += static_cast<int64_t>(part.ids.size());
        }
        compact_ = true;
    }

    void sum_buckets() {
        for (RowPart& part : parts_) part.sums.fill(0);
        for_stretches([scale = scale_](RowPart& part, const float* logits, const int32_t*, int64_t n, int64_t) {
            uint64_t weights[stretch];
            for (int64_t i = 0; i < n; ++i) weights[i] = scale.weight(logits[i]);
            for (int64_t i = 0; i < n; ++i)
                if (scale.reaches(logits[i])) part.sums[scale.bucket(logits[i])] += weights[i];
        });
        for (int b = 0; b < num_buckets; ++b) {
            sums_[b] = 0;
            for (const RowPart& part : parts_) sums_[b] += b <= last_bucket_ ? part.sums[b] : 0;
        }
        if (last_count_ != everything) keep_until(last_bucket_, last_count_);
    }

    // Makes the first `count` of bucket b the end of what is kept.
    void keep_until(int b, int64_t count) {
        const std::span<const Candidate> candidates = order(b);
        sums_[b] = 0;
        for (int64_t i = 0; i < std::min<int64_t>(count, static_cast<int64_t>(candidates.size())); ++i)
            sums_[b] += scale_.weight(candidates[static_cast<size_t>(i)].logit);
        std::fill(sums_ + b + 1, sums_ + num_buckets, 0);
        last_bucket_ = b;
        last_count_ = count;
    }

    double kept_sum() const {
        uint64_t sum = 0;
        for (int b = 0; b <= last_bucket_; ++b) sum += sums_[b];
        return static_cast<double>(sum);
    }

    // The first candidate whose running sum passes: found(bucket, index in it). The sum of all that is kept passes.
    template <class Passes, class Found>
    void find_in_order(Passes passes, Found found) {
        uint64_t running = 0;
        int b = 0;
        while (b < last_bucket_ && !passes(static_cast<double>(running + sums_[b]))) running += sums_[b++];
        const std::span<const Candidate> candidates = order(b);
        size_t i = 0;
        for (; i + 1 < candidates.size(); ++i) {
            running += scale_.weight(candidates[i].logit);
            if (passes(static_cast<double>(running))) break;
        }
        found(b, i);
    }

    void keep_share(float top_p) {
        const double goal = double{top_p} * kept_sum();
        find_in_order([&](double running) { return running >= goal; },
                      [&](int b, size_t i) { keep_until(b, static_cast<int64_t>(i) + 1); });
    }

    int min_p_bucket(float min_p) const {
        const double distance = -std::log(std::min(double{min_p}, 1.0)) * scale_.temperature;
        return static_cast<int>(std::min(distance * scale_.per_bucket, num_buckets - 1.0));
    }

    void keep_above(float min_p) {
        const double least = std::min(double{min_p}, 1.0) * scale_.one;
        // Rounding may put the boundary a bucket before or after.
        const int guess = min_p_bucket(min_p), last = std::min(last_bucket_, guess + 1);
        for (int b = std::max(0, std::min(last, guess - 1)); b <= last; ++b) {
            const std::span<const Candidate> candidates = order(b);
            size_t kept = 0;
            while (kept < candidates.size() && static_cast<double>(scale_.weight(candidates[kept].logit)) >= least)
                ++kept;
            if (kept < candidates.size() || b == last) return keep_until(b, static_cast<int64_t>(kept));
        }
    }

    int32_t draw(float random_val) {
        const double goal = double{random_val} * kept_sum();
        int32_t id = 0;
        find_in_order([&](double running) { return running > goal; }, [&](int b, size_t i) { id = order(b)[i].id; });
        return id;
    }

    ThreadPool* pool_;
    std::vector<RowPart> parts_;     // one per thread
    const float* logits_ = nullptr;  // [size_]
    int64_t size_ = 0;
    Scale scale_;
    uint64_t sums_[num_buckets] = {};
    int last_bucket_ = 0;
    int64_t last_count_ = 0;
    bool compact_ = false;  // the candidates are left_logits_ and left_ids_, not all of logits_
    int64_t num_left_ = 0;
    std::vector<float> left_logits_;  // room for size_; num_left_ of them count
    std::vector<int32_t> left_ids_;
    std::vector<Candidate> order_;  // bucket ordered_
    int ordered_ = -1;
};

namespace {

// Bits first .. first + n - 1 of a mask, n <= 64; null: all are set.
uint64_t bits_at(const uint32_t* allowed, int64_t first, int n) {
    const uint64_t all = n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0};
    if (!allowed) return all;
    uint64_t bits = 0;
    for (int64_t word = first / 32; 32 * word < first + n; ++word) {
        const int64_t shift = 32 * word - first;  // of the word's first bit
        bits |= shift < 0 ? uint64_t{allowed[word]} >> -shift : uint64_t{allowed[word]} << shift;
    }
    return bits & all;
}

// The best of a row, [k] each; see FindBestParams. allowed: bits by token id, or null.
void find_best(std::span<const float> logits, const uint32_t* allowed, int32_t first_id, std::span<float> best,
               std::span<int32_t> ids) {
    constexpr size_t group = 64;  // looked at together: mostly none of them is better than the last of the best
    std::ranges::fill(best, -std::numeric_limits<float>::infinity());
    std::ranges::fill(ids, first_id);
    size_t found = 0;
    bool nan = false;
    for (size_t begin = 0; begin < logits.size(); begin += group) {
        const std::span<const float> part = logits.subspan(begin, std::min(group, logits.size() - begin));
        int any = 0;  // that is better, or NaN; without branches, so that the loop is vectorised
        for (const float logit : part) any |= !(logit <= best.back());
        if (!any) continue;
        const int64_t first = first_id + static_cast<int64_t>(begin);
        for (uint64_t bits = bits_at(allowed, first, static_cast<int>(part.size())); bits; bits &= bits - 1) {
            const auto i = static_cast<size_t>(std::countr_zero(bits));
            nan |= part[i] != part[i];
            if (!(part[i] > best.back())) continue;
            found = std::min(found + 1, best.size());
            size_t at = found - 1;
            for (; at > 0 && part[i] > best[at - 1]; --at) {
                best[at] = best[at - 1];
                ids[at] = ids[at - 1];
            }
            best[at] = part[i];
            ids[at] = static_cast<int32_t>(first + static_cast<int64_t>(i));
        }
    }
    if (nan) best[0] = std::numeric_limits<float>::quiet_NaN();
}

// The best of a row without NaN, at most as many as it has; what is -inf is listed, too.
void list_best(std::span<const float> logits, std::span<float> best, std::span<int32_t> ids) {
    find_best(logits, nullptr, 0, best, ids);
    size_t found = best.size();
    while (found > 0 && std::isinf(best[found - 1])) --found;
    for (int32_t id = 0; found < best.size(); ++id)
        if (std::isinf(logits[static_cast<size_t>(id)])) ids[found++] = id;
}

// f(row, thread) for every row; rows are dealt to the workers one by one.
template <class F>
void for_rows(ThreadPool& pool, int64_t num_rows, F f) {
    std::atomic<int64_t> next{0};
    auto work = [&](int, int thread) {
        for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < num_rows;) f(row, thread);
    };
    pool.run(static_cast<int>(std::min<int64_t>(num_rows, pool.size())), work);
}

}  // namespace

Sampler::Sampler(ThreadPool& pool) : pool_(pool), together_(std::make_unique<RowSampler>(&pool)) {
    for (int i = 0; i < pool.size(); ++i) alone_.push_back(std::make_unique<RowSampler>(nullptr));
}

Sampler::~Sampler() = default;

template <class F>
void Sampler::for_rows(int64_t num_rows, int64_t vocab_size, F f) {
    const int64_t rest = vocab_size < 2 * share_size ? 0 : num_rows % pool_.size();
    cpu::for_rows(pool_, num_rows - rest,
                  [&](int64_t row, int thread) { f(*alone_[static_cast<size_t>(thread)], row); });
    for (int64_t row = num_rows - rest; row < num_rows; ++row) f(*together_, row);
}

void Sampler::sample(const SampleParams& p) {
    const int64_t vocab_size = p.logits.shape(1);
    for_rows(p.logits.shape(0), vocab_size, [&](RowSampler& sampler, int64_t row) {
        const int32_t drawn = sampler.sample(p.logits.as<const float>() + row * p.logits.stride(0), p.mask.words(row),
                                             vocab_size, p.temperature.as<const float>()[row],
                                             p.top_k.as<const int32_t>()[row], p.top_p.as<const float>()[row],
                                             p.min_p.as<const float>()[row], p.random_val.as<const float>()[row]);
        const bool named = p.token_ids && drawn >= 0;
        p.ids.as<int32_t>()[row] = named ? p.token_ids.select(0, row).as<const int32_t>()[drawn] : drawn;
    });
}

void Sampler::log_probs(const LogProbsParams& p) {
    const int64_t vocab_size = p.logits.shape(1), width = p.ids.shape(1);
    for_rows(p.logits.shape(0), vocab_size, [&](RowSampler& sampler, int64_t row) {
        const int32_t count = p.num_logprobs.as<const int32_t>()[row], drawn = p.drawn.as<const int32_t>()[row];
        if (count < 0) return;
        const float* const logits = p.logits.as<const float>() + row * p.logits.stride(0);
        auto* const ids = p.ids.as<int32_t>() + row * width;          // [1 + count]
        auto* const logprobs = p.logprobs.as<float>() + row * width;  // the same
        const std::optional<double> log_sum = drawn < 0 ? std::nullopt : sampler.log_sum(logits, vocab_size);
        ids[0] = drawn;
        if (!log_sum) {
            std::fill_n(ids + 1, count, -1);
            std::fill_n(logprobs, 1 + count, std::numeric_limits<float>::quiet_NaN());
            return;
        }
        if (count > 0)
            list_best({logits, static_cast<size_t>(vocab_size)}, {logprobs + 1, static_cast<size_t>(count)},
                      {ids + 1, static_cast<size_t>(count)});
        logprobs[0] = logits[drawn];
        for (int i = 0; i <= count; ++i) logprobs[i] = static_cast<float>(double{logprobs[i]} - *log_sum);
    });
}

void find_best(ThreadPool& pool, const FindBestParams& p) {
    const int64_t k = p.best.shape(1);
    const auto n = static_cast<size_t>(p.logits.shape(1)), count = static_cast<size_t>(k);
    for_rows(pool, p.logits.shape(0), [&](int64_t row, int) {
        find_best({p.logits.as<const float>() + row * p.logits.stride(0), n}, p.mask.words(row), p.first_id,
                  {p.best.as<float>() + row * k, count}, {p.ids.as<int32_t>() + row * k, count});
    });
}

}  // namespace infinilm::cpu
