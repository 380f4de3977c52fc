// Paged attention: the arithmetic of one warp, tiles of 16 query rows against one chunk of keys, and how rows and keys
// are found. attention_decode.cu and attention_prefill.cu both consist of it, so that a row's bits are the same from
// either.
//
// The order of a row's sums: keys are cut into chunks of kChunk at positions 0, kChunk, .. of the sequence, and chunks
// into pieces of kPiece. In a chunk every score is one chain of mma over head_dim. Weights are exp2(score - m), where
// the integer m is the largest score so far, rounded down; where a later piece of the chunk has a larger m, the weights
// before it are multiplied by a power of two, which is exact (but for weights that f16 has no normal number for). Every
// output o, and the sum l of the weights, is one chain of mma over the chunk's keys, ascending. Chunks are merged in
// ascending order, by powers of two as well. What a row does not see has weight 0 and adds zeros: it changes nothing
// but the sign of a zero, and that the end removes, so it may be processed or skipped. Hence no result depends on the
// batch, on how a prompt is cut, on block_size or on the kernel. (A V row that is not finite makes NaN of the rows that
// share its tile and chunk.)
//
// Sources: online softmax in base 2 and P kept in registers: FlashAttention-2 (Dao 2023); partial results per chunk of
// keys: Flash-Decoding (Dao et al. 2023); query heads of a kv head as rows of one tile: GQA packing of both.
#pragma once

#include "cuda/attention/cache_rows.cuh"
#include "cuda/attention/kernels.h"
#include "cuda/core/ptx.cuh"
#include "ops/attention_work.h"

