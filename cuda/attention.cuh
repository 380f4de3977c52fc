// Paged attention: the arithmetic of one warp, 16 query rows against one chunk of keys, and how rows and keys are
// found. attention_decode.cu and attention_prefill.cu both consist of it, so that a row's bits are the same from
// either.
//
// The order of a row's sums: keys are cut into chunks of kChunk at positions 0, kChunk, .. of the sequence. In a chunk
// every score is one chain of mma over head_dim, the largest score m is taken, weights are exp2(score - m), their sum l
// has a fixed order, and every output o is one chain of mma over the chunk's keys, ascending. Chunks are merged in
// ascending order. What a row does not see has weight 0 and adds zeros: it changes nothing but the sign of a zero, and
// that the end removes, so it may be processed or skipped. Hence no result depends on the batch, on how a prompt is
// cut, on block_size or on the kernel. (A V row that is not finite makes NaN of the rows that share its tile and
// chunk.)
//
// Sources: online softmax in base 2 and P kept in registers: FlashAttention-2 (Dao 2023); partial results per chunk of
// keys: Flash-Decoding (Dao et al. 2023); query heads of a kv head as rows of one tile: GQA packing of both.
#pragma once

#include "../src/ops/attention_work.h"
#include "kernels.h"
#include "ptx.cuh"

namespace infinilm::cuda {

constexpr int kChunk = attention_chunk;         // keys
constexpr int kTileRows = attention_tile_rows;  // query rows of a warp

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

struct AttentionKernelArgs : AttentionArgs {
    int group;          // query heads of a kv head
    float scale;        // softmax_scale * log2(e)
    Divider per_block;  // by block_size
    AttentionWorkArgs work;
};

// attention_decode.cu, attention_prefill.cu
cudaError_t launch_attention_decode(const AttentionKernelArgs&, cudaStream_t);
cudaError_t launch_attention_prefill(const AttentionKernelArgs&, cudaStream_t);

constexpr int slot_stride(int dim) { return attention_row_floats(dim); }  // of a row of partial results

// Calls f(Dim<D>{}) with the kernel's width.
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
struct Rows {
    int first_token, count, first_position, window, group, first_head;
    __device__ __forceinline__ Rows(const AttentionKernelArgs& p, int seq, int kv_head)
        : first_token(p.cu_seqlens_q[seq]), window(p.sliding_window > 0 ? p.sliding_window : 1 << 30), group(p.group) {
        const int query_len = p.cu_seqlens_q[seq + 1] - first_token;
        count = query_len * group;
        first_position = p.context_lens[seq] - query_len;
        first_head = kv_head * group;
    }
    // Row r sees keys [begin(r), end(r)); both grow with r.
    __device__ __forceinline__ int end(int row) const { return first_position + row / group + 1; }
    __device__ __forceinline__ int begin(int row) const { return max(0, end(row) - window); }
    __device__ __forceinline__ int head(int row) const { return first_head + row % group; }
    // Of its head_dim elements in q or out, whose tokens are `stride` apart.
    __device__ __forceinline__ int64_t offset(int row, int64_t stride, int head_dim) const {
        const int token = row / group;
        return (first_token + token) * stride + static_cast<int64_t>(first_head + row - token * group) * head_dim;
    }
};

// Keys [begin, end) of a chunk, from its first one; what is visible to a warp or a block.
struct Span {
    int begin, end;
    __device__ __forceinline__ Span(int begin, int end, int chunk_begin)
        : begin(max(begin - chunk_begin, 0)), end(min(end - chunk_begin, kChunk)) {}
    __device__ __forceinline__ bool meets(int first, int count) const { return first < end && first + count > begin; }
};

// Where the keys and values lie in [num_blocks, num_kv_heads, block_size, head_dim].
struct KeyRows {
    const int* blocks;  // the sequence's row of block_table
    Divider per_block;
    int block_size, head_dim;
    int64_t block_stride, head_offset;
    __device__ __forceinline__ KeyRows(const AttentionKernelArgs& p, int seq, int kv_head)
        : blocks(p.block_table + seq * p.block_table_stride),
          per_block(p.per_block),
          block_size(p.block_size),
          head_dim(p.head_dim),
          block_stride(static_cast<int64_t>(p.num_kv_heads) * p.block_size * p.head_dim),
          head_offset(static_cast<int64_t>(kv_head) * p.block_size * p.head_dim) {}
    __device__ __forceinline__ int64_t offset(int key) const {
        const int block = per_block.quotient(key);
        return blocks[block] * block_stride + head_offset + static_cast<int64_t>(key - block * block_size) * head_dim;
    }
    // Offsets of a chunk's keys into `offsets` [kChunk] in shared memory, -1 for those outside `span`. By kThreads.
    template <int kThreads>
    __device__ __forceinline__ void locate(int64_t* offsets, int chunk_begin, Span span, unsigned thread) const {
#pragma unroll
        for (int key = static_cast<int>(thread); key < kChunk; key += kThreads)
            offsets[key] = key >= span.begin && key < span.end ? offset(chunk_begin + key) : -1;
    }
};

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

// Starts copying a tile of kRows keys, of which `offsets` are (KeyRows::locate), and kUnits units of columns from
// first_unit on; keys that are not there and columns from head_dim on become zeros and are not read.
template <int kThreads, int kRows, int kUnits, class T>
__device__ __forceinline__ void copy_tile(T* tile, const T* cache, const int64_t* offsets, int first_unit, int head_dim,
                                          int thread) {
    constexpr int kCount = kRows * kUnits;
    constexpr unsigned kSteps = ceil_div<unsigned>(kCount, kThreads);
#pragma unroll(kSteps > 8 ? 2 : 4)  // more copies at a time do not find registers
    for (unsigned step = 0; step < kSteps; ++step) {
        const unsigned i = step * kThreads + thread;  // unsigned: dividing is a shift
        const int row = i / kUnits, unit = i % kUnits;
        if (kCount % kThreads != 0 && i >= kCount) continue;
        const int column = (first_unit + unit) * 8;
        const int64_t offset = offsets[row];
        const bool valid = offset >= 0 && column < head_dim;
        cp_async_16(tile + place<kUnits>(row, unit), valid ? cache + offset + column : cache, valid);
    }
}

// Copies query rows row0 .. row0 + kRows - 1, zeros beyond the last row and from head_dim on. By the whole block.
template <int kRows, int kUnits, class T>
__device__ __forceinline__ void copy_queries(T* tile, const AttentionKernelArgs& p, const Rows& rows, int row0) {
    const T* q = static_cast<const T*>(p.q);
    for (int i = threadIdx.x; i < kRows * kUnits; i += blockDim.x) {
        const int r = i / kUnits, unit = i % kUnits, row = row0 + r;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < rows.count && unit * 8 < p.head_dim)
            v = load_readonly_16(q + rows.offset(row, p.q_stride, p.head_dim) + unit * 8);
        *reinterpret_cast<uint4*>(tile + place<kUnits>(r, unit)) = v;
    }
}

