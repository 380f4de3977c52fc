// Attention over a paged or static cache, causal or in both directions, for prefill and decode alike: a template over
// what is multiplied (Floats or Pairs), which attention.cpp and attention_bf16.cpp include. A work item is (sequence,
// kv heads, block of query tokens), and where that is too coarse to share out, also one chunk of keys; threads draw
// items from a counter, since no result depends on who computes it.
//
// Bits: keys are taken in chunks that begin at multiples of chunk_keys in the sequence. Per chunk, score = one
// accumulator per (query, key), head_dim ascending; weights 2^(score - the chunk's largest); values added in the order
// of keys; Pairs add the products of two neighbours at a time, which begin at even head_dim and at even keys. Chunks
// are then merged in order (the online softmax of Milakov & Gimelshein 2018, blocked as in FlashAttention, Dao et al.
// 2022). Keys a query does not see take no part at all, not even as 0 * v. So a query's result does not depend on the
// queries beside it, on how the prompt was chunked, on block_size, batch or threads.
#pragma once

#include "cpu/kernels/attention_items.h"
#include "cpu/kernels/lane_sums.h"

namespace infinilm::cpu::INFINILM_ISA {

// Staged values that all rows of a strip take in turn, from L2: with as many as L1 holds, sums would be stored and
// loaded four times as often.
constexpr int64_t value_tile_floats = 16384;
constexpr int64_t softmax_rows = 6;  // whose scores lie in L1 while they become weights
constexpr int64_t steps_ahead = 4;   // tiles that prefetches are ahead

namespace {

// A query head of a token.
struct Row {
    int64_t query, head;  // query: of the sequence
    Interval keys;        // of this chunk that it sees
};

// What some rows have of the chunks so far.
struct Results {
    float *sums, *largest, *weight;  // [rows, padded_dim] weighted values; [rows] largest score; [rows] sum of weights
    Results from(int64_t row, int64_t dim) const { return {sums + row * dim, largest + row, weight + row}; }
};

// The scratch of one thread. A row is (kv head of the item, token of the block, head of the kv head's group), in this
// order.
struct Workspace {
    Row* row;          // [rows]
    float* q;          // [rows, words of head_dim] scaled, as Block::q
    Results totals;    // [rows] of all chunks so far
    Results of_chunk;  // [strip_rows]
    float* scores;     // [strip_rows, chunk_keys] then weights in their place, of this chunk
    float* largest;    // [strip_rows, width] the largest score of each lane, where rows see the whole chunk
    float* keys;       // of this chunk and one kv head, [chunk_keys / staged_keys, words of head_dim, staged_keys]
    float* values;     // [words of chunk_keys, padded_dim]
    float* copied;     // [2, width, head_dim] keys that are not side by side
    int64_t* at;       // [chunk_keys] where each key begins in the cache
    int64_t* slots;    // [chunk_keys] at / head_dim: of the scales

    // Visits every array with its size in floats; arrays begin at cache lines.
    template <class F>
    void for_arrays(const CpuAttentionArgs& a, F f) {
        const int64_t rows = max_rows(a), dim = padded_dim(a), longs = sizeof(int64_t) / sizeof(float);
        f(row, rows * (int64_t)(sizeof(Row) / sizeof(float)));
        f(q, rows * a.head_dim), f(scores, strip_rows * chunk_keys), f(largest, strip_rows * width);
        f(totals.sums, rows * dim), f(totals.largest, rows), f(totals.weight, rows);
        f(of_chunk.sums, strip_rows * dim), f(of_chunk.largest, strip_rows), f(of_chunk.weight, strip_rows);
        f(keys, chunk_keys * a.head_dim), f(values, chunk_keys * dim), f(copied, 2 * width * a.head_dim);
        f(at, chunk_keys * longs), f(slots, chunk_keys * longs);
    }
    static size_t bytes(const CpuAttentionArgs& a) {
        int64_t floats = 0;
        Workspace{}.for_arrays(a, [&](auto*&, int64_t size) { floats += round_up(size, 16); });
        return (size_t)floats * sizeof(float);
    }
    Workspace() = default;
    Workspace(const CpuAttentionArgs& a, void* scratch) {
        float* p = (float*)scratch;
        for_arrays(a, [&]<class T>(T*& array, int64_t size) { array = (T*)p, p += round_up(size, 16); });
    }
};

// M: Floats or Pairs
template <class M>
struct Block {
    using Word = M::Word;
    const CpuAttentionArgs& a;
    const Cursor& seq;
    const Workspace& w;
    int64_t first_query, num_tokens;  // queries [first_query, first_query + num_tokens) of the sequence
    int64_t first_kv, num_kv;         // kv heads
    int64_t group, dim;               // heads of a kv head; padded_dim
    int64_t chunk = 0;                // keys [chunk * chunk_keys, ...)
    Interval seen = {};               // keys of the chunk that any row sees
    Interval strip = {};              // rows that are computed now
    Results results = {};             // of them
    bool whole = false;               // they see all keys of the chunk, and scores are what is multiplied alone

