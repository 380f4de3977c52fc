// The keys that each token reads: an index of small heads scores all that it sees, and those with the largest scores
// are chosen. Called by CpuBackend::choose_keys for some tokens at a time: score_keys leaves the scores of each in a
// row, choose_keys reads that. The math is that of DeepSeek-V3.2 (its indexer; DeepSeek-AI 2025), without the positive
// factors of all scores of a token, which do not change their order; and that of MiniMax-M3, which chooses runs of keys
// by the best of each.
//
// Bits: a score is one accumulator per (head, key), head_dim ascending, and the sum over heads ascending. So a choice
// depends on the token and its own keys alone.
#include "cpu/kernels/attention_tile.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

constexpr int64_t block_tokens = 16;  // of one sequence, that score a staged chunk of keys in turn
constexpr int num_bins = 256;         // of a digit of a score

struct Interval {
    int64_t begin, end;
};

// The scratch of one thread.
struct Workspace {
    float* keys;    // [chunk_keys / staged_keys, head_dim, staged_keys]: a chunk in float32
    float* scores;  // [most_rows, chunk_keys] of some heads
    float* copied;  // [width, head_dim] keys that are not side by side

    static int64_t floats(int64_t head_dim) { return (chunk_keys + width) * head_dim + most_rows * chunk_keys; }
    Workspace(int64_t head_dim, void* scratch)
        : keys((float*)scratch), scores(keys + chunk_keys * head_dim), copied(scores + most_rows * chunk_keys) {}
};

// A sequence's tokens among those that are computed now.
struct Sequence {
    const int32_t* blocks;
    int64_t first, last;     // tokens
    int64_t first_position;  // of token 0 of the step, were it one of this sequence
    int64_t sees(int64_t token) const { return first_position + token + 1; }  // keys
};

// Calls f(sequence) for each that has tokens among [first_token, last_token).
template <class F>
void for_sequences(const CpuChooseKeysArgs& a, F f) {
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int64_t begin = a.cu_seqlens_q[s], end = a.cu_seqlens_q[s + 1];
        const Sequence own{a.block_table + s * a.block_table_stride, larger(begin, a.first_token),
                           smaller(end, a.last_token), a.context_lens[s] - end};
        if (own.first < own.last) f(own);
    }
}

int64_t slot_of(const CpuChooseKeysArgs& a, const Sequence& seq, int64_t key) {
    return seq.blocks[key / a.block_size] * (int64_t)a.block_size + key % a.block_size;
}

// Writes keys [keys.begin, keys.end) of a chunk to w.keys; whole vectors of lanes, whose last may repeat a key.
template <class E>
void stage(const CpuChooseKeysArgs& a, const Sequence& seq, Interval keys, const Workspace& w) {
    const E* const cache = (const E*)a.k_cache;
    for (int64_t k = keys.begin; k < keys.end; k += width) {
        const E* from = cache + slot_of(a, seq, k) * a.head_dim;
        if (a.block_size % width != 0 || k + width > keys.end) {
            for (int64_t j = 0; j < width; ++j)
                memcpy((E*)w.copied + j * a.head_dim,
                       cache + slot_of(a, seq, smaller(k + j, keys.end - 1)) * a.head_dim,
                       (size_t)a.head_dim * sizeof(E));
            from = (const E*)w.copied;
        }
        const int64_t at = k - keys.begin;
        stage_keys(from, a.head_dim, w.keys + at / staged_keys * staged_keys * a.head_dim + at % staged_keys);
    }
}

// Scores of a token with the first `count` staged keys: out [round_up(count, width)].
void score_token(const CpuChooseKeysArgs& a, int64_t token, int64_t count, const Workspace& w, float* out) {
    const float* const q = (const float*)a.q + token * a.q_stride;
    if (!a.weights) {  // the score of the one head
        for (int64_t first = 0; first < count; first += staged_keys)
            score_rows<1>(q, w.keys + first * a.head_dim, a.head_dim, 0, smaller(count - first, staged_keys),
                          out + first);
        return;
    }
    const float* const weights = a.weights + token * a.weights_stride;
    for (int64_t k = 0; k < count; k += width) store(out + k, zero());
    for (int64_t head = 0, rows; head < a.num_heads; head += rows) {
        rows = rows_at_once(a.num_heads - head);
        for (int64_t first = 0; first < count; first += staged_keys)
            visit_rows<most_rows>(rows, [&]<int ROWS>() {
                score_rows<ROWS>(q + head * a.head_dim, w.keys + first * a.head_dim, a.head_dim, 0,
                                 smaller(count - first, staged_keys), w.scores + first);
            });
        for (int64_t i = 0; i < rows; ++i) {
            const vec weight = set1(weights[head + i]);
            const float* const of_head = w.scores + i * chunk_keys;
            for (int64_t k = 0; k < count; k += width)
                store(out + k, fma(weight, max(load(of_head + k), zero()), load(out + k)));
        }
    }
}