// ---- one warp, 16 rows, one chunk. Fragments as of mma_m16n8k16 (ptx.cuh): a lane has rows g and g + 8 -----------

// scores[kKeys / 8] += Q K^T. queries: the warp's 16 rows; keys: a tile of kKeys rows; both of kUnits units.
template <class T, int kUnits, int kKeys>
__device__ __forceinline__ void add_scores(float (*scores)[4], const T* queries, const T* keys) {
    const int lane = lane_id();
#pragma unroll
    for (int k = 0; k < kUnits / 2; ++k) {
        uint32_t q[4];
        ldmatrix_x4(q, queries + place<kUnits>(lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
            uint32_t b[4];
            ldmatrix_x4(b, keys + place<kUnits>(16 * i + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma_m16n8k16<T>(scores[2 * i], q, {b[0], b[1]});
            mma_m16n8k16<T>(scores[2 * i + 1], q, {b[2], b[3]});
        }
    }
}

// What a lane knows of its rows g and g + 8.
struct RowState {
    float m[2] = {-INFINITY, -INFINITY};  // the largest score, times `scale`
    float l[2] = {0, 0};                  // the sum of weights
};

// Scores that are still to be multiplied by softmax_scale, capped.
__device__ __forceinline__ void cap_scores(float (&scores)[kChunk / 8][4], const AttentionArgs& p) {
    const float cap = p.score_cap / p.softmax_scale;
#pragma unroll
    for (int j = 0; j < kChunk / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[j][i] = __fmul_rn(cap, tanhf(scores[j][i] / cap));
}

// Masks the scores of a chunk and makes them weights, as A fragments of 8 steps of 16 keys.
// A row sees keys [end - window, end), end counted from the chunk's first. kMaybeWhole: looks whether all see it whole.
template <class T, bool kMaybeWhole>
__device__ __forceinline__ RowState softmax(uint32_t (&weights)[kChunk / 16][4], float (&scores)[kChunk / 8][4],
                                            const int (&end)[2], int window, float scale) {
    const bool sees_all = min(end[0], end[1]) >= kChunk && max(end[0], end[1]) <= window;
    if (!kMaybeWhole || !__all_sync(0xffffffffu, sees_all)) {
#pragma unroll
        for (int j = 0; j < kChunk / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * j + 2 * static_cast<int>(lane_id() % 4) + i % 2;
                if (key < end[i / 2] - window || key >= end[i / 2]) scores[j][i] = -INFINITY;
            }
    }
    RowState row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float m = -INFINITY, l = 0.0f;
#pragma unroll
        for (int j = 0; j < kChunk / 8; ++j) m = fmaxf(m, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        row.m[h] = __fmul_rn(m, scale);
        const float shift = m == -INFINITY ? 0.0f : -row.m[h];  // a row that sees nothing: all weights 0, not NaN
#pragma unroll
        for (int j = 0; j < kChunk / 8; ++j) {
            const float low = exp2_approx(__fmaf_rn(scores[j][2 * h], scale, shift));
            const float high = exp2_approx(__fmaf_rn(scores[j][2 * h + 1], scale, shift));
            l = l + low + high;
            weights[j / 2][j % 2 * 2 + h] = pack2<T>(low, high);
        }
        l += __shfl_xor_sync(0xffffffffu, l, 1);
        row.l[h] = l + __shfl_xor_sync(0xffffffffu, l, 2);
    }
    return row;
}

// out[2 * kPairs] += weights V for kSteps steps of 16 keys and kPairs pairs of 8 columns, from the tile's key
// first_key and unit first_unit on.
template <class T, int kUnits, int kSteps, int kPairs>
__device__ __forceinline__ void add_values(float (*out)[4], const uint32_t (*weights)[4], const T* values,
                                           int first_key, int first_unit) {
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int c = 0; c < kPairs; ++c) {
            uint32_t b[4];
            ldmatrix_x4_trans(b,
                              values + place<kUnits>(first_key + 16 * i + lane % 16, first_unit + 2 * c + lane / 16));
            mma_m16n8k16<T>(out[2 * c], weights[i], {b[0], b[1]});
            mma_m16n8k16<T>(out[2 * c + 1], weights[i], {b[2], b[3]});
        }
}

// ---- merging chunks ----------------------------------------------------------------------------------------------

// Brings what is merged so far and a chunk to their common maximum, which m becomes.
struct Factors {
    float before, chunk;
    __device__ __forceinline__ Factors(float& m, float chunk_m) : before(1.0f), chunk(0.0f) {
        if (chunk_m == -INFINITY) return;  // the row sees nothing of the chunk
        const float largest = fmaxf(m, chunk_m);
        before = exp2_approx(m - largest);
        chunk = exp2_approx(chunk_m - largest);
        m = largest;
    }
    // Of sums and outputs alike.
    __device__ __forceinline__ float merge(float x, float chunk_x) const {
        return __fmaf_rn(x, before, __fmul_rn(chunk_x, chunk));
    }
};
// 1 / the sum of a row's weights, once all is merged; m is that of scores times log2(e). A sink far above the scores
// makes it 0.
__device__ __forceinline__ float inverse_weight(const AttentionArgs& p, int head, float m, float l) {
    if (p.sinks) l = __fadd_rn(l, exp2f(__fmaf_rn(p.sinks[head], 1.44269504f, -m)));
    return 1.0f / l;
}
// The output once all is merged. Adding 0 makes -0 a 0. A row without a number among its scores gets NaN.
__device__ __forceinline__ float finished(float o, float inverse_l) { return __fadd_rn(__fmul_rn(o, inverse_l), 0.0f); }

}  // namespace infinilm::cuda