    int64_t kv_rows() const { return num_tokens * group; }
    int64_t rows() const { return num_kv * kv_rows(); }
    int64_t position(int64_t row) const { return seq.context - seq.num_queries + w.row[row].query; }
    const Interval& keys(int64_t row) const { return w.row[row].keys; }
    int64_t head_words() const { return words<M>(a.head_dim); }
    Word* q(int64_t row) const { return (Word*)w.q + row * head_words(); }
    Word* staged_keys_of(int64_t first) const { return (Word*)w.keys + first * head_words(); }
    Word* staged_values() const { return (Word*)w.values; }
    float* scores(int64_t row) const { return w.scores + (row - strip.begin) * chunk_keys; }
    float* largest(int64_t row) const { return w.largest + (row - strip.begin) * width; }
    Word* weights(int64_t row) const { return (Word*)scores(row); }  // [words of chunk_keys]
    float* sums(int64_t row) const { return results.sums + (row - strip.begin) * dim; }
    // Rows of a kv head that are computed now.
    Interval rows_of(int64_t kv) const {
        return {larger(strip.begin, kv * kv_rows()), smaller(strip.end, (kv + 1) * kv_rows())};
    }
    // A few rows read keys and values from the cache, which is faster than to stage them for so few. Values only where
    // all rows see the same keys, as those of a single token do.
    bool stages_keys() const { return M::always_stages || kv_rows() > 2 * most_cached_rows; }
    bool stages_values() const { return stages_keys() || num_tokens > 1 || dim != a.value_dim; }

    void name_rows() const {
        Row* row = w.row;
        for (int64_t kv = first_kv; kv < first_kv + num_kv; ++kv)
            for (int64_t token = 0; token < num_tokens; ++token)
                for (int64_t i = 0; i < group; ++i) *row++ = {first_query + token, kv * group + i, {}};
    }

    void start_chunk(int64_t index) {
        chunk = index;
        const int64_t first = chunk * chunk_keys;
        for (int64_t row = 0; row < rows(); ++row) {  // relative to the chunk; both ends grow with the token
            const Interval visible = visible_keys(a, seq.seq, position(row), seq.context);
            w.row[row].keys = {smaller(larger(visible.begin - first, 0), chunk_keys),
                               larger(smaller(visible.end - first, chunk_keys), 0)};
        }
        seen = {keys(0).begin, keys(rows() - 1).end};
        locate_keys();
    }