namespace infinilm::cuda {

constexpr int kChunk = attention_chunk;         // keys
constexpr int kTileRows = attention_tile_rows;  // query rows of an mma
constexpr int kPiece = 32;                      // keys whose softmax is done at a time

// n / divisor of 0 <= n < 2^31 by one multiplication (Granlund and Montgomery, PLDI 1994).
struct Divider {
    uint32_t multiplier;
    int shift;
    explicit Divider(int divisor) : shift(31) {
        while (int64_t{1} << (shift - 31) < divisor) ++shift;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
    }
    __device__ __forceinline__ int quotient(int n) const {
        return static_cast<int>(static_cast<uint64_t>(n) * multiplier >> shift);
    }
};

// The first key that a row sees of those up to `end`, which is at least 1; negative: all of them. `end` grows by
// per_query from a query to the next: by 1, or where all see all keys by 0. It is `ahead` keys behind the row's own,
// where the sequence has so many.
struct FirstKey {
    static constexpr int kAll = 1 << 29;  // no sequence has as many keys
    Divider per_step;
    int step, behind, per_query, ahead;
    FirstKey(int window, bool chunked, bool two_way)
        : per_step(chunked ? window : 1), step(chunked ? window : 1), behind(1 << 30), per_query(1), ahead(0) {
        const bool slides = window > 0 && window < kAll && !chunked;
        if (chunked) behind = 0;
        if (slides) behind = window - 1;
        if (two_way && slides) ahead = window - 1, behind += ahead;
        if (two_way && !slides) per_query = 0;
    }
    template <class Args>
    __device__ __forceinline__ explicit FirstKey(const Args& p) : FirstKey(p.first_key) {}
    // Where a row sees all keys behind it, its end is as many keys further as the sequence has queries, but one.
    __device__ __forceinline__ void look_ahead(int keys) { ahead += keys, behind += keys; }
    __device__ __forceinline__ int operator()(int end) const { return per_step.quotient(end - 1) * step - behind; }
};

// The same of windows that slide. attention_sm90.cu takes these alone: with the quotient, ptxas finds too few registers
// for its wgmma.
struct SlidingFirstKey {
    static constexpr int per_query = 1, ahead = 0;
    int window;
    __device__ __forceinline__ explicit SlidingFirstKey(const AttentionArgs& p)
        : window(p.sliding_window > 0 ? p.sliding_window : 1 << 30) {}
    __device__ __forceinline__ void look_ahead(int) {}
    __device__ __forceinline__ int operator()(int end) const { return end - window; }
};

struct AttentionKernelArgs : AttentionArgs {
    int group;    // query heads of a kv head
    float scale;  // softmax_scale * log2(e)
    // The cap of scores before softmax_scale, 0: none; -2 cap; 2 log2(e) / cap. The host works these out, since threads
    // have no registers for it.
    float cap, minus_2_cap, cap_scale;
    float bias_scale;   // of position_bias, which is added to scores before softmax_scale
    Divider per_block;  // by block_size
    FirstKey first_key;
    AttentionWorkArgs work;
    static constexpr float kLog2E = 1.44269504088896340736f;
    AttentionKernelArgs(const AttentionArgs& a, const AttentionWorkArgs& work)
        : AttentionArgs(a),
          group(a.num_heads / a.num_kv_heads),
          scale(a.softmax_scale * kLog2E),
          cap(a.score_cap / a.softmax_scale),
          minus_2_cap(-2 * cap),
          cap_scale(2 * kLog2E / cap),
          bias_scale(1 / a.softmax_scale),
          per_block(a.block_size),
          first_key(a.sliding_window, a.chunked, a.two_way),
          work(work) {}
};

// Whether values are the ends of their keys in a cache of elements E; else they have rows of their own.
template <class E>
__device__ __forceinline__ bool values_end_keys(const AttentionKernelArgs& p) {
    const int before = p.head_dim - p.value_dim;
    return before > 0 && static_cast<const E*>(p.v_cache) == static_cast<const E*>(p.k_cache) + before;
}

// attention_decode.cu, attention_prefill.cu, attention_wide.cu
// store: what decode does of the step's heads before (attention_decode.cuh); without a qkv: nothing.
cudaError_t launch_attention_decode(const AttentionKernelArgs&, const QkNormRopeStoreArgs& store, cudaStream_t);
cudaError_t launch_attention_decode_8_bits(const AttentionKernelArgs&, const QkNormRopeStoreArgs& store, cudaStream_t);
cudaError_t launch_attention_prefill(const AttentionKernelArgs&, cudaStream_t);
cudaError_t launch_attention_wide(const AttentionKernelArgs&, cudaStream_t);

// attention.cu. What is decode's of a step's list.
cudaError_t launch_decode_items(const AttentionKernelArgs&, const QkNormRopeStoreArgs& store, cudaStream_t);
// Where the cache has 8 bits, widens what the sequences of prefill see of it and lets `args` read that.
cudaError_t widen_prefill_keys(AttentionKernelArgs& args, cudaStream_t);

// Calls f(Dim<D>{}) with the kernel's width, of all but the widest heads.
template <int D>
struct Dim {
    static constexpr int value = D;
};
template <class F>
cudaError_t visit_dim(int head_dim, F f) {
    switch (attention_kernel_dim(head_dim)) {
        case 32: return f(Dim<32>{});
        case 64: return f(Dim<64>{});
        case 80: return f(Dim<80>{});
        case 96: return f(Dim<96>{});
        case 128: return f(Dim<128>{});
        default: return f(Dim<256>{});
    }
}

// ---- rows and keys of a (sequence, kv head) ----------------------------------------------------------------------

// Row r is query token r / group, head kv_head * group + r % group. The queries are the last of the context.
template <class First>
struct RowsOf {
    // How many keys further its rows see, since they see all that are behind them: see FirstKey::look_ahead.
    static __device__ __forceinline__ int keys_ahead(const AttentionKernelArgs& p, int seq) {
        return p.two_way_seqs && p.two_way_seqs[seq] ? p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq] - 1 : 0;
    }
    int first_token, count, first_position, context, first_end, group, first_head;
    First first_key;
    __device__ __forceinline__ RowsOf(const AttentionKernelArgs& p, int seq, int kv_head)
        : RowsOf(p, p.cu_seqlens_q[seq], p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq], p.context_lens[seq],
                 keys_ahead(p, seq), kv_head) {}
    __device__ __forceinline__ RowsOf(const AttentionKernelArgs& p, int first_token, int query_len, int context,
                                      int ahead, int kv_head)
        : first_token(first_token), count(query_len * p.group), context(context), group(p.group), first_key(p) {
        first_position = context - query_len;
        first_key.look_ahead(ahead);
        first_end = first_key.per_query ? first_position + 1 + first_key.ahead : context;
        first_head = kv_head * group;
    }
    // Row r sees keys [begin(r), end(r)), as far as the sequence has them; neither shrinks as r grows.
    __device__ __forceinline__ int end(int row) const { return first_end + row / group * first_key.per_query; }
    __device__ __forceinline__ int begin(int row) const { return max(0, first_key(end(row))); }
    __device__ __forceinline__ int seen_end(int row) const { return min(end(row), context); }
    __device__ __forceinline__ int position(int row) const { return first_position + row / group; }
    __device__ __forceinline__ int head(int row) const { return first_head + row % group; }
    // The offset of a row's `head_dim` elements in q or out, whose tokens are `stride` apart.
    __device__ __forceinline__ int64_t offset(int row, int64_t stride, int head_dim) const {
        const int token = row / group;
        return (first_token + token) * stride + static_cast<int64_t>(first_head + row - token * group) * head_dim;
    }
};
using Rows = RowsOf<FirstKey>;

