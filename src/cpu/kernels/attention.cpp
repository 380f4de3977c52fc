// Causal attention over a paged or static cache, for prefill, chunked prefill and decode alike. Called by
// CpuBackend::paged_attention. A work item is (sequence, kv heads, block of query tokens), and where that is too coarse
// to share out, also one chunk of keys; threads draw items from a counter, since no result depends on who computes it.
//
// Bits: keys are taken in chunks that begin at multiples of chunk_keys in the sequence. Per chunk, score = one
// accumulator per (query, key), head_dim ascending; weights 2^(score - the chunk's largest); values added in the order
// of keys. Chunks are then merged in order (the online softmax of Milakov & Gimelshein 2018, blocked as in
// FlashAttention, Dao et al. 2022). Keys a query does not see take no part at all, not even as 0 * v. So a query's
// result does not depend on the queries beside it, on how the prompt was chunked, on block_size, batch or threads.
#include "cpu/kernels/attention_tile.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int block_rows = 96;  // (query, head) rows per item: enough to pay for staging, few enough for L2
// An item larger than 1 / fine_items of the whole call is split by chunks.
constexpr int64_t fine_items = 128;
constexpr int64_t items_per_share = 4;  // at least, where items take several kv heads
constexpr int64_t steps_ahead = 4;      // tiles between what is computed with and what is asked for
// Bounds shared scratch: 19 MB at head_dim 128. One sequence of 32 heads and 262144 keys fits; what does not is not
// split.
constexpr int64_t max_partials = 32768;

static int group_size(const AttentionArgs& a) { return a.num_heads / a.num_kv_heads; }
static int64_t block_queries(const AttentionArgs& a) { return larger(1, block_rows / group_size(a)); }
static int64_t max_rows(const AttentionArgs& a) { return larger(block_rows, group_size(a)); }
static int64_t padded_dim(const AttentionArgs& a) { return round_up(a.head_dim, width); }
// A partial result: padded_dim sums, then the largest score, then the sum of weights.
static int64_t partial_stride(const AttentionArgs& a) { return round_up(a.head_dim, 16) + 16; }

namespace {

// Of keys or of chunks.
struct Interval {
    int64_t begin, end;
};

// Positions of the keys that the query at `position` sees.
static Interval visible_keys(const AttentionArgs& a, int64_t position) {
    return {a.sliding_window > 0 ? larger(0, position + 1 - a.sliding_window) : 0, position + 1};
}

// Walks over the sequences of a call and says how each is cut into items.
struct Cursor {
    int64_t total_work = 0;  // (query, chunk) pairs over all kv heads
    int64_t num_shares = 1;
    int64_t seq = -1;
    int64_t first_token = 0, num_queries = 0, context = 0;  // of sequence seq
    int64_t first_chunk = 0, num_chunks = 0, num_blocks = 0;
    int64_t kv_per_item = 1, num_kv_groups = 0;
    bool split = false;
    int64_t item_begin = 0, item_end = 0, partial_begin = 0, partial_end = 0;