    // Fills w.at. Entries outside `seen` point at a neighbour, so that whole vectors of keys may be read; what comes of
    // those is discarded.
    void locate_keys() const {
        const int32_t* table = a.block_table + seq.seq * a.block_table_stride;
        for (int64_t k = seen.begin; k < seen.end;) {
            const int64_t position = chunk * chunk_keys + k;
            const int64_t block = position / a.block_size, offset = position % a.block_size;
            int64_t slot = (table[block] * (int64_t)a.num_kv_heads + first_kv) * a.block_size + offset;
            for (int64_t end = smaller(seen.end, k + a.block_size - offset); k < end; ++k, ++slot)
                w.slots[k] = slot, w.at[k] = slot * a.head_dim;
        }
        const int64_t vector = seen.begin / width * width, apart = a.block_size % width ? 0 : a.head_dim;
        for (int64_t k = vector; k < seen.begin; ++k) w.at[k] = w.at[seen.begin] - (seen.begin - k) * apart;
        for (int64_t k = seen.begin / tile_keys * tile_keys; k < vector; ++k) w.at[k] = w.at[vector];
        for (int64_t k = seen.end; k % tile_keys; ++k) w.at[k] = w.at[seen.end - 1];
    }
};

// ---- One chunk of keys for one strip of rows ----

// Calls f(row, count) for every register tile of rows: at_once(left) says how many it has of those that are left.
template <class F>
static void for_row_groups(Interval rows, int64_t (*at_once)(int64_t), F f) {
    for (int64_t row = rows.begin, count; row < rows.end; row += count) {
        count = at_once(rows.end - row);
        f(row, count);
    }
}

// Scores of the staged keys that one of `count` rows sees, and of some beside them, of those side by side from `first`.
template <class M>
static void score_group(const Block<M>& b, int64_t first, int64_t row, int64_t count) {
    const int64_t begin = larger(b.keys(row).begin - first, 0);
    const int64_t end = smaller(b.keys(row + count - 1).end - first, staged_keys);
    visit_rows<most_rows>(count, [&]<int ROWS>() {
        score_rows<ROWS>(b.q(row), b.staged_keys_of(first), b.head_words(), begin, end, b.scores(row) + first,
                         b.whole ? b.largest(row) : nullptr);
    });
}

// Adds what the head's table says of the distance from the row's query to each key. Scores are times log2(e).
template <class M>
static void add_position_bias(const Block<M>& b, int64_t row) {
    const Interval keys = b.keys(row);
    const float* const of_chunk =
        b.a.position_bias + b.w.row[row].head * b.a.position_bias_stride + b.chunk * chunk_keys - b.position(row);
    float* const s = b.scores(row);
    const vec log2e = set1(0x1.715476p0f);
    int64_t k = keys.begin;
    for (; k + width <= keys.end; k += width) store(s + k, fma(load(of_chunk + k), log2e, load(s + k)));
    if (k == keys.end) return;
    const int rest = (int)(keys.end - k);
    store_partial(s + k, fma(load_partial(of_chunk + k, rest), log2e, load_partial(s + k, rest)), rest);
}

// Finds the largest score of a row; in whole vectors of softmax_keys, those of keys that it does not see become
// -infinity.
template <class M>
static void find_largest(const Block<M>& b, int64_t row) {
    const Interval keys = b.keys(row);
    if (keys.begin >= keys.end) return;
    if (b.whole) {
        b.results.largest[row - b.strip.begin] = reduce_max(load(b.largest(row)));
        return;
    }
    float* s = b.scores(row);  // [chunk_keys]
    const int64_t begin = keys.begin / M::softmax_keys * M::softmax_keys, end = round_up(keys.end, M::softmax_keys);
    if (b.a.score_cap > 0) {  // scores are times log2(e), and so is the cap
        const float cap = b.a.score_cap * 0x1.715476p0f;
        for (int64_t k = begin; k < end; k += width) store(s + k, soft_cap(load(s + k), cap));
    }
    if (b.a.position_bias) add_position_bias(b, row);
    const auto hide = [&](int64_t k) {
        store(s + k, keep_lanes(load(s + k), keys.begin - k, keys.end - k, -__builtin_inff()));
    };
    for (int i = 0; i < M::softmax_keys; i += width) hide(begin + i), hide(end - width - i);
    vec largest = load(s + begin);
    for (int64_t k = begin + width; k < end; k += width) largest = max(largest, load(s + k));
    b.results.largest[row - b.strip.begin] = reduce_max(largest);
}

// Scores to weights: 2^(score - largest). Those of keys that the row does not see, in whole vectors, become 0.
template <class M>
static void weigh_row(const Block<M>& b, int64_t row) {
    const Interval keys = b.keys(row);
    if (keys.begin >= keys.end) return;
    const float* const s = b.scores(row);
    auto* const weights = (typename M::Number*)b.weights(row);  // no wider than s: written behind what is read
    const vec largest = set1(b.results.largest[row - b.strip.begin]);
    constexpr int64_t step = M::softmax_keys;
    static_assert(step == width || sum_parts == 1, "a step adds to one part");
    vec sum[sum_parts] = {};
    const auto weigh_keys = [&](int64_t k, vec& part)
                                __attribute__((always_inline)) { part = weigh(s + k, largest, weights + k, part); };
    int64_t k = keys.begin / step * step;
    for (; k < keys.end && sum_part(k) != 0; k += step) weigh_keys(k, sum[sum_part(k)]);
    for (; k + (sum_parts - 1) * width < keys.end; k += sum_parts * step)  // whose parts stay in registers
        for (int part = 0; part < sum_parts; ++part) weigh_keys(k + part * width, sum[part]);
    for (; k < keys.end; k += step) weigh_keys(k, sum[sum_part(k)]);
    b.results.weight[row - b.strip.begin] = add_lanes(sum);
}

// In turns, so that a row does not wait for the sums across lanes of the one before.
template <class M>
static void softmax(const Block<M>& b, Interval rows) {
    for (; rows.begin < rows.end; rows.begin += softmax_rows) {
        const int64_t end = smaller(rows.begin + softmax_rows, rows.end);
        for (int64_t row = rows.begin; row < end; ++row) find_largest(b, row);
        for (int64_t row = rows.begin; row < end; ++row) weigh_row(b, row);
    }
}

// Adds up the values of `keys`, of the chunk, which begin and end with whole words.
template <int ROWS, class M>
static void value_group(const Block<M>& b, Interval keys, int64_t row) {
    constexpr int per_word = M::per_word;
    // A word at the edge of what any row sees has zeros beside it (stage_values), and so is whole.
    auto clip = [&](const Interval& r) {
        const int64_t begin = larger(r.begin, keys.begin), end = smaller(r.end, keys.end);
        if (begin >= end) return Interval{begin, begin};
        return Interval{begin == b.seen.begin ? begin / per_word * per_word : begin,
                        end == b.seen.end ? round_up(end, per_word) : end};
    };
    auto alone = [&](int64_t i, int64_t begin, int64_t end) {
        value_row(b.weights(i), b.staged_values(), begin, end, b.sums(i), b.dim);
    };
    // All rows together over the words that all see; the rest of each row's keys alone, still in order.
    const Interval all = {round_up(clip(b.keys(row + ROWS - 1)).begin, per_word),
                          clip(b.keys(row)).end / per_word * per_word};
    const bool together = all.begin < all.end;
    for (int64_t i = row; i < row + ROWS; ++i) {
        const Interval own = clip(b.keys(i));
        alone(i, own.begin, together ? all.begin : own.end);
    }
    if (!together) return;
    value_rows<ROWS>(b.weights(row), b.staged_values(), all.begin / per_word, all.end / per_word, b.sums(row), b.dim);
    for (int64_t i = row; i < row + ROWS; ++i) alone(i, all.end, clip(b.keys(i)).end);
}

// The keys from k on of a tile as [width][head_dim]: where they lie, or copied there from blocks of odd sizes.
template <class E, class M>
static const E* neighbours(const Block<M>& b, Tile<E> tile, int64_t k, void* copy) {
    if (b.a.block_size % width == 0) return tile.row(k);
    for (int j = 0; j < width; ++j)
        memcpy((E*)copy + j * b.a.head_dim, tile.row(k + j), (size_t)b.a.head_dim * sizeof(E));
    return (const E*)copy;
}

// One tile of keys or values of one kv head, and what to ask for.
template <class E>
struct Step {
    Tile<E> tile;
    Ahead<E> ahead;
    int64_t kv, first;  // kv head of the block; first key of the tile in the chunk
    Interval keys;      // that any row of the strip sees, in the tile
};

template <class E, class M>
static void score_step(const Block<M>& b, const Step<E>& step) {
    const Interval rows = b.rows_of(step.kv);
    const int64_t begin = step.keys.begin / width * width, end = step.keys.end, head_dim = b.a.head_dim;
    float* const copy = b.w.copied;
    for (int64_t k = begin; k < end; k += 2 * width) {
        const int64_t second = k + width < end ? k + width : k;  // an odd vector is computed twice
        const E* const keys0 = neighbours(b, step.tile, k, copy);
        const E* const keys1 = neighbours(b, step.tile, second, copy + width * head_dim);
        for_row_groups(rows, cached_rows_at_once, [&](int64_t row, int64_t count) {
            float* const scores = b.scores(row) + step.first;
            visit_rows<most_cached_rows>(count, [&]<int ROWS>() {
                score_cached<E, ROWS>(b.q(row), keys0, keys1, step.ahead, k, second, head_dim, scores + k,
                                      scores + second);
            });
        });
    }
}

template <class E, class M>
static void value_step(const Block<M>& b, const Step<E>& step) {
    for_row_groups(b.rows_of(step.kv), cached_rows_at_once, [&](int64_t row, int64_t count) {
        visit_rows<most_cached_rows>(count, [&]<int ROWS>() {
            value_rows_cached<E, ROWS>(b.scores(row) + step.first, step.tile, step.ahead, step.keys.begin,
                                       step.keys.end, b.sums(row), b.dim);
        });
    });
}

// All rows of the strip take some keys after the other.
template <class M>
static void score_staged(const Block<M>& b, Interval keys) {
    for (int64_t first = keys.begin / staged_keys * staged_keys; first < keys.end; first += staged_keys)
        for_row_groups(b.strip, rows_at_once, [&](int64_t row, int64_t count) { score_group(b, first, row, count); });
}

// All rows of the strip take some keys after the other, so that their values stay in the cache.
template <class M>
static void value_staged(const Block<M>& b, Interval keys) {
    const int64_t at_a_time = larger(1, value_tile_floats / b.dim) * M::per_word;
    keys = {keys.begin / M::per_word * M::per_word, round_up(keys.end, M::per_word)};
    for (; keys.begin < keys.end; keys.begin += at_a_time)
        for_row_groups(b.strip, rows_at_once, [&](int64_t row, int64_t count) {
            visit_rows<most_rows>(count, [&]<int ROWS>() {
                value_group<ROWS>(b, {keys.begin, smaller(keys.begin + at_a_time, keys.end)}, row);
            });
        });
}

// An int8 cache has a scale for each key and value of a head, which are taken out of the sums over head_dim and over
// keys: scores are multiplied by the scale of their key, weights by that of their value.
template <class E, class M>
static void scale_columns(const Block<M>& b, const Step<E>& step, const float* scales) {
    if (!scales) return;
    float of_tile[tile_keys] = {};
    const int64_t* slots = b.w.slots + step.first;
    for (int64_t k = step.keys.begin; k < step.keys.end; ++k) of_tile[k] = scales[slots[k] + step.kv * b.a.block_size];
    const int64_t begin = step.keys.begin / width * width;
    const Interval rows = b.rows_of(step.kv);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* const columns = b.scores(row) + step.first;
        for (int64_t k = begin; k < step.keys.end; k += width)
            store(columns + k, load(columns + k) * load(of_tile + k));
    }
}

// Leaves the results of every row of the strip that sees a key of the chunk. The rows are of the
// kv heads [first_kv, first_kv + num_kv) of the block.
template <class E, class M>
static void attend_strip(const Block<M>& b, int64_t first_kv, int64_t num_kv) {
    const Interval seen = {b.keys(b.strip.begin).begin, b.keys(b.strip.end - 1).end};
    if (seen.begin >= seen.end) return;
    const int64_t first = seen.begin / tile_keys * tile_keys;
    const int64_t num_steps = ((seen.end - 1 - first) / tile_keys + 1) * num_kv;
    // The heads of a tile follow each other, as in the memory of a block. The last steps ask for next_cache.
    auto step = [&](int64_t index, const void* cache, const void* next_cache) {
        auto tile = [&](int64_t i, const void* from) {
            return Tile<E>{(const E*)from + (first_kv + i % num_kv) * b.a.block_size * b.a.head_dim,
                           b.w.at + first + i / num_kv * tile_keys};
        };
        auto later = [&](int64_t i) {
            return i < num_steps ? tile(i, cache) : tile(smaller(i - num_steps, num_steps - 1), next_cache);
        };
        const int64_t begin = first + index / num_kv * tile_keys;
        return Step<E>{tile(index, cache),
                       {later(index + steps_ahead), later(index + 1)},
                       first_kv + index % num_kv,
                       begin,
                       {larger(seen.begin - begin, 0), smaller(seen.end - begin, tile_keys)}};
    };
    if (b.whole)
        for (int64_t row = b.strip.begin; row < b.strip.end; ++row) store(b.largest(row), set1(-__builtin_inff()));
    if (b.stages_keys()) score_staged(b, seen);
    for (int64_t i = 0; i < num_steps; ++i) {
        const Step<E> scores = step(i, b.a.k_cache, b.a.v_cache);
        if constexpr (!M::always_stages)
            if (!b.stages_keys()) score_step(b, scores);
        scale_columns(b, scores, b.a.k_scales);
    }
    softmax(b, b.strip);
    memset(b.results.sums, 0, (size_t)((b.strip.end - b.strip.begin) * b.dim) * sizeof(float));
    for (int64_t i = 0; i < num_steps; ++i) {
        const Step<E> values = step(i, b.a.v_cache, b.a.v_cache);
        scale_columns(b, values, b.a.v_scales);
        if constexpr (!M::always_stages)
            if (!b.stages_values()) value_step(b, values);
    }
    if (b.stages_values()) value_staged(b, seen);
}

// ---- Merging chunks ----

// into = into and part together: both sides rescaled to the larger of the two largest scores.
static void merge(const Results& into, const Results& part, int64_t dim) {
    const float largest = *into.largest > *part.largest ? *into.largest : *part.largest;
    vec differences = zero();
    differences[0] = *into.largest - largest;
    differences[1] = *part.largest - largest;
    const vec factors = exp2_nonpositive(differences);
    const vec old_factor = set1(factors[0]), new_factor = set1(factors[1]);
    for (int64_t d = 0; d < dim; d += width)
        store(into.sums + d, fma(load(part.sums + d), new_factor, load(into.sums + d) * old_factor));
    *into.weight = *into.weight * factors[0] + *part.weight * factors[1];
    *into.largest = largest;
}

static void copy_row(const Results& to, const Results& from, int64_t dim) {
    *to.largest = *from.largest;
    *to.weight = *from.weight;
    memcpy(to.sums, from.sums, (size_t)dim * sizeof(float));
}

static void write_row(const CpuAttentionArgs& a, const Results& row, int64_t head, float* out) {
    float weight = *row.weight;
    // Scores are times log2(e). A sink far above them makes it infinite, and the row zero.
    if (a.sinks) weight += exp(set1(a.sinks[head] - *row.largest * 0x1.62e430p-1f))[0];
    const vec scale = set1(1.0f / weight);
    int d = 0;
    for (; d + width <= a.value_dim; d += width) store(out + d, load(row.sums + d) * scale);
    if (d < a.value_dim) store_partial(out + d, load(row.sums + d) * scale, a.value_dim - d);
}

static Results partial_row(float* partial, int64_t dim) { return {partial, partial + dim, partial + dim + 1}; }

// The chunks that the query at `position` takes part in.
static Interval visible_chunks(const CpuAttentionArgs& a, const Cursor& seq, int64_t position) {
    const Interval keys = visible_keys(a, seq.seq, position, seq.context);
    return {keys.begin / chunk_keys, (keys.end - 1) / chunk_keys + 1};
}

// Where to leave the results of the strip: among the totals if this is the first chunk for all of its rows.
template <class M>
static Results choose_results(const Block<M>& b) {
    auto first_chunk = [&](int64_t row) { return visible_chunks(b.a, b.seq, b.position(row)).begin; };
    const bool is_total =
        !b.seq.split && first_chunk(b.strip.begin) == b.chunk && first_chunk(b.strip.end - 1) == b.chunk;
    return is_total ? b.w.totals.from(b.strip.begin, b.dim) : b.w.of_chunk;
}

// Whether the scores of the strip are those of staged keys, all of which its rows see.
template <class M>
static bool sees_whole_chunk(const Block<M>& b) {
    const CpuAttentionArgs& a = b.a;
    return b.stages_keys() && !a.k_scales && !a.position_bias && !(a.score_cap > 0) &&
           b.keys(b.strip.begin).end == chunk_keys && b.keys(b.strip.end - 1).begin == 0;
}

// Adds the results of the strip to the totals of its rows, or hands them to attention_merge.
template <class M>
static void keep_chunk(const Block<M>& b) {
    if (b.results.sums != b.w.of_chunk.sums) return;
    for (int64_t row = b.strip.begin; row < b.strip.end; ++row) {
        const Interval chunks = visible_chunks(b.a, b.seq, b.position(row));
        if (b.chunk < chunks.begin || b.chunk >= chunks.end) continue;
        const Results part = b.results.from(row - b.strip.begin, b.dim), total = b.w.totals.from(row, b.dim);
        if (b.seq.split) {
            float* partial = b.seq.partial(b.a, b.w.row[row].query, b.w.row[row].head, b.chunk);
            copy_row(partial_row(partial, b.dim), part, b.dim);
        } else if (b.chunk == chunks.begin) {
            copy_row(total, part, b.dim);
        } else {
            merge(total, part, b.dim);
        }
    }
}

// Asks for rows of a tile at once, since those of a head, which often share few sets of L2, come from farther away.
template <class E>
static void fetch(Tile<E> tile, Interval keys, int64_t dim) {
    for (int64_t k = keys.begin; k < keys.end; ++k)
        for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(E)) __builtin_prefetch(tile.row(k) + d, 0, 2);
}