// Keys [begin, end) of a chunk, from its first one; what is visible to a warp or a block.
struct Span {
    int begin, end;
    __device__ __forceinline__ Span(int begin, int end, int chunk_begin)
        : begin(max(begin - chunk_begin, 0)), end(min(end - chunk_begin, kChunk)) {}
    __device__ __forceinline__ bool meets(int first, int count) const { return first < end && first + count > begin; }
};

// Where the keys and values lie in [num_blocks, num_kv_heads, block_size, head_dim]: the row of head_dim elements, of
// which a cache has fewer than 2^31.
struct KeyRows {
    const int* blocks;  // the sequence's row of block_table
    Divider per_block;
    int block_size, num_kv_heads, kv_head;
    __device__ __forceinline__ KeyRows(const AttentionKernelArgs& p, int seq, int kv_head)
        : blocks(p.block_table + seq * p.block_table_stride),
          per_block(p.per_block),
          block_size(p.block_size),
          num_kv_heads(p.num_kv_heads),
          kv_head(kv_head) {}
    __device__ __forceinline__ int row(int key) const {
        const int block = per_block.quotient(key);
        return row_of(key, block, blocks[block]);
    }
    // number: of the sequence's block `block`, in which the key lies.
    __device__ __forceinline__ int row_of(int key, int block, int number) const {
        return (number * num_kv_heads + kv_head) * block_size + key - block * block_size;
    }
};
// Rows of a chunk's keys, as keys.row() finds them, into `rows` [kChunk] in shared memory, -1 for those outside `span`.
// By kThreads.
template <int kThreads, class Keys>
__device__ __forceinline__ void locate_keys(const Keys& keys, int* rows, int chunk_begin, Span span, unsigned thread) {
#pragma unroll
    for (int i = 0; i < ceil_div(kChunk, kThreads); ++i) {
        const int key = i * kThreads + static_cast<int>(thread);
        if (kChunk % kThreads != 0 && key >= kChunk) break;
        rows[key] = key >= span.begin && key < span.end ? keys.row(chunk_begin + key) : -1;
    }
}

// ---- shared memory -----------------------------------------------------------------------------------------------

// A tile has rows of kUnits pieces of 16 bytes, placed so that the eight rows of an ldmatrix lie in all banks: by XOR
// where rows are a multiple of 128 bytes, else by an odd number of pieces. place(): in elements of 2 bytes.
template <int kUnits>
__host__ __device__ constexpr int tile_elements(int rows) {
    return rows * (kUnits % 8 == 0 ? kUnits : kUnits | 1) * 8;
}
template <int kUnits>
__device__ __forceinline__ int place(int row, int unit) {
    return kUnits % 8 == 0 ? (row * kUnits + (unit ^ (row & 7))) * 8 : (row * (kUnits | 1) + unit) * 8;
}

