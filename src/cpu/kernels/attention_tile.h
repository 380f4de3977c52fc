// The register tiles of attention: a tile of keys, turned so that its lanes are keys; scores of a few rows with it;
// scores to weights; weighted values. A row is one query head of one token. attention.cpp says what is summed when.
#pragma once

#include "cpu/kernels/functions.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int chunk_keys = 256;                     // keys of one partial result; 256 x rows scores stay in L2
constexpr int tile_keys = 32;                       // keys read from the cache at a time
constexpr int staged_keys = width == 16 ? 64 : 32;  // keys side by side where they are staged: of a register tile
// Rows of a register tile over staged keys: with 4 vectors 12 accumulators of 16 registers, or 24 of 32. The last four
// rows are one tile everywhere (of 2 vectors where there are 16 registers).
constexpr int row_group = width == 16 ? 6 : 3;
constexpr int most_rows = width == 16 ? 6 : 4;
constexpr int64_t rows_at_once(int64_t left) { return left <= most_rows ? left : row_group; }
// The same straight from the cache, with 2 vectors. Each tile widens the keys and values, and turns the keys, for
// itself: that costs less than to stage them up to two tiles, which are the query heads of a kv head that most models
// have.
constexpr int most_cached_rows = width == 16 ? 8 : 4;
constexpr int64_t cached_rows_at_once(int64_t left) {
    const int64_t tiles = (left + most_cached_rows - 1) / most_cached_rows;
    return (left + tiles - 1) / tiles;
}
constexpr int tile_columns(int rows) { return rows > row_group ? 2 : 4; }

// Calls f<count>().
template <int MOST, class F>
INFINILM_INLINE void visit_rows(int64_t count, F f) {
    if (count == MOST) return f.template operator()<MOST>();
    if constexpr (MOST > 1) visit_rows<MOST - 1>(count, f);
}

// A tile of keys or values of one kv head in the cache.
template <class E>
struct Tile {
    const E* cache;     // of the kv head
    const int64_t* at;  // [tile_keys] where each key begins
    const E* row(int64_t key) const { return cache + at[key]; }
};

// What to ask memory for while a tile is computed with: a tile some way ahead, to L2, because the pieces of a paged
// cache are too short for the hardware prefetcher alone, and the next one, to L1. The second also makes up for what a
// processor drops of the first when too much is on its way.
template <class E>
struct Ahead {
    Tile<E> far, next;
    // `bytes` of a row and maybe of those behind it, a few at a time and in the order in which they lie: lines that are
    // skipped, or all asked for at once, come at half the speed (Zen 4).
    template <int64_t bytes>
    INFINILM_MEMBER void ask(int64_t row, int64_t offset) const {
#pragma GCC unroll 4
        for (int64_t line = 0; line < bytes; line += 64) {
            __builtin_prefetch((const char*)far.row(row) + offset + line, 0, 2);
            __builtin_prefetch((const char*)next.row(row) + offset + line, 0, 3);
        }
    }
};

// ---- What is multiplied ----

// Queries, keys, weights and values as float32, which those of a cache are widened to.
struct Floats {
    using Number = float;
    using Word = float;
    static constexpr int per_word = 1, softmax_keys = width;
    static constexpr bool always_stages = false;
};
INFINILM_INLINE vec broadcast(const float* x) { return set1(*x); }
INFINILM_INLINE vec add_product(vec sum, vec x, vec y) { return fma(x, y, sum); }

#if INFINILM_BF16_DOT
// As bf16, two neighbours in a word: of head_dim where they are added up to scores, of keys where they are weighted.
struct Pair {
    uint32_t bits;  // the first of the two below
};
struct Pairs {
    using Number = Bf16;
    using Word = Pair;
    static constexpr int per_word = 2, softmax_keys = 2 * width;
    static constexpr bool always_stages = true;
};
INFINILM_INLINE dvec broadcast(const Pair* x) {
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return (dvec)set1_uint(bits);
}
INFINILM_INLINE dvec load(const Pair* x) { return (dvec)load_uint(x); }
INFINILM_INLINE vec add_product(vec sum, dvec x, dvec y) { return dot(sum, x, y); }
#endif