// Writes the keys and values of a kv head of the block that rows see in this chunk to w.keys and w.values.
template <class E, class M>
static void stage(const Block<M>& b, int64_t kv) {
    const int64_t head_dim = b.a.head_dim, offset = kv * b.a.block_size * head_dim;
    const Tile<E> keys = {(const E*)b.a.k_cache + offset, b.w.at}, values = {(const E*)b.a.v_cache + offset, b.w.at};
    if (b.stages_keys()) fetch(keys, b.seen, head_dim);
    fetch(values, b.seen, b.a.value_dim);
    if (b.stages_keys())
        for (int64_t k = b.seen.begin / width * width; k < b.seen.end; k += width)
            stage_keys(neighbours(b, keys, k, b.w.copied), head_dim,
                       b.staged_keys_of(k / staged_keys * staged_keys) + k % staged_keys);
    stage_values(values, b.seen.begin, b.seen.end, b.a.value_dim, b.staged_values(), b.dim);
}

// ---- Items ----

// What a row is computed from, and where its result goes.
template <class M>
static const float* query(const Block<M>& b, int64_t row) {
    const Row& of = b.w.row[row];
    return (const float*)b.a.q + (b.seq.first_token + of.query) * b.a.q_stride + of.head * b.a.head_dim;
}
template <class M>
static float* output(const Block<M>& b, int64_t row) {
    const Row& of = b.w.row[row];
    return (float*)b.a.out + (b.seq.first_token + of.query) * b.a.out_stride + of.head * b.a.value_dim;
}

