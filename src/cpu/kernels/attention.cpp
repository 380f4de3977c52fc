// Causal attention over a paged or static cache, for prefill, chunked prefill and decode alike. Called by
// CpuBackend::paged_attention. A work item is (sequence, kv head, block of query tokens), and where that is too coarse
// to share out, also one chunk of keys; threads draw items from a counter, since no result depends on who computes it.
//
// Bits: keys are taken in chunks that begin at multiples of chunk_keys in the sequence. Per chunk, score = one vector
// accumulator per (query, key), lanes summed in a fixed tree; weights exp(score - the chunk's largest); values added in
// the order of keys. Chunks are then merged in order (the online softmax of Milakov & Gimelshein 2018, blocked as in
// FlashAttention, Dao et al. 2022). Keys a query does not see take no part at all, not even as 0 * v. So a query's
// result does not depend on the queries beside it, on how the prompt was chunked, on block_size, batch or threads.
#include "cpu/kernels/functions.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int chunk_keys = 256;  // keys of one partial result; 256 x rows scores stay in L2
constexpr int tile_keys = 32;    // keys staged at a time: 16 KB at head_dim 128, half of L1
constexpr int block_rows = 48;   // (query, head) rows per item: enough to pay for staging, few enough for L2
// Rows per register tile, with 4 keys or 4 vectors of values: 12 accumulators of 16 registers, or 16 of 32. The last
// four rows are one tile everywhere (of 2 keys or vectors where there are 16 registers): four query heads per kv head
// are what most models have, and in decode that is the whole block.
constexpr int row_group = width == 16 ? 4 : 3;
static int64_t rows_at_once(int64_t left) { return left <= 4 ? left : row_group; }
constexpr int tile_columns(int rows) { return rows == 4 && width < 16 ? 2 : 4; }
// An item larger than 1 / fine_items of the whole call is split by chunks.
constexpr int64_t fine_items = 128;
// Bounds shared scratch: 19 MB at head_dim 128. One sequence of 32 heads and 262144 keys fits; what does not is not
// split.
constexpr int64_t max_partials = 32768;

static int group_size(const AttentionArgs& a) { return a.num_heads / a.num_kv_heads; }
static int64_t block_queries(const AttentionArgs& a) { return larger(1, block_rows / group_size(a)); }
static int64_t max_rows(const AttentionArgs& a) { return block_queries(a) * group_size(a); }
static int64_t padded_dim(const AttentionArgs& a) { return round_up(a.head_dim, width); }
// A partial result: padded_dim sums, then the largest score, then the sum of weights.
static int64_t partial_stride(const AttentionArgs& a) { return round_up(a.head_dim, 16) + 16; }

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
    int64_t seq = -1;
    int64_t first_token = 0, num_queries = 0, context = 0;  // of sequence seq
    int64_t first_chunk = 0, num_chunks = 0, num_blocks = 0;
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
    void start(const AttentionArgs& a) {
        int64_t work = 0;
        for (int64_t s = 0; s < a.num_seqs; ++s) {
            load(a, s);
            work += num_queries * num_chunks * a.num_kv_heads;
        }
        *this = Cursor{};
        total_work = work;
    }
    bool next(const AttentionArgs& a) {
        if (seq + 1 >= a.num_seqs) return false;
        load(a, seq + 1);
        const int64_t partials = num_queries * a.num_heads * num_chunks;
        split = num_chunks > 1 && smaller(num_queries, block_queries(a)) * num_chunks * fine_items > total_work &&
                partial_end + partials <= max_partials;
        item_begin = item_end;
        item_end += num_blocks * a.num_kv_heads * (split ? num_chunks : 1);
        partial_begin = partial_end;
        if (split) partial_end += partials;
        return true;
    }
    float* partial(const AttentionArgs& a, int64_t query, int64_t head, int64_t chunk) const {
        const int64_t index = partial_begin + (query * a.num_heads + head) * num_chunks + (chunk - first_chunk);
        return (float*)a.shared_scratch + index * partial_stride(a);
    }
};

// The scratch of one thread. A row is (token of the block, head of the kv head's group), token-major.
struct Workspace {
    float* q;       // [rows, padded_dim] scaled by softmax_scale, zero-padded
    float* scores;  // [rows, chunk_keys] then weights, of this chunk
    float* sums;    // [rows, padded_dim] weighted values of this chunk
    float* totals;  // [rows, padded_dim] weighted values of all chunks so far
    float* staged;  // [tile_keys, padded_dim] a tile of keys or values in float32
    float *chunk_max, *chunk_weight, *total_max, *total_weight;  // [rows]
    Interval* keys;                                              // [rows] keys of this chunk that a row sees