template <class M>
constexpr int64_t words(int64_t numbers) {
    return (numbers + M::per_word - 1) / M::per_word;
}

// ---- Staging ----

// out[i][j] = the 32 bits i of the 16 bytes that key j begins with, of `width` keys that lie `stride` elements apart.
template <class E>
INFINILM_INLINE void load_transposed(const E* keys, int64_t stride, uvec out[4]) {
#if INFINILM_EMULATED
    for (int j = 0; j < width; ++j) {
        uint32_t words[4];
        memcpy(words, keys + j * stride, 16);
        for (int i = 0; i < 4; ++i) out[i][j] = words[i];
    }
#else
    typedef uint32_t uvec4_mem __attribute__((vector_size(16), aligned(1), may_alias));
    auto piece = [&](int key) __attribute__((always_inline)) { return *(const uvec4_mem*)(keys + key * stride); };
    uvec a[4];  // 128-bit lane l of a[i]: key 4 l + i
#if INFINILM_WIDTH == 16
    for (int i = 0; i < 4; ++i) {  // by halves: an insert from memory loads a whole vector where 32 bytes would do
        auto half = [&](int key) __attribute__((always_inline)) {
            return _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)piece(key)), (__m128i)piece(key + 4), 1);
        };
        a[i] = (uvec)_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(i)), half(8 + i), 1);
    }
    auto low = [](uvec x, uvec y) { return (uvec)_mm512_maskz_unpacklo_epi32(0xffff, (__m512i)x, (__m512i)y); };
    auto high = [](uvec x, uvec y) { return (uvec)_mm512_maskz_unpackhi_epi32(0xffff, (__m512i)x, (__m512i)y); };
    auto low_pair = [](uvec x, uvec y) { return (uvec)_mm512_maskz_unpacklo_epi64(0xff, (__m512i)x, (__m512i)y); };
    auto high_pair = [](uvec x, uvec y) { return (uvec)_mm512_maskz_unpackhi_epi64(0xff, (__m512i)x, (__m512i)y); };
#elif INFINILM_WIDTH == 8
    for (int i = 0; i < 4; ++i)
        a[i] = (uvec)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)piece(i)), (__m128i)piece(4 + i), 1);
    auto low = [](uvec x, uvec y) { return (uvec)_mm256_unpacklo_epi32((__m256i)x, (__m256i)y); };
    auto high = [](uvec x, uvec y) { return (uvec)_mm256_unpackhi_epi32((__m256i)x, (__m256i)y); };
    auto low_pair = [](uvec x, uvec y) { return (uvec)_mm256_unpacklo_epi64((__m256i)x, (__m256i)y); };
    auto high_pair = [](uvec x, uvec y) { return (uvec)_mm256_unpackhi_epi64((__m256i)x, (__m256i)y); };
#else
    for (int i = 0; i < 4; ++i) a[i] = piece(i);
    auto low = [](uvec x, uvec y) { return __builtin_shufflevector(x, y, 0, 4, 1, 5); };
    auto high = [](uvec x, uvec y) { return __builtin_shufflevector(x, y, 2, 6, 3, 7); };
    auto low_pair = [](uvec x, uvec y) { return __builtin_shufflevector(x, y, 0, 1, 4, 5); };
    auto high_pair = [](uvec x, uvec y) { return __builtin_shufflevector(x, y, 2, 3, 6, 7); };
#endif
    const uvec low01 = low(a[0], a[1]), high01 = high(a[0], a[1]), low23 = low(a[2], a[3]), high23 = high(a[2], a[3]);
    out[0] = low_pair(low01, low23);
    out[1] = high_pair(low01, low23);
    out[2] = low_pair(high01, high23);
    out[3] = high_pair(high01, high23);
#endif
}

// Element `part` of those in the 32 bits of each lane, widened.
INFINILM_INLINE vec element(float, uvec bits, int) { return as_float(bits); }
INFINILM_INLINE vec element(Bf16, uvec bits, int part) { return as_float(part ? bits & 0xffff0000u : bits << 16); }
INFINILM_INLINE vec element(F16, uvec bits, int part) {
    return widen_f16(__builtin_convertvector(part ? bits >> 16 : bits, hvec));
}