// The address that a lane gives to an ldmatrix of 16 rows and 2 units, wherever in a tile of kUnits these begin: what
// depends on the lane is computed once, where this stands, the rest is a constant of the instruction.
template <int kUnits>
struct LanePlace {
    int row, unit;
    __device__ __forceinline__ LanePlace(int row, int unit)  // from the first of the 16 rows and of the 2 units
        : row(opaque(tile_elements<kUnits>(1) * row)), unit(opaque(kUnits % 8 == 0 ? unit ^ (row & 7) : unit)) {}
    // place() of row 16 * rows + row and unit 2 * units + unit.
    __device__ __forceinline__ int at(int rows, int units) const {
        const int column = kUnits % 8 == 0 ? ((2 * units % 8) ^ unit) + 2 * units / 8 * 8 : 2 * units + unit;
        return row + column * 8 + rows * tile_elements<kUnits>(16);
    }
};

// Starts copying a tile of kRows keys, of which `rows` are (KeyRows::locate), and kUnits units of columns from
// first_unit on; keys that are not there and columns from `width` on become zeros and are not read. Rows of the cache
// are head_dim elements apart. Elements of 8 bits lie in the order of the copies, for widen_tile().
template <int kThreads, int kRows, int kUnits, class E>
__device__ __forceinline__ void copy_tile(E* tile, const E* cache, const int* rows, int first_unit, int head_dim,
                                          int width) {
    const int thread = opaque(threadIdx.x % kThreads);
    constexpr int kCount = kRows * kUnits;
    constexpr unsigned kSteps = ceil_div<unsigned>(kCount, kThreads);
#pragma unroll(kSteps > 8 ? 1 : 4)  // more copies at a time do not find registers
    for (unsigned step = 0; step < kSteps; ++step) {
        const unsigned i = step * kThreads + thread;  // unsigned: dividing is a shift
        const int at = i / kUnits, unit = i % kUnits;
        if (kCount % kThreads != 0 && i >= kCount) continue;
        const int column = (first_unit + unit) * 8, row = rows[at];
        const bool valid = row >= 0 && column < width;
        const E* from = cache + (valid ? static_cast<int64_t>(row) * head_dim + column : 0);
        if constexpr (sizeof(E) == 1)
            cp_async_8(tile + 8 * i, from, valid);
        else
            cp_async_16(tile + place<kUnits>(at, unit), from, valid);
    }
}
// Makes such a tile of what copy_tile() brought of a cache in 8 bits. A thread widens what it copied, so that it needs
// to wait for its own copies alone. scale_of(row of the tile), asked by all threads.
template <int kThreads, int kRows, int kUnits, class T, class ScaleOf>
__device__ __forceinline__ void widen_tile(T* tile, const uint8_t* numbers, bool is_fp8, const ScaleOf& scale_of) {
    const unsigned thread = opaque(threadIdx.x % kThreads);
    constexpr unsigned kCount = kRows * kUnits;
    static_assert(kCount % kThreads == 0, "all threads take part in each step");
#pragma unroll 2
    for (unsigned i = thread; i < kCount; i += kThreads) {
        float x[8];
        widen8(*reinterpret_cast<const uint2*>(numbers + 8 * i), scale_of(i / kUnits), is_fp8, x);
        *reinterpret_cast<uint4*>(tile + place<kUnits>(i / kUnits, i % kUnits)) = pack8<T>(x);
    }
}