    static size_t bytes(const AttentionArgs& a) {
        const int64_t rows = max_rows(a), dim = padded_dim(a);
        const int64_t floats = 3 * rows * dim + rows * chunk_keys + tile_keys * dim + 4 * round_up(rows, 16);
        return (size_t)floats * sizeof(float) + (size_t)rows * sizeof(Interval);
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
        q = p, p += rows * dim;
        sums = p, p += rows * dim;
        totals = p, p += rows * dim;
        keys = (Interval*)p;
    }
};

struct Block {
    const AttentionArgs& a;
    const Cursor& seq;
    const Workspace& w;
    int64_t first_query, num_tokens;  // queries [first_query, first_query + num_tokens) of the sequence
    int kv_head, group;
    int64_t dim;    // padded_dim
    int64_t chunk;  // keys [chunk * chunk_keys, ...)

    int64_t rows() const { return num_tokens * group; }
    int64_t position(int64_t row) const { return seq.context - seq.num_queries + first_query + row / group; }
    const Interval& keys(int64_t row) const { return w.keys[row]; }

    void start_chunk(int64_t index) {
        chunk = index;
        const int64_t first = chunk * chunk_keys;
        for (int64_t row = 0; row < rows(); ++row) {  // relative to the chunk; both ends grow with the row
            const Interval visible = visible_keys(a, position(row));
            w.keys[row] = {smaller(larger(visible.begin - first, 0), chunk_keys),
                           larger(smaller(visible.end - first, chunk_keys), 0)};
        }
    }
};

// A tile of keys or values: one pointer per key, into the cache or into a copy of it.
template <class E>
struct Tile {
    const E* const* rows;   // [tile_keys]
    const E* const* ahead;  // [tile_keys] the tile that comes next, or null

    // Asks for elements [begin, end) of the key after the next tile_keys. The pieces of a paged cache are too short for
    // the hardware prefetcher, and asking for a whole tile at once would fill the queue of misses and stop everything
    // behind it.
    void prefetch(int64_t key, int64_t begin, int64_t end) const {
        if (ahead)
            for (int64_t d = begin; d < end; d += 64 / (int64_t)sizeof(E)) __builtin_prefetch(ahead[key] + d);
    }
};

// ---- Scores ----

// Lane sums of four vectors: ((0+1)+(2+3)) + ((4+5)+(6+7)) for 8 lanes; 16 lanes add their halves first.
INFINILM_INLINE vec4 lane_sums(vec a, vec b, vec c, vec d) {
#if INFINILM_WIDTH == 4
    const vec4 ab = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
    const vec4 cd = __builtin_shufflevector(c, d, 0, 2, 4, 6) + __builtin_shufflevector(c, d, 1, 3, 5, 7);
    return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
#else
    auto half = [](vec v) __attribute__((always_inline)) {
#if INFINILM_WIDTH == 16
        return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
        return v;
#endif
    };
    auto pairs = [](vec8 x, vec8 y) __attribute__((always_inline)) {
        return __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14) +
               __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
    };
    const vec8 sums = pairs(pairs(half(a), half(b)), pairs(half(c), half(d)));
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
#endif
}