// Rows of the result are far apart: asked for while they are computed.
template <class M>
static void fetch_outputs(const Block<M>& b) {
    for (int64_t row = b.strip.begin; row < b.strip.end; ++row)
        for (int d = 0; d < b.a.value_dim; d += 16) __builtin_prefetch(output(b, row) + d, 1, 2);
}

// Scaled so that weights are powers of two. Asks for the queries of the next strip.
template <class M>
static void load_queries(const Block<M>& b) {
    const CpuAttentionArgs& a = b.a;
    const vec scale = set1(a.softmax_scale * 0x1.715476p0f);  // log2(e)
    const int head_dim = a.head_dim;
    for (int64_t row = b.strip.begin; row < b.strip.end; ++row) {
        const float *from = query(b, row), *next = query(b, smaller(row + strip_rows, b.rows() - 1));
        auto* const to = (typename M::Number*)b.q(row);
        for (int d = 0; d < head_dim; d += 16) __builtin_prefetch(next + d, 0, 2);
        int d = 0;
        for (; d + width <= head_dim; d += width) store(to + d, load(from + d) * scale);
        if (d < head_dim)  // the rest of a word is zero
            store_partial(to + d, load_partial(from + d, head_dim - d) * scale,
                          (int)round_up(head_dim - d, M::per_word));
    }
}