INFINILM_INLINE vec element(int8_t, uvec bits, int part) {
    return __builtin_convertvector((ivec)bits << (24 - 8 * part) >> 24, vec);
}

// Calls f(i, element i of `width` keys) for the elements of the 16 bytes that keys[width][stride] begin with.
template <class E, class F>
INFINILM_INLINE void for_piece(const E* keys, int64_t stride, F f) {
    constexpr int per_word = 4 / sizeof(E);
    uvec bits[4];
    load_transposed(keys, stride, bits);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int part = 0; part < per_word; ++part) f(i * per_word + part, element(E{}, bits[i], part));
}
template <class E>
constexpr int piece = 16 / sizeof(E);  // elements of 16 bytes

// Element 0 of keys[width][stride].
template <class E>
INFINILM_INLINE vec gather(const E* keys, int64_t stride) {
    vec lanes;
    for (int j = 0; j < width; ++j) lanes[j] = load_partial(keys + j * stride, 1)[0];
    return lanes;
}

// out[d * staged_keys + j] = element d of key j, widened, of keys[width][head_dim].
template <class E>
static void stage_keys(const E* keys, int64_t head_dim, float* out) {
    int64_t d = 0;
    for (; d + piece<E> <= head_dim; d += piece<E>)
        for_piece(keys + d, head_dim, [&](int i, vec k) { store(out + (d + i) * staged_keys, k); });
    for (; d < head_dim; ++d) store(out + d * staged_keys, gather(keys + d, head_dim));
}

// out[k * dim + d] = element d of value k, widened, zero from value_dim to dim, for k in [begin, end).
template <class E>
static void stage_values(Tile<E> values, int64_t begin, int64_t end, int64_t value_dim, float* out, int64_t dim) {
    for (int64_t k = begin; k < end; ++k) {
        const E* row = values.row(k);
        int64_t d = 0;
        for (; d + width <= value_dim; d += width) store(out + k * dim + d, load(row + d));
        if (d < dim) store(out + k * dim + d, load_partial(row + d, (int)(value_dim - d)));
    }
}

#if INFINILM_BF16_DOT
// The same of pairs: out[d * staged_keys + j] = the elements 2 d and 2 d + 1 of key j, zero from head_dim on.
[[maybe_unused]] static void stage_keys(const Bf16* keys, int64_t head_dim, Pair* out) {
    int64_t d = 0;
    for (; d + piece<Bf16> <= head_dim; d += piece<Bf16>) {
        uvec pairs[4];
        load_transposed(keys + d, head_dim, pairs);
        for (int i = 0; i < 4; ++i) store_uint(out + (d / 2 + i) * staged_keys, pairs[i]);
    }
    for (; d < head_dim; d += 2) {
        uvec pairs;
        for (int j = 0; j < width; ++j) {
            const Bf16* const first = keys + j * head_dim + d;
            pairs[j] = first[0].bits | (d + 1 < head_dim ? (uint32_t)first[1].bits << 16 : 0);
        }
        store_uint(out + d / 2 * staged_keys, pairs);
    }
}

// out[k / 2 * dim + d] = element d of the values k and k + 1, of even k; zero where a value is not in [begin, end), and
// from value_dim to dim.
[[maybe_unused]] static void stage_values(Tile<Bf16> values, int64_t begin, int64_t end, int64_t value_dim, Pair* out,
                                          int64_t dim) {
    for (int64_t k = begin / 2 * 2; k < end; k += 2)
        for (int64_t d = 0; d < dim; d += width) {
            const int count = (int)smaller(value_dim - d, width);
            const auto upper_half = [&](int64_t key) __attribute__((always_inline)) {
                if (key < begin || key >= end) return uvec{};
                const Bf16* const from = values.row(key) + d;
                return as_uint(count == width ? load(from) : load_partial(from, count));
            };
            store_uint(out + k / 2 * dim + d, upper_half(k + 1) | upper_half(k) >> 16);
        }
}
#endif