// Copies kUnits units of columns from first_unit on of query rows row0 .. row0 + kRows - 1, zeros beyond the last row
// and from head_dim on. By the whole block.
template <int kRows, int kUnits, class T>
__device__ __forceinline__ void copy_queries(T* tile, const AttentionKernelArgs& p, const Rows& rows, int row0,
                                             int first_unit = 0) {
    const T* q = static_cast<const T*>(p.q);
    for (int i = threadIdx.x; i < kRows * kUnits; i += blockDim.x) {
        const int r = i / kUnits, unit = i % kUnits, row = row0 + r, column = (first_unit + unit) * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < rows.count && column < p.head_dim)
            v = load_readonly_16(q + rows.offset(row, p.q_stride, p.head_dim) + column);
        *reinterpret_cast<uint4*>(tile + place<kUnits>(r, unit)) = v;
    }
}

// ---- one warp, kTiles tiles of 16 rows. Fragments as of mma_m16n8k16 (ptx.cuh): a lane has rows g and g + 8 -------
// What is read of keys and values serves all tiles.

// scores[kTiles][first / 8 ..] += Q K^T for kKeys keys, which lie in rows first_row .. of `keys`. queries: the warp's
// rows. Both are tiles of kUnits units.
template <class T, int kUnits, int kKeys, int kTiles, int kScores>
__device__ __forceinline__ void add_scores(float (&scores)[kTiles][kScores][4], int first, const T* queries,
                                           const T* keys, int first_row) {
    const int lane = lane_id();
    const LanePlace<kUnits> query(lane % 16, lane / 16), key(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < kUnits / 2; ++k) {
        uint32_t q[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) ldmatrix_x4(q[t], queries + query.at(t, k));
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
            uint32_t b[4];
            ldmatrix_x4(b, keys + key.at(first_row / 16 + i, k));
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                mma_m16n8k16<T>(scores[t][first / 8 + 2 * i], q[t], {b[0], b[1]});
                mma_m16n8k16<T>(scores[t][first / 8 + 2 * i + 1], q[t], {b[2], b[3]});
            }
        }
    }
}

// 2^x of an integer x <= 0, or of -inf; 0 where float32 has no normal number for it, and for NaN. Exact: adding
// 1.5 * 2^23 leaves the exponent in the low bits.
__device__ __forceinline__ float power_of_two(float x) {
    return __uint_as_float(__float_as_uint(__fadd_rn(fmaxf(x, -127.0f), 12582912.0f + 127.0f)) << 23);
}

// Brings what is merged so far and a chunk to their common maximum, which m becomes.
struct Factors {
    float before = 1.0f, chunk = 0.0f;
    Factors() = default;
    __device__ __forceinline__ Factors(float& m, float chunk_m) {
        if (chunk_m == -INFINITY) return;  // the row sees nothing of the chunk
        const float largest = fmaxf(m, chunk_m);
        before = power_of_two(m - largest);
        chunk = power_of_two(chunk_m - largest);
        m = largest;
    }
    // For sums and outputs alike.
    __device__ __forceinline__ float merge(float x, float chunk_x) const {
        return __fmaf_rn(chunk_x, chunk, __fmul_rn(x, before));
    }
};

// What is known of a row: of a chunk, or merged so far.
struct RowState {
    float m = -INFINITY;  // the largest score, times `scale`, rounded down
    float l = 0.0f;       // the sum of weights
    // Takes in the next chunk, and returns what does the same to the outputs.
    __device__ __forceinline__ Factors merge(const RowState& chunk) {
        const Factors factors(m, chunk.m);
        l = factors.merge(l, chunk.l);
        return factors;
    }
};

// cap * tanh(x / cap) of the scores of a piece, which are still to be multiplied by softmax_scale; to about cap *
// 2^-22, and it is an error of the exponent that counts.
__device__ __forceinline__ void cap_scores(float (*scores)[4], const AttentionKernelArgs& p) {
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            scores[j][i] = __fmaf_rn(p.minus_2_cap,
                                     __fdividef(1.0f, __fadd_rn(1.0f, exp2_approx(scores[j][i] * p.cap_scale))), p.cap);
}