template <class E, class M>
static void attend_chunk(Block<M>& b, bool first, bool last) {
    auto attend = [&](Interval rows, int64_t first_kv, int64_t num_kv) {
        b.strip = rows;
        b.results = choose_results(b);
        b.whole = sees_whole_chunk(b);
        if (first) load_queries(b);
        const bool writes = last && !b.seq.split;
        if (writes) fetch_outputs(b);
        attend_strip<E>(b, first_kv, num_kv);
        keep_chunk(b);
        if (!writes) return;
        for (int64_t row = rows.begin; row < rows.end; ++row)
            write_row(b.a, b.w.totals.from(row, b.dim), b.w.row[row].head, output(b, row));
    };
    if (!b.stages_values()) return attend({0, b.rows()}, 0, b.num_kv);
    for (int64_t kv = 0; kv < b.num_kv; ++kv) {
        stage<E>(b, kv);
        const int64_t end = (kv + 1) * b.kv_rows();
        for (int64_t row = kv * b.kv_rows(); row < end; row += strip_rows)
            attend({row, smaller(row + strip_rows, end)}, kv, 1);
    }
}

template <class E, class M>
static void run_item(const CpuAttentionArgs& a, const Workspace& w, const Cursor& seq, int64_t item) {
    const int64_t first_kv = item % seq.num_kv_groups * seq.kv_per_item;
    const int64_t rest = item / seq.num_kv_groups;
    // The last block sees the most keys: first, so that the shortest items come at the end.
    const int64_t block = seq.num_blocks - 1 - (seq.split ? rest / seq.num_chunks : rest);
    const int64_t first_query = block * seq.block_queries;
    Block<M> b{a,
               seq,
               w,
               first_query,
               smaller(seq.block_queries, seq.num_queries - first_query),
               first_kv,
               smaller(seq.kv_per_item, a.num_kv_heads - first_kv),
               group_size(a),
               padded_dim(a)};
    b.name_rows();
    Interval chunks = {visible_chunks(a, seq, b.position(0)).begin,
                       visible_chunks(a, seq, b.position(b.rows() - 1)).end};
    if (seq.split) {
        const int64_t chunk = seq.first_chunk + rest % seq.num_chunks;
        if (chunk < chunks.begin || chunk >= chunks.end) return;
        chunks = {chunk, chunk + 1};
    }
    for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
        b.start_chunk(chunk);
        attend_chunk<E>(b, chunk == chunks.begin, chunk + 1 == chunks.end);
    }
}

// Draws items until none is left.
template <class M, class E>
static void attend_items(const CpuAttentionArgs& args, Share share) {
    const Workspace workspace(args, args.scratch[share.thread]);
    Cursor seq;
    seq.start(args, share.count);
    for (;;) {
        const int64_t item = __atomic_fetch_add(args.next_item, 1, __ATOMIC_RELAXED);
        while (item >= seq.item_end)
            if (!seq.next(args)) return;
        run_item<E, M>(args, workspace, seq, item - seq.item_begin);
    }
}

}  // namespace

}  // namespace infinilm::cpu::INFINILM_ISA