    void load(const AttentionArgs& a, int64_t s) {
        seq = s;
        first_token = a.cu_seqlens_q[s];
        num_queries = a.cu_seqlens_q[s + 1] - first_token;
        context = a.context_lens[s];
        first_chunk = visible_keys(a, context - num_queries).begin / chunk_keys;
        num_chunks = num_queries ? (context - 1) / chunk_keys + 1 - first_chunk : 0;
        num_blocks = (num_queries + block_queries(a) - 1) / block_queries(a);
    }
    void start(const AttentionArgs& a, int shares) {
        int64_t work = 0;
        for (int64_t s = 0; s < a.num_seqs; ++s) {
            load(a, s);
            work += num_queries * num_chunks * a.num_kv_heads;
        }
        *this = Cursor{};
        total_work = work;
        num_shares = shares;
    }
    // kv heads that one item takes. A paged cache has the heads of a block side by side, and is read fastest in that
    // order; a long block has one head's keys side by side.
    int64_t choose_kv_heads(const AttentionArgs& a) const {
        if (a.block_size >= chunk_keys) return 1;
        const int64_t tokens = smaller(num_queries, block_queries(a)), chunks = split ? 1 : num_chunks;
        const int64_t fit = block_rows / larger(tokens * group_size(a), 1);
        const int64_t fair = total_work / larger(tokens * chunks * num_shares * items_per_share, 1);
        const int64_t most = larger(1, smaller(smaller(fit, fair), a.num_kv_heads));
        return (a.num_kv_heads + (a.num_kv_heads + most - 1) / most - 1) / ((a.num_kv_heads + most - 1) / most);
    }
    bool next(const AttentionArgs& a) {
        if (seq + 1 >= a.num_seqs) return false;
        load(a, seq + 1);
        const int64_t partials = num_queries * a.num_heads * num_chunks;
        split = num_chunks > 1 && smaller(num_queries, block_queries(a)) * num_chunks * fine_items > total_work &&
                partial_end + partials <= max_partials;
        item_begin = item_end;
        kv_per_item = choose_kv_heads(a);
        num_kv_groups = (a.num_kv_heads + kv_per_item - 1) / kv_per_item;
        item_end += num_blocks * num_kv_groups * (split ? num_chunks : 1);
        partial_begin = partial_end;
        if (split) partial_end += partials;
        return true;
    }
    float* partial(const AttentionArgs& a, int64_t query, int64_t head, int64_t chunk) const {
        const int64_t index = partial_begin + (query * a.num_heads + head) * num_chunks + (chunk - first_chunk);
        return (float*)a.shared_scratch + index * partial_stride(a);
    }
};

// The scratch of one thread. A row is (kv head of the item, token of the block, head of the kv head's group), in this
// order.
struct Workspace {
    float* q;       // [rows, head_dim] scaled
    float* scores;  // [rows, chunk_keys] then weights, of this chunk
    float* sums;    // [rows, padded_dim] weighted values of this chunk
    float* totals;  // [rows, padded_dim] weighted values of all chunks so far
    float* staged;  // a tile in float32: keys as [head_dim, tile_keys], or values as [tile_keys, padded_dim]
    float *chunk_max, *chunk_weight, *total_max, *total_weight;  // [rows]
    float* copied;                                               // [2, width, head_dim] keys that are not side by side
    int64_t* at;                                                 // [chunk_keys] where each key begins in the cache
    int64_t* slots;                                              // [chunk_keys] at / head_dim: of the scales
    Interval* keys;                                              // [rows] keys of this chunk that a row sees

    static size_t bytes(const AttentionArgs& a) {
        const int64_t rows = max_rows(a), dim = padded_dim(a);
        const int64_t floats =
            3 * rows * dim + rows * chunk_keys + (tile_keys + 2 * width) * dim + 4 * round_up(rows, 16);
        return (size_t)floats * sizeof(float) + 2 * chunk_keys * sizeof(int64_t) + (size_t)rows * sizeof(Interval);
    }
    Workspace(const AttentionArgs& a, void* scratch) {
        const int64_t rows = max_rows(a), dim = padded_dim(a), padded_rows = round_up(rows, 16);
        float* p = (float*)scratch;
        scores = p, p += rows * chunk_keys;
        chunk_max = p, p += padded_rows;
        chunk_weight = p, p += padded_rows;
        total_max = p, p += padded_rows;
        total_weight = p, p += padded_rows;
        staged = p, p += tile_keys * dim;
        copied = p, p += 2 * width * dim;
        q = p, p += rows * dim;
        sums = p, p += rows * dim;
        totals = p, p += rows * dim;
        at = (int64_t*)p;
        slots = at + chunk_keys;
        keys = (Interval*)(slots + chunk_keys);
    }
};

struct Block {
    const AttentionArgs& a;
    const Cursor& seq;
    const Workspace& w;
    int64_t first_query, num_tokens;  // queries [first_query, first_query + num_tokens) of the sequence
    int64_t first_kv, num_kv;         // kv heads
    int64_t group, dim;               // heads of a kv head; padded_dim
    int64_t chunk;                    // keys [chunk * chunk_keys, ...)
    Interval seen;                    // keys of the chunk that any row sees