// Adds what the heads' tables say of the distances from rows g and g + 8 of a tile, whose first is row0, to the keys of
// a piece, whose first is `begin`. Scores are still to be multiplied by softmax_scale.
__device__ __forceinline__ void add_position_bias(float (*scores)[4], const AttentionKernelArgs& p, const Rows& rows,
                                                  int row0, int begin) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = min(row0 + static_cast<int>(lane_id()) / 4 + 8 * h, rows.count - 1);
        const float* of_key = p.position_bias + rows.head(row) * p.position_bias_stride - rows.position(row);
#pragma unroll
        for (int j = 0; j < kPiece / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = begin + 8 * j + 2 * static_cast<int>(lane_id() % 4) + i;
                float& score = scores[j][2 * h + i];
                score = __fmaf_rn(of_key[min(key, rows.context - 1)], p.bias_scale, score);
            }
    }
}

constexpr int kNoLimit = 0x7fffffff;
// -inf where a row does not see a key of a piece, whose first is `begin`: it sees [first_key(end) - ahead, end), and
// none sees the keys from `limit` on. ahead: RowsOf::keys_ahead of the sequence.
template <class First>
__device__ __forceinline__ void mask_scores(float (*scores)[4], const int (&end)[2], int limit, int begin, int ahead,
                                            const First& first_key) {
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = 8 * j + 2 * static_cast<int>(lane_id() % 4) + i % 2;
            if (key < first_key(end[i / 2]) - ahead - begin || key >= min(end[i / 2], limit) - begin)
                scores[j][i] = -INFINITY;
        }
}

// The largest score of a piece in row g + 8 h, times `scale`, rounded down.
__device__ __forceinline__ float largest_score(const float (*scores)[4], int h, float scale) {
    float m = -INFINITY;
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j) m = fmaxf(m, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    return floorf(__fmul_rn(m, scale));
}
// Weights of a piece's scores in row g + 8 h, as A fragments of steps of 16 keys.
template <class T>
__device__ __forceinline__ void make_weights(uint32_t (*weights)[4], const float (*scores)[4], int h, float scale,
                                             float m) {
    const float shift = m == -INFINITY ? 0.0f : -m;  // a row that sees nothing: all weights 0, not NaN
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j) {
        const float low = exp2_approx(__fmaf_rn(scores[j][2 * h], scale, shift));
        const float high = exp2_approx(__fmaf_rn(scores[j][2 * h + 1], scale, shift));
        weights[j / 2][j % 2 * 2 + h] = pack2<T>(low, high);
    }
}
// Brings weights of so many pieces from one m of row g + 8 h to a larger one.
template <class T>
__device__ __forceinline__ void lower_weights(uint32_t (*weights)[4], int pieces, int h, float before, float m) {
    const float factor = power_of_two(before - m);
    const uint32_t factors = pack2<T>(factor, factor);
#pragma unroll
    for (int j = 0; j < pieces * kPiece / 8; ++j)
        weights[j / 2][j % 2 * 2 + h] = fma2<T>(weights[j / 2][j % 2 * 2 + h], factors, 0x80008000u);
}
// Makes weights of the scores of a chunk's piece, and brings those of the pieces before it to the same m.
template <class T>
__device__ __forceinline__ void add_weights(uint32_t (&weights)[kChunk / 16][4], RowState (&rows)[2], int piece,
                                            const float (*scores)[4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float before = rows[h].m, m = rows[h].m = fmaxf(before, largest_score(scores, h, scale));
        make_weights<T>(weights + piece * kPiece / 16, scores, h, scale, m);
        if (piece > 0) lower_weights<T>(weights, piece, h, before, m);
    }
}
// Adds the weights of a piece that no row sees: as add_weights() would have it.
__device__ __forceinline__ void add_no_weights(uint32_t (&weights)[kChunk / 16][4], int piece) {
#pragma unroll
    for (int j = 0; j < kPiece / 16; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[piece * kPiece / 16 + j][i] = 0;
}
// The sums of a chunk's weights: their products with a column of ones.
template <class T>
__device__ __forceinline__ void sum_weights(RowState (&rows)[2], const uint32_t (&weights)[kChunk / 16][4]) {
    const uint32_t ones = pack2<T>(1.0f, 1.0f);
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) mma_m16n8k16<T>(sums, weights[i], {ones, ones});
    rows[0].l = sums[0], rows[1].l = sums[2];
}