// A chunk of keys with a block of tokens.
template <class E>
void score_chunk(const CpuChooseKeysArgs& a, const Sequence& seq, Interval tokens, int64_t first_key,
                 const Workspace& w) {
    const Interval keys = {first_key, smaller(first_key + chunk_keys, seq.sees(tokens.end - 1))};
    stage<E>(a, seq, keys, w);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
        const int64_t count = smaller(keys.end, seq.sees(token)) - keys.begin;
        if (count <= 0 || seq.sees(token) <= a.top_k) continue;
        float* const out = a.scores + (token - a.first_token) * a.scores_stride + first_key;
        score_token(a, token, count, w, out);
        if (a.k_scales)
            for (int64_t k = 0; k < count; ++k) out[k] *= a.k_scales[slot_of(a, seq, first_key + k)];
    }
}

// An unsigned number whose order is that of the scores.
uint32_t order_of(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof(bits));
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// The score that is the count-th largest, as order_of has it, and how many keys with just this score are chosen: digit
// by digit, from the highest.
struct Threshold {
    uint32_t order = 0;
    int64_t num_equal;
};
Threshold find_threshold(const float* scores, int64_t num_keys, int64_t count) {
    Threshold found{.num_equal = count};
    for (int shift = 24; shift >= 0; shift -= 8) {
        const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8);
        int64_t bins[num_bins] = {};
        for (int64_t k = 0; k < num_keys; ++k) {
            const uint32_t order = order_of(scores[k]);
            if (((order ^ found.order) & known) == 0) ++bins[order >> shift & (num_bins - 1)];
        }
        int bin = num_bins - 1;
        for (; bins[bin] < found.num_equal; --bin) found.num_equal -= bins[bin];
        found.order |= (uint32_t)bin << shift;
    }
    return found;
}

// Puts the scores of runs in the place of those of their keys, which begin where the run does or before.
void score_runs(const CpuChooseKeysArgs& a, float* scores, int64_t num_keys, int64_t num_runs) {
    for (int64_t run = 0; run < num_runs; ++run) {
        const Interval keys = {run * a.run_keys, smaller((run + 1) * a.run_keys, num_keys)};
        float best = scores[keys.begin];
        for (int64_t k = keys.begin + 1; k < keys.end; ++k)
            if (order_of(scores[k]) > order_of(best)) best = scores[k];
        scores[run] = run >= num_runs - a.last_runs ? __builtin_inff() : best;
    }
}

// Writes the slots of keys [keys.begin, keys.end), in the cache that attention reads; returns what is behind them.
int32_t* write_slots(const CpuChooseKeysArgs& a, const Sequence& seq, Interval keys, int32_t* out) {
    for (int64_t k = keys.begin; k < keys.end; ++k) {
        const int64_t block = (int64_t)seq.blocks[k / a.block_size] * a.slot_heads + a.slot_head;
        *out++ = (int32_t)(block * a.block_size + k % a.block_size);
    }
    return out;
}

void choose(const CpuChooseKeysArgs& a, const Sequence& seq, int64_t token) {
    int32_t* out = a.slots + token * a.top_k;
    const int64_t num_keys = seq.sees(token);
    if (num_keys <= a.top_k) {
        write_slots(a, seq, {0, num_keys}, out);
        return;
    }
    float* const scores = a.scores + (token - a.first_token) * a.scores_stride;
    const int64_t num_runs = (num_keys + a.run_keys - 1) / a.run_keys;
    if (a.last_runs > 0) score_runs(a, scores, num_keys, num_runs);
    Threshold left = find_threshold(scores, num_runs, a.top_k / a.run_keys);
    for (int64_t run = 0; run < num_runs; ++run) {
        const uint32_t order = order_of(scores[run]);
        if (order > left.order || (order == left.order && left.num_equal-- > 0))
            out = write_slots(a, seq, {run * a.run_keys, smaller((run + 1) * a.run_keys, num_keys)}, out);
    }
}

}  // namespace

size_t choose_keys_scratch_bytes(const CpuChooseKeysArgs& args) {
    return (size_t)Workspace::floats(args.head_dim) * sizeof(float);
}

void score_keys(const CpuChooseKeysArgs& args, Share share) {
    const Workspace workspace(args.head_dim, args.scratch[share.thread]);
    int64_t item = 0;
    visit_cache_element(args.cache_type, [&](auto element) {
        for_sequences(args, [&](const Sequence& seq) {
            for (int64_t token = seq.first; token < seq.last; token += block_tokens) {
                const Interval tokens = {token, smaller(token + block_tokens, seq.last)};
                const int64_t most = seq.sees(tokens.end - 1);
                if (most <= args.top_k) continue;
                for (int64_t key = 0; key < most; key += chunk_keys)
                    if (item++ % share.count == share.index)
                        score_chunk<decltype(element)>(args, seq, tokens, key, workspace);
            }
        });
    });
}

void choose_keys(const CpuChooseKeysArgs& args, Share share) {
    for_sequences(args, [&](const Sequence& seq) {
        for (int64_t token = seq.first; token < seq.last; ++token)
            if (token % share.count == share.index) choose(args, seq, token);
    });
}

}  // namespace infinilm::cpu::INFINILM_ISA