    int64_t kv_rows() const { return num_tokens * group; }
    int64_t rows() const { return num_kv * kv_rows(); }
    int64_t token(int64_t row) const { return first_query + row % kv_rows() / group; }  // of the sequence
    int64_t head(int64_t row) const { return (first_kv + row / kv_rows()) * group + row % group; }
    int64_t position(int64_t row) const { return seq.context - seq.num_queries + token(row); }
    const Interval& keys(int64_t row) const { return w.keys[row]; }

    void start_chunk(int64_t index) {
        chunk = index;
        const int64_t first = chunk * chunk_keys;
        for (int64_t row = 0; row < rows(); ++row) {  // relative to the chunk; both ends grow with the token
            const Interval visible = visible_keys(a, position(row));
            w.keys[row] = {smaller(larger(visible.begin - first, 0), chunk_keys),
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

// ---- One chunk of keys for one block of rows ----

// Calls f(row, count) for every register tile of rows of a kv head.
template <class F>
static void for_row_groups(const Block& b, int64_t kv, F f) {
    for (int64_t i = 0, count; i < b.kv_rows(); i += count) {
        count = rows_at_once(b.kv_rows() - i);
        f(kv * b.kv_rows() + i, count);
    }
}

// Scores of the keys that one of `count` rows sees, and of some beside them.
static void score_group(const Block& b, int64_t tile, int64_t row, int64_t count) {
    const int64_t begin = larger(b.keys(row).begin - tile, 0);
    const int64_t end = smaller(b.keys(row + count - 1).end - tile, tile_keys);
    visit_rows(count, [&]<int ROWS>() {
        score_rows<ROWS>(b.w.q + row * b.a.head_dim, b.w.staged, b.a.head_dim, begin, end,
                         b.w.scores + row * chunk_keys + tile);
    });
}

// Scores to weights: 2^(score - largest), zero where the row does not see the key, over whole vectors of lanes.
static void softmax_row(const Block& b, int64_t row) {
    const Interval keys = b.keys(row);
    if (keys.begin >= keys.end) return;
    float* s = b.w.scores + row * chunk_keys;  // [chunk_keys]
    const int64_t begin = keys.begin / width * width, end = round_up(keys.end, width);
    if (b.a.score_cap > 0) {  // scores are times log2(e), and so is the cap
        const float cap = b.a.score_cap * 0x1.715476p0f;
        for (int64_t k = begin; k < end; k += width) store(s + k, soft_cap(load(s + k), cap));
    }
    for (int64_t k = begin; k < keys.begin; ++k) s[k] = -__builtin_inff();
    for (int64_t k = keys.end; k < end; ++k) s[k] = -__builtin_inff();
    vec largest = load(s + begin);
    for (int64_t k = begin + width; k < end; k += width) largest = max(largest, load(s + k));
    const float top = reduce_max(largest);
    vec sum = zero();
    for (int64_t k = begin; k < end; k += width) {
        const vec weight = exp2_nonpositive(load(s + k) - set1(top));
        store(s + k, weight);
        sum = sum + weight;
    }
    b.w.chunk_max[row] = top;
    b.w.chunk_weight[row] = reduce_add(sum);
}

template <int ROWS>
static void value_group(const Block& b, int64_t tile, int64_t row) {
    auto clip = [&](Interval r) { return Interval{larger(r.begin - tile, 0), smaller(r.end - tile, tile_keys)}; };
    const float* weights = b.w.scores + row * chunk_keys + tile;
    float* sums = b.w.sums + row * b.dim;
    auto alone = [&](int i, int64_t begin, int64_t end) {
        value_rows<1>(weights + i * chunk_keys, b.w.staged, begin, end, sums + i * b.dim, b.dim);
    };
    // All rows together over the keys that all see; the rest of each row's keys alone, still in order.
    const Interval all = {clip(b.keys(row + ROWS - 1)).begin, clip(b.keys(row)).end};
    const bool together = all.begin < all.end;
    for (int i = 0; i < ROWS; ++i) {
        const Interval keys = clip(b.keys(row + i));
        alone(i, keys.begin, together ? all.begin : keys.end);
    }
    if (!together) return;
    value_rows<ROWS>(weights, b.w.staged, all.begin, all.end, sums, b.dim);
    for (int i = 0; i < ROWS; ++i) alone(i, all.end, clip(b.keys(row + i)).end);
}

// The keys from k on of a tile as [width][head_dim]: where they lie, or copied there from blocks of odd sizes.
template <class E>
static const E* neighbours(const Block& b, Tile<E> tile, int64_t k, void* copy) {
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
    Interval keys;      // that any row sees, in the tile
};

template <class E>
static void score_step(const Block& b, const Step<E>& step) {
    const int64_t begin = step.keys.begin / width * width, end = step.keys.end, head_dim = b.a.head_dim;
    float* const copy = b.w.copied;
    if (rows_at_once(b.kv_rows()) < b.kv_rows()) {
        for (int64_t k = begin; k < end; k += width)
            stage_keys(neighbours(b, step.tile, k, copy), head_dim, b.w.staged + k);
        return for_row_groups(b, step.kv, [&](int64_t row, int64_t count) { score_group(b, step.first, row, count); });
    }
    const int64_t row = step.kv * b.kv_rows();
    visit_rows(b.kv_rows(), [&]<int ROWS>() {
        for (int64_t k = begin; k < end; k += 2 * width) {
            const int64_t second = k + width < end ? k + width : k;  // an odd vector is computed twice
            float* const scores = b.w.scores + row * chunk_keys + step.first;
            score_cached<E, ROWS>(b.w.q + row * head_dim, neighbours(b, step.tile, k, copy),
                                  neighbours(b, step.tile, second, copy + width * head_dim), step.ahead, k, second,
                                  head_dim, scores + k, scores + second);
        }
    });
}

template <class E>
static void value_step(const Block& b, const Step<E>& step) {
    const int64_t row = step.kv * b.kv_rows();
    // A single token's rows all see the same keys.
    if (b.num_tokens > 1 || rows_at_once(b.kv_rows()) < b.kv_rows() || b.dim != b.a.head_dim) {
        stage_values(step.tile, step.keys.begin, step.keys.end, b.a.head_dim, b.w.staged, b.dim);
        return for_row_groups(b, step.kv, [&](int64_t first, int64_t count) {
            visit_rows(count, [&]<int ROWS>() { value_group<ROWS>(b, step.first, first); });
        });
    }
    visit_rows(b.kv_rows(), [&]<int ROWS>() {
        value_rows_cached<E, ROWS>(b.w.scores + row * chunk_keys + step.first, step.tile, step.ahead, step.keys.begin,
                                   step.keys.end, b.w.sums + row * b.dim, b.dim);
    });
}

// An int8 cache has a scale for each key and value of a head, which are taken out of the sums over head_dim and over
// keys: scores are multiplied by the scale of their key, weights by that of their value.
template <class E>
static void scale_columns(const Block& b, const Step<E>& step, const float* scales) {
    if (!scales) return;
    float of_tile[tile_keys] = {};
    const int64_t* slots = b.w.slots + step.first;
    for (int64_t k = step.keys.begin; k < step.keys.end; ++k) of_tile[k] = scales[slots[k] + step.kv * b.a.block_size];
    const int64_t begin = step.keys.begin / width * width;
    for (int64_t row = step.kv * b.kv_rows(); row < (step.kv + 1) * b.kv_rows(); ++row) {
        float* const columns = b.w.scores + row * chunk_keys + step.first;
        for (int64_t k = begin; k < step.keys.end; k += width)
            store(columns + k, load(columns + k) * load(of_tile + k));
    }
}

// Leaves sums, chunk_max and chunk_weight of every row that sees a key of the chunk.
template <class E>
static void attend_chunk(const Block& b) {
    const int64_t first = b.seen.begin / tile_keys * tile_keys;
    const int64_t num_steps = ((b.seen.end - 1 - first) / tile_keys + 1) * b.num_kv;
    // The heads of a tile follow each other, as in the memory of a block. The last steps ask for next_cache.
    auto step = [&](int64_t index, const void* cache, const void* next_cache) {
        auto tile = [&](int64_t i, const void* from) {
            return Tile<E>{(const E*)from + i % b.num_kv * b.a.block_size * b.a.head_dim,
                           b.w.at + first + i / b.num_kv * tile_keys};
        };
        auto later = [&](int64_t i) {
            return i < num_steps ? tile(i, cache) : tile(smaller(i - num_steps, num_steps - 1), next_cache);
        };
        const int64_t begin = first + index / b.num_kv * tile_keys;
        return Step<E>{tile(index, cache),
                       {later(index + steps_ahead), later(index + 1)},
                       index % b.num_kv,
                       begin,
                       {larger(b.seen.begin - begin, 0), smaller(b.seen.end - begin, tile_keys)}};
    };
    for (int64_t i = 0; i < num_steps; ++i) {
        const Step<E> scores = step(i, b.a.k_cache, b.a.v_cache);
        score_step(b, scores);
        scale_columns(b, scores, b.a.k_scales);
    }
    for (int64_t row = 0; row < b.rows(); ++row) softmax_row(b, row);
    memset(b.w.sums, 0, (size_t)(b.rows() * b.dim) * sizeof(float));
    for (int64_t i = 0; i < num_steps; ++i) {
        const Step<E> values = step(i, b.a.v_cache, b.a.v_cache);
        scale_columns(b, values, b.a.v_scales);
        value_step(b, values);
    }
}

// ---- Merging chunks ----

struct Running {
    float *largest, *weight, *sums;  // one row: a number, a number, [dim]
};

// into = into and part together: both sides rescaled to the larger of the two largest scores.
static void merge(const Running& into, const Running& part, int64_t dim) {
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

static void copy_row(const Running& to, const Running& from, int64_t dim) {
    *to.largest = *from.largest;
    *to.weight = *from.weight;
    memcpy(to.sums, from.sums, (size_t)dim * sizeof(float));
}

static void write_row(const AttentionArgs& a, const Running& row, int64_t token, int64_t head) {
    float weight = *row.weight;
    // Scores are times log2(e). A sink far above them makes it infinite, and the row zero.
    if (a.sinks) weight += exp(set1(a.sinks[head] - *row.largest * 0x1.62e430p-1f))[0];
    float* const out = a.out + token * a.out_stride + head * a.head_dim;
    const vec scale = set1(1.0f / weight);
    int d = 0;
    for (; d + width <= a.head_dim; d += width) store(out + d, load(row.sums + d) * scale);
    if (d < a.head_dim) store_partial(out + d, load(row.sums + d) * scale, a.head_dim - d);
}

static Running partial_row(float* partial, int64_t dim) { return {partial + dim, partial + dim + 1, partial}; }

// The chunks that the query at `position` takes part in.
static Interval visible_chunks(const AttentionArgs& a, int64_t position) {
    const Interval keys = visible_keys(a, position);
    return {keys.begin / chunk_keys, (keys.end - 1) / chunk_keys + 1};
}

// Adds the chunk just computed to each row's running total, or hands it to attention_merge.
static void keep_chunk(const Block& b) {
    for (int64_t row = 0; row < b.rows(); ++row) {
        const Interval chunks = visible_chunks(b.a, b.position(row));
        if (b.chunk < chunks.begin || b.chunk >= chunks.end) continue;
        const Running part = {b.w.chunk_max + row, b.w.chunk_weight + row, b.w.sums + row * b.dim};
        const Running total = {b.w.total_max + row, b.w.total_weight + row, b.w.totals + row * b.dim};
        if (b.seq.split) {
            float* partial = b.seq.partial(b.a, b.token(row), b.head(row), b.chunk);
            copy_row(partial_row(partial, b.dim), part, b.dim);
        } else if (b.chunk == chunks.begin) {
            copy_row(total, part, b.dim);
        } else {
            merge(total, part, b.dim);
        }
    }
}

// ---- Items ----

// Scaled so that weights are powers of two.
static void load_queries(const Block& b) {
    const AttentionArgs& a = b.a;
    const vec scale = set1(a.softmax_scale * 0x1.715476p0f);  // log2(e)
    for (int64_t row = 0; row < b.rows(); ++row) {
        const float* q = a.q + (b.seq.first_token + b.token(row)) * a.q_stride + b.head(row) * a.head_dim;
        float* out = b.w.q + row * a.head_dim;
        int d = 0;
        for (; d + width <= a.head_dim; d += width) store(out + d, load(q + d) * scale);
        if (d < a.head_dim) store_partial(out + d, load_partial(q + d, a.head_dim - d) * scale, a.head_dim - d);
    }
}

template <class E>
static void run_item(const AttentionArgs& a, const Workspace& w, const Cursor& seq, int64_t item) {
    const int64_t first_kv = item % seq.num_kv_groups * seq.kv_per_item;
    const int64_t rest = item / seq.num_kv_groups;
    // The last block sees the most keys: first, so that the shortest items come at the end.
    const int64_t block = seq.num_blocks - 1 - (seq.split ? rest / seq.num_chunks : rest);
    const int64_t first_query = block * block_queries(a);
    Block b{a,
            seq,
            w,
            first_query,
            smaller(block_queries(a), seq.num_queries - first_query),
            first_kv,
            smaller(seq.kv_per_item, a.num_kv_heads - first_kv),
            group_size(a),
            padded_dim(a),
            0,
            {}};
    Interval chunks = {visible_chunks(a, b.position(0)).begin, visible_chunks(a, b.position(b.rows() - 1)).end};
    if (seq.split) {
        const int64_t chunk = seq.first_chunk + rest % seq.num_chunks;
        if (chunk < chunks.begin || chunk >= chunks.end) return;
        chunks = {chunk, chunk + 1};
    }
    load_queries(b);
    for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
        b.start_chunk(chunk);
        attend_chunk<E>(b);
        keep_chunk(b);
    }
    if (seq.split) return;
    for (int64_t row = 0; row < b.rows(); ++row)
        write_row(a, {w.total_max + row, w.total_weight + row, w.totals + row * b.dim}, seq.first_token + b.token(row),
                  b.head(row));
}

}  // namespace

size_t attention_scratch_bytes(const AttentionArgs& args) { return Workspace::bytes(args); }

size_t attention_shared_scratch_bytes(const AttentionArgs& args) {
    Cursor seq;
    seq.start(args, 1);
    while (seq.next(args)) {
    }
    return (size_t)(seq.partial_end * partial_stride(args)) * sizeof(float);
}

size_t attention_most_shared_scratch_bytes(const AttentionArgs& args, int64_t num_tokens, int64_t max_context_len) {
    const int64_t num_chunks = (max_context_len + chunk_keys - 1) / chunk_keys;
    if (num_chunks <= 1) return 0;  // nothing to split
    const int64_t partials = smaller(num_tokens * args.num_heads * num_chunks, max_partials);
    return (size_t)(partials * partial_stride(args)) * sizeof(float);
}

void attention(const AttentionArgs& args, Share share) {
    const Workspace workspace(args, args.scratch[share.thread]);
    Cursor seq;
    seq.start(args, share.count);
    visit_cache_element(args.cache_element, [&](auto element) {
        for (;;) {
            const int64_t item = __atomic_fetch_add(args.next_item, 1, __ATOMIC_RELAXED);
            while (item >= seq.item_end)
                if (!seq.next(args)) return;
            run_item<decltype(element)>(args, workspace, seq, item - seq.item_begin);
        }
    });
}

void attention_merge(const AttentionArgs& args, Share share) {
    const int64_t dim = padded_dim(args);
    Cursor seq;
    seq.start(args, share.count);
    int64_t count = 0;  // of (token, head) rows seen so far: dealt to the shares in turn
    while (seq.next(args)) {
        if (!seq.split) continue;
        for (int64_t row = 0; row < seq.num_queries * args.num_heads; ++row) {
            if (count++ % share.count != share.index) continue;
            const int64_t query = row / args.num_heads, head = row % args.num_heads;
            const Interval chunks = visible_chunks(args, seq.context - seq.num_queries + query);
            const Running total = partial_row(seq.partial(args, query, head, chunks.begin), dim);
            for (int64_t chunk = chunks.begin + 1; chunk < chunks.end; ++chunk)
                merge(total, partial_row(seq.partial(args, query, head, chunk), dim), dim);
            write_row(args, total, seq.first_token + query, head);
        }
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