// ---- a chunk whose kPieces pieces several warps have, who tell each other of them by shared memory ----------------

constexpr int kPieces = kChunk / kPiece;

// What a lane has to tell of its piece: `maxima` is [kPieces][kRows], from the tile's first row on.
template <int kRows>
__device__ __forceinline__ void tell_maxima(float* maxima, int piece, const float (*scores)[4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float m = largest_score(scores, h, scale);
        if (lane_id() % 4 == 0) maxima[piece * kRows + lane_id() / 4 + 8 * h] = m;
    }
}
// Once all have: makes the weights of the piece's scores, with the bits that one warp has of all pieces in a row
// (add_weights), and puts them where all find them: `shared` is [kChunk / 16][32 lanes] fragments of the tile.
template <class T, int kRows>
__device__ __forceinline__ void tell_weights(uint4* shared, RowState (&rows)[2], const float* maxima, int piece,
                                             const float (*scores)[4], float scale) {
    const int lane = lane_id();
    uint32_t weights[kPiece / 16][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float m = -INFINITY;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const float before = m;
            m = fmaxf(m, maxima[i * kRows + lane / 4 + 8 * h]);
            if (i == piece) make_weights<T>(weights, scores, h, scale, m);
            if (i > piece) lower_weights<T>(weights, 1, h, before, m);
        }
        rows[h].m = m;
    }
#pragma unroll
    for (int step = 0; step < kPiece / 16; ++step)
        shared[(piece * (kPiece / 16) + step) * 32 + lane] =
            make_uint4(weights[step][0], weights[step][1], weights[step][2], weights[step][3]);
}
__device__ __forceinline__ void read_weights(uint32_t (&weights)[kChunk / 16][4], const uint4* shared) {
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
        const uint4 w = shared[step * 32 + lane_id()];
        weights[step][0] = w.x, weights[step][1] = w.y, weights[step][2] = w.z, weights[step][3] = w.w;
    }
}

// out += weights V for kSteps steps of 16 keys from first_step on, and two times 8 columns of a tile of kUnits units.
// values: what the lane gives to the first ldmatrix, of row lane % 16 and unit lane / 16 of these.
template <class T, int kUnits, int kSteps, int kTiles>
__device__ __forceinline__ void add_pair(float (*out)[kTiles][4], const uint32_t (&weights)[kTiles][kChunk / 16][4],
                                         int first_step, const T* values) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, values + i * tile_elements<kUnits>(16));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            mma_m16n8k16<T>(out[0][t], weights[t][first_step + i], {b[0], b[1]});
            mma_m16n8k16<T>(out[1][t], weights[t][first_step + i], {b[2], b[3]});
        }
    }
}
// out[kTiles][2 * kPairs] += weights V for steps first_step .. of 16 keys, kSteps of them, and kPairs pairs of 8
// columns. values: a tile whose rows are the keys of step first_row / 16 on; the columns begin at its unit first_unit.
template <class T, int kUnits, int kSteps, int kPairs, int kTiles>
__device__ __forceinline__ void add_values(float (*out)[kTiles][4], const uint32_t (&weights)[kTiles][kChunk / 16][4],
                                           int first_step, const T* values, int first_row, int first_unit) {
    const int lane = lane_id();
    const LanePlace<kUnits> value(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int c = 0; c < kPairs; ++c) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, values + value.at(first_row / 16 + i, first_unit / 2 + c));
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                mma_m16n8k16<T>(out[2 * c][t], weights[t][first_step + i], {b[0], b[1]});
                mma_m16n8k16<T>(out[2 * c + 1][t], weights[t][first_step + i], {b[2], b[3]});
            }
        }
}

// ---- merging chunks ----------------------------------------------------------------------------------------------