// ---- Scores ----

// scores[i * chunk_keys + j] = sum over d, ascending, of q[i * head_words + d] * keys[d * staged_keys + j]. Raises
// largest[i * width + ...], the largest of each lane, unless it is null.
template <int ROWS, int VECS, class Word>
INFINILM_INLINE void score_tile(const Word* q, const Word* keys, int64_t head_words, float* scores, float* largest) {
    vec sum[ROWS][VECS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) sum[i][j] = zero();
    for (int64_t d = 0; d < head_words; ++d) {
        decltype(broadcast(q)) x[ROWS];
        for (int i = 0; i < ROWS; ++i) x[i] = broadcast(q + i * head_words + d);
        for (int j = 0; j < VECS; ++j) {
            const auto k = load(keys + d * staged_keys + j * width);
            for (int i = 0; i < ROWS; ++i) sum[i][j] = add_product(sum[i][j], x[i], k);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) store(scores + i * chunk_keys + j * width, sum[i][j]);
    if (!largest) return;
    for (int i = 0; i < ROWS; ++i) {
        vec of_row = load(largest + i * width);
        for (int j = 0; j < VECS; ++j) of_row = max(of_row, sum[i][j]);
        store(largest + i * width, of_row);
    }
}

// Keys [begin, end) of the tile and what is beside them in a vector.
template <int ROWS, class Word>
static void score_rows(const Word* q, const Word* keys, int64_t head_words, int64_t begin, int64_t end, float* scores,
                       float* largest = nullptr) {
    constexpr int columns = tile_columns(ROWS);
    int64_t k = begin / width * width;
    for (; k + (columns - 1) * width < end; k += columns * width)
        score_tile<ROWS, columns>(q, keys + k, head_words, scores + k, largest);
    if constexpr (columns == 4)
        for (; k + width < end; k += 2 * width) score_tile<ROWS, 2>(q, keys + k, head_words, scores + k, largest);
    for (; k < end; k += width) score_tile<ROWS, 1>(q, keys + k, head_words, scores + k, largest);
}

// The same scores with two vectors of keys straight from the cache, [width][head_dim] each, for a register tile
// of rows; asks for as many bytes from the rows `key0` and `key1` of `ahead` on.
template <class E, int ROWS>
static void score_cached(const float* q, const E* keys0, const E* keys1, const Ahead<E>& ahead, int64_t key0,
                         int64_t key1, int64_t head_dim, float* scores0, float* scores1) {
    vec sum0[ROWS], sum1[ROWS];
    for (int i = 0; i < ROWS; ++i) sum0[i] = sum1[i] = zero();
    int64_t d = 0;
    for (; d + piece<E> <= head_dim; d += piece<E>) {
        uvec words0[4], words1[4];
        load_transposed(keys0 + d, head_dim, words0);
        load_transposed(keys1 + d, head_dim, words1);
#pragma GCC unroll 16
        for (int e = 0; e < piece<E>; ++e) {
            constexpr int per_word = 4 / sizeof(E);
            if (e % per_word == 0 && e / per_word < width / 4) {
                const int64_t offset = d * width * (int64_t)sizeof(E) + e / per_word * 64;
                ahead.template ask<64>(key0, offset);
                ahead.template ask<64>(key1, offset);
            }
            const vec k0 = element(E{}, words0[e / per_word], e % per_word);
            const vec k1 = element(E{}, words1[e / per_word], e % per_word);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {  // each q is loaded once for both: loads bind otherwise
                const vec x = set1(q[i * head_dim + d + e]);
                sum0[i] = fma(x, k0, sum0[i]);
                sum1[i] = fma(x, k1, sum1[i]);
            }
        }
    }
    for (; d < head_dim; ++d)
        for (int i = 0; i < ROWS; ++i) {
            const vec x = set1(q[i * head_dim + d]);
            sum0[i] = fma(x, gather(keys0 + d, head_dim), sum0[i]);
            sum1[i] = fma(x, gather(keys1 + d, head_dim), sum1[i]);
        }
    for (int i = 0; i < ROWS; ++i) store(scores0 + i * chunk_keys, sum0[i]), store(scores1 + i * chunk_keys, sum1[i]);
}

// ---- Weights ----

// 2^x for x <= 0, to about 1 ulp; 0 below -125, NaN for NaN. x = n + r, |r| <= 1/2, and n is added to the exponent.
INFINILM_INLINE vec exp2_nonpositive(vec x) {
    const vec shift = set1(0x1.8p23f);  // adding it rounds to an integer, which is left in the low bits
    const vec shifted = x + shift;
    const vec r = x - (shifted - shift);
    // Minimax on [-1/2, 1/2], with the first coefficient held at 1.
    vec p = set1(0x1.5bba14p-10f);
    p = fma(p, r, set1(0x1.3cea88p-7f));
    p = fma(p, r, set1(0x1.c6b752p-5f));
    p = fma(p, r, set1(0x1.ebf9bcp-3f));
    p = fma(p, r, set1(0x1.62e42ap-1f));
    p = fma(p, r, set1(1.0f));
    const vec scaled = as_float(as_uint(p) + (as_uint(shifted) << 23));
    return x < -125.0f ? zero() : scaled;
}

// Makes weights of `softmax_keys` of M scores, and adds them to the sums of the lanes.
INFINILM_INLINE vec weigh(const float* scores, vec largest, float* weights, vec sum) {
    const vec weight = exp2_nonpositive(load(scores) - largest);
    store(weights, weight);
    return sum + weight;
}
#if INFINILM_BF16_DOT
// 2^x for x <= 0, to some 3e-6 of it, which is enough of what is rounded to bf16; 0 below -126, NaN for NaN. The
// polynomial is of what x is above the next smaller integer, and 1 at 0.
INFINILM_INLINE vec exp2_roughly(vec x) {
#if INFINILM_EMULATED
    const vec shift = set1(0x1.8p23f);
    vec floor = x + shift - shift;
    floor = floor > x ? floor - 1.0f : floor;
    const vec f = x - floor;
#else
    const vec f = _mm512_maskz_reduce_ps(0xffff, x, 0x09);  // by rounding down
#endif
    vec p = set1(0x1.b7f736p-7f);
    p = fma(p, f, set1(0x1.abf866p-5f));
    p = fma(p, f, set1(0x1.ee2452p-3f));
    p = fma(p, f, set1(0x1.62d6c6p-1f));
    p = fma(p, f, set1(1.0f));
#if INFINILM_EMULATED
    const vec scaled = as_float(as_uint(p) + ((uvec) __builtin_convertvector(floor, ivec) << 23));
    return x < -126.0f ? zero() : x != x ? x : scaled;
#else
    return _mm512_maskz_scalef_ps(0xffff, p, x);
#endif
}
// The weights are added up as they were rounded.
INFINILM_INLINE vec weigh(const float* scores, vec largest, Bf16* weights, vec sum) {
    const dvec pairs = narrow_pairs(exp2_roughly(load(scores) - largest), exp2_roughly(load(scores + width) - largest));
    store_uint(weights, (uvec)pairs);
    return dot(sum, pairs, (dvec)set1_uint(0x3f803f80u));
}
#endif

// ---- Weighted values ----

// sums[i][...] += weights[i * chunk_keys + k] * values[k * dim + ...] for words k in [begin, end) in order; VECS
// vectors.
template <int ROWS, int VECS, class Word>
INFINILM_INLINE void value_tile(const Word* weights, const Word* values, int64_t begin, int64_t end, float* sums,
                                int64_t dim) {
    vec sum[ROWS][VECS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) sum[i][j] = load(sums + i * dim + j * width);
    for (int64_t k = begin; k < end; ++k) {
        decltype(broadcast(weights)) weight[ROWS];
        for (int i = 0; i < ROWS; ++i) weight[i] = broadcast(weights + i * chunk_keys + k);
        for (int j = 0; j < VECS; ++j) {
            const auto v = load(values + k * dim + j * width);
            for (int i = 0; i < ROWS; ++i) sum[i][j] = add_product(sum[i][j], weight[i], v);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) store(sums + i * dim + j * width, sum[i][j]);
}

template <int ROWS, class Word>
static void value_rows(const Word* weights, const Word* values, int64_t begin, int64_t end, float* sums, int64_t dim) {
    if (begin >= end) return;
    int64_t d = 0;
    if constexpr (tile_columns(ROWS) == 4)
        for (; d + 4 * width <= dim; d += 4 * width)
            value_tile<ROWS, 4>(weights, values + d, begin, end, sums + d, dim);
    for (; d + 2 * width <= dim; d += 2 * width) value_tile<ROWS, 2>(weights, values + d, begin, end, sums + d, dim);
    if (d < dim) value_tile<ROWS, 1>(weights, values + d, begin, end, sums + d, dim);
}

// One row over the keys [begin, end).
INFINILM_INLINE void value_row(const float* weights, const float* values, int64_t begin, int64_t end, float* sums,
                               int64_t dim) {
    value_rows<1>(weights, values, begin, end, sums, dim);
}
#if INFINILM_BF16_DOT
// The same of pairs, one of which may be seen by half.
[[maybe_unused]] static void value_row(const Pair* weights, const Pair* values, int64_t begin, int64_t end, float* sums,
                                       int64_t dim) {
    const auto add_half = [&](int64_t word, uint32_t mask) {
        for (int64_t d = 0; d < dim; d += width) {
            const dvec half = (dvec)(load_uint(values + word * dim + d) & mask);
            store(sums + d, dot(load(sums + d), broadcast(weights + word), half));
        }
    };
    if (begin >= end) return;
    if (begin % 2 == 1) add_half(begin / 2, 0xffff0000u);
    value_rows<1>(weights, values, (begin + 1) / 2, end / 2, sums, dim);
    if (end % 2 == 1 && end > begin) add_half(end / 2, 0x0000ffffu);
}
#endif

// How far into a tile memory has been asked for.
struct Place {
    int64_t row_bytes, row = 0, offset = 0;
};

// The same straight from the cache, for a register tile of rows and heads of whole vectors; asks for as many
// bytes of `ahead`.
template <class E, int ROWS, int VECS>
INFINILM_INLINE void value_tile_cached(const float* weights, Tile<E> values, Place& asked, const Ahead<E>& ahead,
                                       int64_t begin, int64_t end, float* sums, int64_t dim) {
    vec sum[ROWS][VECS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) sum[i][j] = load(sums + i * dim + j * width);
    for (int64_t k = begin; k < end; ++k) {
        const E* value = values.row(k);
        constexpr int64_t bytes = VECS * width * (int64_t)sizeof(E);
        ahead.template ask<bytes>(asked.row, asked.offset);
        asked.offset += bytes;
        if (asked.offset >= asked.row_bytes) asked.offset -= asked.row_bytes, ++asked.row;
        vec weight[ROWS];
        for (int i = 0; i < ROWS; ++i) weight[i] = set1(weights[i * chunk_keys + k]);
        for (int j = 0; j < VECS; ++j) {
            const vec v = load(value + j * width);
            for (int i = 0; i < ROWS; ++i) sum[i][j] = fma(weight[i], v, sum[i][j]);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) store(sums + i * dim + j * width, sum[i][j]);
}

template <class E, int ROWS>
static void value_rows_cached(const float* weights, Tile<E> values, const Ahead<E>& ahead, int64_t begin, int64_t end,
                              float* sums, int64_t dim) {
    int64_t d = 0;
    Place asked{dim * (int64_t)sizeof(E)};
    auto strip = [&]<int VECS>() __attribute__((always_inline)) {
        for (; d + VECS * width <= dim; d += VECS * width)
            value_tile_cached<E, ROWS, VECS>(weights, {values.cache + d, values.at}, asked, ahead, begin, end, sums + d,
                                             dim);
    };
    strip.template operator()<tile_columns(ROWS)>();
    strip.template operator()<1>();
}

}  // namespace infinilm::cpu::INFINILM_ISA