// scores[i * chunk_keys + j] = q[i] . keys[j] for ROWS rows and KEYS keys, 4 or 2.
template <class E, int ROWS, int KEYS>
INFINILM_INLINE void score_tile(const float* q, int64_t dim, const E* const* keys, float* scores) {
    typedef float vec4_mem __attribute__((vector_size(16), aligned(4), may_alias));
    vec sum[ROWS][KEYS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < KEYS; ++j) sum[i][j] = zero();
    const E* key[KEYS];
    for (int j = 0; j < KEYS; ++j) key[j] = keys[j];
    for (int64_t d = 0; d < dim; d += width) {
        vec x[ROWS];
        for (int i = 0; i < ROWS; ++i) x[i] = load(q + i * dim + d);
        for (int j = 0; j < KEYS; ++j) {
            const vec k = load(key[j] + d);
            for (int i = 0; i < ROWS; ++i) sum[i][j] = fma(x[i], k, sum[i][j]);
        }
    }
    if constexpr (KEYS == 4) {
        for (int i = 0; i < ROWS; ++i)
            *(vec4_mem*)(scores + i * chunk_keys) = lane_sums(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    } else {
        for (int i = 0; i < ROWS; i += 2) {
            const vec4 sums = lane_sums(sum[i][0], sum[i][1], sum[i + 1][0], sum[i + 1][1]);
            memcpy(scores + i * chunk_keys, &sums, 8);
            memcpy(scores + (i + 1) * chunk_keys, (const char*)&sums + 8, 8);
        }
    }
}

template <class E, int ROWS>
static void score_rows(const float* q, int64_t dim, Tile<E> keys, int64_t begin, int64_t end, float* scores) {
    constexpr int columns = tile_columns(ROWS);
    for (int64_t k = begin; k < end; k += columns) {
        for (int j = 0; j < columns; ++j) keys.prefetch(k + j, 0, dim);
        score_tile<E, ROWS, columns>(q, dim, keys.rows + k, scores + k);
    }
}

// ---- Weighted values ----

// sums[i][...] += weights[i * chunk_keys + k] * values[k][...] for k in [begin, end) in order; VECS vectors per row.
template <class E, int ROWS, int VECS>
INFINILM_INLINE void value_tile(const float* weights, Tile<E> values, int64_t offset, int64_t begin, int64_t end,
                                float* sums, int64_t dim) {
    vec sum[ROWS][VECS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) sum[i][j] = load(sums + i * dim + offset + j * width);
    for (int64_t k = begin; k < end; ++k) {
        const E* value = values.rows[k] + offset;
        values.prefetch(k, offset, offset + VECS * width);
        vec weight[ROWS];
        for (int i = 0; i < ROWS; ++i) weight[i] = set1(weights[i * chunk_keys + k]);
        for (int j = 0; j < VECS; ++j) {
            const vec v = load(value + j * width);
            for (int i = 0; i < ROWS; ++i) sum[i][j] = fma(weight[i], v, sum[i][j]);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) store(sums + i * dim + offset + j * width, sum[i][j]);
}

template <class E, int ROWS>
static void value_rows(const float* weights, Tile<E> values, int64_t begin, int64_t end, float* sums, int64_t dim) {
    if (begin >= end) return;
    int64_t d = 0;
    if constexpr (tile_columns(ROWS) == 4)
        for (; d + 4 * width <= dim; d += 4 * width) value_tile<E, ROWS, 4>(weights, values, d, begin, end, sums, dim);
    for (; d + 2 * width <= dim; d += 2 * width) value_tile<E, ROWS, 2>(weights, values, d, begin, end, sums, dim);
    if (d < dim) value_tile<E, ROWS, 1>(weights, values, d, begin, end, sums, dim);
}

// ---- Finding and staging tiles ----

template <class E>
static void stage_row(const E* in, float* out, int64_t n, int64_t dim) {
    int64_t d = 0;
    for (; d + width <= n; d += width) store(out + d, load(in + d));
    if (d < dim) store(out + d, load_partial(in + d, (int)(n - d)));
}

// Fills rows[tile_keys]. Entries outside `keys` point at a neighbour, so that four keys at a time may be read; what
// comes of those is discarded.
template <class E>
static void locate_tile(const Block& b, const void* cache, int64_t tile, Interval keys, const E** rows) {
    const AttentionArgs& a = b.a;
    const int32_t* table = a.block_table + b.seq.seq * a.block_table_stride;
    const int64_t first = b.chunk * chunk_keys + tile;
    for (int64_t k = keys.begin; k < keys.end;) {
        const int64_t block = (first + k) / a.block_size, offset = (first + k) % a.block_size;
        const int64_t at = (table[block] * (int64_t)a.num_kv_heads + b.kv_head) * a.block_size + offset;
        const E* row = (const E*)cache + at * a.head_dim;
        for (int64_t end = smaller(keys.end, k + a.block_size - offset); k < end; ++k, row += a.head_dim) rows[k] = row;
    }
    for (int64_t k = 0; k < keys.begin; ++k) rows[k] = rows[keys.begin];
    for (int64_t k = keys.end; k < tile_keys; ++k) rows[k] = rows[keys.end - 1];
}

// Calls f(Tile). Where more than one register tile of rows will read it, the tile is widened once into scratch, which
// also gives heads that are not whole vectors their zero padding.
template <class E, class F>
static void with_tile(const Block& b, Tile<E> tile, Interval keys, F f) {
    if (b.dim == b.a.head_dim && (sizeof(E) == sizeof(float) || b.rows() <= 4)) return f(tile);
    const float* staged[tile_keys];
    for (int64_t k = keys.begin & ~int64_t{3}; k < keys.end || (k & 3); ++k) {
        staged[k] = b.w.staged + k * b.dim;
        tile.prefetch(k, 0, b.a.head_dim);
        stage_row(tile.rows[k], b.w.staged + k * b.dim, b.a.head_dim, b.dim);
    }
    f(Tile<float>{staged, nullptr});
}

// ---- One chunk of keys for one block of rows ----

template <class E>
static void score_group(const Block& b, Tile<E> keys, int64_t tile, int64_t row, int64_t count) {
    const Interval first = b.keys(row), last = b.keys(row + count - 1);
    const int64_t begin = larger(first.begin - tile, 0) & ~int64_t{3}, end = smaller(last.end - tile, tile_keys);
    const float* q = b.w.q + row * b.dim;
    float* scores = b.w.scores + row * chunk_keys + tile;
    switch (count) {
        case 1: return score_rows<E, 1>(q, b.dim, keys, begin, end, scores);
        case 2: return score_rows<E, 2>(q, b.dim, keys, begin, end, scores);
        case 3: return score_rows<E, 3>(q, b.dim, keys, begin, end, scores);
        default: return score_rows<E, 4>(q, b.dim, keys, begin, end, scores);
    }
}

// Scores to weights: exp(score - largest), zero where the row does not see the key, over whole vectors of lanes.
static void softmax_row(const Block& b, int64_t row) {
    const Interval keys = b.keys(row);
    if (keys.begin >= keys.end) return;
    float* s = b.w.scores + row * chunk_keys;  // [chunk_keys]
    const int64_t begin = keys.begin / width * width, end = round_up(keys.end, width);
    for (int64_t k = begin; k < keys.begin; ++k) s[k] = -__builtin_inff();
    for (int64_t k = keys.end; k < end; ++k) s[k] = -__builtin_inff();
    vec largest = load(s + begin);
    for (int64_t k = begin + width; k < end; k += width) largest = max(largest, load(s + k));
    const float top = reduce_max(largest);
    vec sum = zero();
    for (int64_t k = begin; k < end; k += width) {
        const vec weight = exp(load(s + k) - set1(top));
        store(s + k, weight);
        sum = sum + weight;
    }
    b.w.chunk_max[row] = top;
    b.w.chunk_weight[row] = reduce_add(sum);
}

template <class E, int ROWS>
static void value_group(const Block& b, Tile<E> values, int64_t tile, int64_t row, int64_t tile_end) {
    auto clip = [&](Interval r) { return Interval{larger(r.begin - tile, 0), smaller(r.end - tile, tile_end)}; };
    const float* weights = b.w.scores + row * chunk_keys + tile;
    float* sums = b.w.sums + row * b.dim;
    auto alone = [&](int i, int64_t begin, int64_t end) {
        value_rows<E, 1>(weights + i * chunk_keys, values, begin, end, sums + i * b.dim, b.dim);
    };
    // All rows together over the keys that all see; the rest of each row's keys alone, still in order.
    const Interval all = {clip(b.keys(row + ROWS - 1)).begin, clip(b.keys(row)).end};
    const bool together = all.begin < all.end;
    for (int i = 0; i < ROWS; ++i) {
        const Interval keys = clip(b.keys(row + i));
        alone(i, keys.begin, together ? all.begin : keys.end);
    }
    if (!together) return;
    value_rows<E, ROWS>(weights, values, all.begin, all.end, sums, b.dim);
    for (int i = 0; i < ROWS; ++i) alone(i, all.end, clip(b.keys(row + i)).end);
}

template <class E>
static void value_group(const Block& b, Tile<E> values, int64_t tile, int64_t row, int64_t count, int64_t tile_end) {
    switch (count) {
        case 1: return value_group<E, 1>(b, values, tile, row, tile_end);
        case 2: return value_group<E, 2>(b, values, tile, row, tile_end);
        case 3: return value_group<E, 3>(b, values, tile, row, tile_end);
        default: return value_group<E, 4>(b, values, tile, row, tile_end);
    }
}

// Leaves sums, chunk_max and chunk_weight of every row that sees a key of the chunk.
template <class E>
static void attend_chunk(const Block& b) {
    const AttentionArgs& a = b.a;
    const Interval all = {b.keys(0).begin, b.keys(b.rows() - 1).end};
    const int64_t first = all.begin / tile_keys * tile_keys;
    auto tile_range = [&](int64_t tile) {
        return Interval{larger(all.begin - tile, 0), smaller(all.end - tile, tile_keys)};
    };
    // Calls f over all tiles and their register tiles of rows; at the end the first tile of next_cache is asked for.
    auto for_tiles = [&](const void* cache, const void* next_cache, auto f) {
        const E *rows[tile_keys], *ahead[tile_keys];
        locate_tile(b, cache, first, tile_range(first), rows);
        for (int64_t tile = first; tile < all.end; tile += tile_keys) {
            const bool last = tile + tile_keys >= all.end;
            const int64_t next = last ? first : tile + tile_keys;
            const void* from = last ? next_cache : cache;
            const Interval keys = tile_range(tile);
            if (from) locate_tile(b, from, next, tile_range(next), ahead);
            with_tile(b, Tile<E>{rows, from ? ahead : nullptr}, keys, [&](auto located) {
                for (int64_t row = 0, count; row < b.rows(); row += count) {
                    count = rows_at_once(b.rows() - row);
                    f(located, tile, row, count, keys.end);
                }
            });
            if (!last) memcpy(rows, ahead, sizeof rows);
        }
    };
    for_tiles(a.k_cache, a.v_cache, [&](auto rows, int64_t tile, int64_t row, int64_t count, int64_t) {
        score_group(b, rows, tile, row, count);
    });
    for (int64_t row = 0; row < b.rows(); ++row) softmax_row(b, row);
    memset(b.w.sums, 0, (size_t)(b.rows() * b.dim) * sizeof(float));
    for_tiles(a.v_cache, nullptr, [&](auto rows, int64_t tile, int64_t row, int64_t count, int64_t tile_end) {
        value_group(b, rows, tile, row, count, tile_end);
    });
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
    const vec factors = exp(differences);
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

static void write_row(const Running& row, float* out, int head_dim) {
    const vec scale = set1(1.0f / *row.weight);
    int d = 0;
    for (; d + width <= head_dim; d += width) store(out + d, load(row.sums + d) * scale);
    if (d < head_dim) store_partial(out + d, load(row.sums + d) * scale, head_dim - d);
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
            const int64_t head = (int64_t)b.kv_head * b.group + row % b.group;
            float* partial = b.seq.partial(b.a, b.first_query + row / b.group, head, b.chunk);
            copy_row(partial_row(partial, b.dim), part, b.dim);
        } else if (b.chunk == chunks.begin) {
            copy_row(total, part, b.dim);
        } else {
            merge(total, part, b.dim);
        }
    }
}

// ---- Items ----

static void load_queries(const Block& b) {
    const AttentionArgs& a = b.a;
    const vec scale = set1(a.softmax_scale);
    for (int64_t row = 0; row < b.rows(); ++row) {
        const int64_t token = b.seq.first_token + b.first_query + row / b.group;
        const float* q = a.q + token * a.q_stride + ((int64_t)b.kv_head * b.group + row % b.group) * a.head_dim;
        float* out = b.w.q + row * b.dim;
        int d = 0;
        for (; d + width <= a.head_dim; d += width) store(out + d, load(q + d) * scale);
        if (d < b.dim) store(out + d, load_partial(q + d, a.head_dim - d) * scale);
    }
}

template <class E>
static void run_item(const AttentionArgs& a, const Workspace& w, const Cursor& seq, int64_t item) {
    const int kv_head = (int)(item % a.num_kv_heads);
    const int64_t rest = item / a.num_kv_heads;
    // The last block sees the most keys: first, so that the shortest items come at the end.
    const int64_t block = seq.num_blocks - 1 - (seq.split ? rest / seq.num_chunks : rest);
    const int64_t first_query = block * block_queries(a);
    Block b{a,
            seq,
            w,
            first_query,
            smaller(block_queries(a), seq.num_queries - first_query),
            kv_head,
            group_size(a),
            padded_dim(a),
            0};
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
    for (int64_t row = 0; row < b.rows(); ++row) {
        const int64_t token = seq.first_token + first_query + row / b.group;
        const int64_t head = (int64_t)kv_head * b.group + row % b.group;
        write_row({w.total_max + row, w.total_weight + row, w.totals + row * b.dim},
                  a.out + token * a.out_stride + head * a.head_dim, a.head_dim);
    }
}

size_t attention_scratch_bytes(const AttentionArgs& args) { return Workspace::bytes(args); }

size_t attention_shared_scratch_bytes(const AttentionArgs& args) {
    Cursor seq;
    seq.start(args);
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
    seq.start(args);
    visit_element(args.cache_element, [&](auto element) {
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
    seq.start(args);
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
            write_row(total, args.out + (seq.first_token + query) * args.out_stride + head * args.head_dim,
                      args.head_dim);
        }
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