// A lane's rows are rows g and g + 8 of each tile, g = lane / 4; its three neighbours have the same. What there is of
// each row, one lane of the four keeps.
template <int kTiles>
struct RowKeeper {
    static constexpr int kRows = 2 * kTiles;
    RowState merged;

    static __device__ __forceinline__ int row() {
        const int lane = lane_id(), mine = lane % 4 % kRows;
        return mine / 2 * kTileRows + lane / 4 + mine % 2 * 8;
    }
    static __device__ __forceinline__ float keep(const float (&of_rows)[kRows]) {
        const int mine = opaque(lane_id()) % 4 % kRows;
        float value = of_rows[0];
#pragma unroll
        for (int i = 1; i < kRows; ++i) value = mine == i ? of_rows[i] : value;
        return value;
    }
    template <class V>
    static __device__ __forceinline__ V give(V value, int tile, int half) {
        return __shfl_sync(0xffffffffu, value, 2 * tile + half, 4);
    }
    // A chunk's weights, whose largest scores are known: sums them, and returns the factors by which outputs of the
    // lane's row join those that were merged before.
    template <class T>
    __device__ __forceinline__ Factors merge(RowState (&chunk)[kTiles][2],
                                             const uint32_t (&weights)[kTiles][kChunk / 16][4]) {
        float chunk_m[kRows], chunk_l[kRows];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            sum_weights<T>(chunk[t], weights[t]);
#pragma unroll
            for (int h = 0; h < 2; ++h) chunk_m[2 * t + h] = chunk[t][h].m, chunk_l[2 * t + h] = chunk[t][h].l;
        }
        return merged.merge({keep(chunk_m), keep(chunk_l)});
    }
    // Gives the factors of all rows.
    static __device__ __forceinline__ void give_all(Factors (&factors)[kTiles][2], const Factors& mine) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                factors[t][h].before = give(mine.before, t, h);
                factors[t][h].chunk = give(mine.chunk, t, h);
            }
    }
};

// Merges columns of a chunk's output, kCount of 8, into total[kTiles][first ..].
template <int kCount, int kTiles, int kColumns>
__device__ __forceinline__ void merge_outputs(float (&total)[kTiles][kColumns][4], int first,
                                              const float (&out)[kCount][kTiles][4],
                                              const Factors (&factors)[kTiles][2]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                total[t][first + j][i] = factors[t][i / 2].merge(total[t][first + j][i], out[j][t][i]);
}

// Makes kPairs pairs of 8 columns of a chunk's output and merges them into total[kTiles][first ..]. `tile`: values, all
// keys, of which the columns begin at first_unit.
template <class T, int kUnits, int kPairs, int kTiles, int kColumns>
__device__ __forceinline__ void merge_values(float (&total)[kTiles][kColumns][4], int first,
                                             const uint32_t (&weights)[kTiles][kChunk / 16][4], const T* tile,
                                             int first_unit, Span visible, const Factors (&factors)[kTiles][2]) {
    constexpr int kSteps = kChunk / 32;
    float out[2 * kPairs][kTiles][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (visible.meets(half * kChunk / 2, kChunk / 2))
            add_values<T, kUnits, kSteps, kPairs>(out, weights, half * kSteps, tile, half * kChunk / 2, first_unit);
    merge_outputs<2 * kPairs>(total, first, out, factors);
}

// 1 / the sum of a row's weights, once all is merged. m is that of scores times log2(e), which a sink is not. A sink
// far above the scores makes it 0.
__device__ __forceinline__ float inverse_weight(const AttentionArgs& p, int head, RowState row) {
    if (p.sinks) row.l = __fadd_rn(row.l, exp2f(__fmaf_rn(p.sinks[head], 1.44269504f, -row.m)));
    return 1.0f / row.l;
}
// The output once all is merged. Adding 0 makes -0 a 0. A row without a number among its scores gets NaN.
__device__ __forceinline__ float finished(float o, float inverse_l) { return __fadd_rn(__fmul_rn(o, inverse_l), 0.0f); }

}  // namespace infinilm::cuda
