// Attention of the sequences with many rows: prompts, whole or in part. A block takes 64 rows of a (sequence, kv head),
// 16 to a warp, and goes through the chunks that any of them sees; the warps share keys and values.
// Grid (num_kv_heads, tiles), 128 threads; the tiles are those of the list of work, which has the ones with most keys
// first. A chunk comes in four pieces through a ring of cp.async stages: keys 0 .. 63, keys 64 .. 127, the left
// columns of all values, the right ones. So a whole chunk of scores is in registers, its softmax needs no rescaling,
// and outputs are made and merged a few columns at a time. Idea: FlashAttention-2 (Dao 2023).
// Floor: 4 * head_dim operations for each (row, visible key) at the rate of mma.sync. Bytes: q and out once; keys and
// values from L2 once for every 64 rows, 64 operations a byte. A warp reads the tiles with ldmatrix for its 16 rows
// alone: 16 bytes of shared memory for 128 multiply-adds, which takes an SM of sm_80 as long as these.
#include "attention.cuh"
#include "launch.cuh"

namespace infinilm::cuda {

constexpr int kBlockRows = attention_prefill_rows, kPrefillWarps = kBlockRows / kTileRows,
              kPrefillThreads = 32 * kPrefillWarps;

template <int D>
struct PrefillShape {
    static constexpr int kUnits = D / 8, kPieceKeys = kChunk / 2;
    static constexpr int kLeftUnits = (D / 16 + 1) / 2 * 2;  // of values; whole pairs of 8 columns
    static constexpr int kKeyTile = tile_elements<kUnits>(kPieceKeys), kValueTile = tile_elements<kLeftUnits>(kChunk);
    static constexpr int kStage = kKeyTile > kValueTile ? kKeyTile : kValueTile, kStages = D <= 128 ? 3 : 2;
    static constexpr int kQueries = tile_elements<kUnits>(kTileRows);  // of a warp
    static constexpr size_t kBytes = 2 * (size_t{kPrefillWarps} * kQueries + size_t{kStages} * kStage) + 2 * kChunk * 8;
};

// The block's ring of stages. Pieces 0 .. 3 of a chunk as above.
template <class T, int D>
struct PrefillRing {
    using Shape = PrefillShape<D>;
    T* stages;
    int64_t* offsets;  // [2][kChunk], of the keys of even and odd chunks
    const AttentionKernelArgs& p;
    int begin, end;  // keys that any row of the block sees
    int stage = 0;   // of the next piece
    __device__ __forceinline__ Span visible(int chunk) const { return Span(begin, end, chunk * kChunk); }
    __device__ __forceinline__ void locate(int chunk, const KeyRows& keys) const {
        keys.locate<kPrefillThreads>(offsets + chunk % 2 * kChunk, chunk * kChunk, visible(chunk), threadIdx.x);
    }
    __device__ __forceinline__ void load(int chunk, int piece, int to) const {  // nothing of a chunk beyond the last
        const int64_t* rows = offsets + chunk % 2 * kChunk;
        T* tile = stages + to * Shape::kStage;
        if (piece < 2 && visible(chunk).meets(piece * Shape::kPieceKeys, Shape::kPieceKeys))
            copy_tile<kPrefillThreads, Shape::kPieceKeys, Shape::kUnits>(
                tile, static_cast<const T*>(p.k_cache), rows + piece * Shape::kPieceKeys, 0, p.head_dim, threadIdx.x);
        if (piece >= 2 && visible(chunk).meets(0, kChunk))
            copy_tile<kPrefillThreads, kChunk, Shape::kLeftUnits>(
                tile, static_cast<const T*>(p.v_cache), rows, (piece - 2) * Shape::kLeftUnits, p.head_dim, threadIdx.x);
        cp_async_commit();
    }
    __device__ __forceinline__ void start(int chunk, const KeyRows& keys) const {
        locate(chunk, keys);
        __syncthreads();
#pragma unroll
        for (int piece = 0; piece < Shape::kStages - 1; ++piece) load(chunk, piece, piece);
    }
    // Waits for a piece and starts the load into the stage of the one before.
    __device__ __forceinline__ const T* next(int chunk, int piece, const KeyRows& keys) {
        constexpr int kAhead = Shape::kStages - 1;
        cp_async_wait<kAhead - 1>();
        __syncthreads();
        if (piece == 0) locate(chunk + 1, keys);  // read after the next barrier; of chunk - 1 all is loading by now
        load(chunk + (piece + kAhead) / 4, (piece + kAhead) % 4, stage == 0 ? kAhead : stage - 1);
        const T* tile = stages + stage * Shape::kStage;
        stage = stage == kAhead ? 0 : stage + 1;
        return tile;
    }
};

// Makes kPairs pairs of 8 columns of a chunk's output and merges them into `total`. `tile`: values, all keys.
template <class T, int kUnits, int kPairs>
__device__ __forceinline__ void merge_values(float (*total)[4], const uint32_t (&weights)[kChunk / 16][4],
                                             const T* tile, int first_unit, Span visible, const Factors (&factors)[2]) {
    constexpr int kSteps = kChunk / 32;
    float out[2 * kPairs][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (visible.meets(half * kChunk / 2, kChunk / 2))
            add_values<T, kUnits, kSteps, kPairs>(out, weights + half * kSteps, tile, half * kChunk / 2, first_unit);
#pragma unroll
    for (int j = 0; j < 2 * kPairs; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[j][i] = factors[i / 2].merge(total[j][i], out[j][i]);
}

// Writes a warp's rows by way of its queries' place, which nobody has read since the barrier of the last piece.
template <class T, int D>
__device__ __forceinline__ void store_rows(const float (&total)[D / 8][4], const RowState& state, T* tile, int row0,
                                           const Rows& rows, const AttentionKernelArgs& p) {
    constexpr int kUnits = D / 8;
    const int lane = lane_id();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float inverse = inverse_weight(p, rows.head(row0 + lane / 4 + 8 * h), state.m[h], state.l[h]);
#pragma unroll
        for (int j = 0; j < kUnits; ++j)
            *reinterpret_cast<uint32_t*>(tile + place<kUnits>(lane / 4 + 8 * h, j) + lane % 4 * 2) =
                pack2<T>(finished(total[j][2 * h], inverse), finished(total[j][2 * h + 1], inverse));
    }
    __syncwarp();
    for (int i = lane; i < kTileRows * kUnits; i += 32) {
        const int r = i / kUnits, unit = i % kUnits;
        if (row0 + r >= rows.count || unit * 8 >= p.head_dim) continue;
        T* to = static_cast<T*>(p.out) + rows.offset(row0 + r, p.out_stride, p.head_dim) + unit * 8;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + place<kUnits>(r, unit));
    }
}

template <class T, int D>
__global__ void __launch_bounds__(kPrefillThreads, 2) attention_prefill_kernel(const AttentionKernelArgs p) {
    using Shape = PrefillShape<D>;
    constexpr int kUnits = Shape::kUnits, kLeft = Shape::kLeftUnits;
    INFINILM_DYNAMIC_SHARED(smem);
    const int4 item = p.work.array[p.work.prefill_begin + blockIdx.y];  // AttentionPrefillItem
    const int seq = item.x, kv_head = blockIdx.x, warp = warp_id(), lane = lane_id();
    const Rows rows(p, seq, kv_head);
    const int block_row0 = item.y * kBlockRows, row0 = block_row0 + warp * kTileRows, last = rows.count - 1;
    const int block_begin = rows.begin(block_row0), block_end = rows.end(min(block_row0 + kBlockRows - 1, last));
    const int first_chunk = block_begin / kChunk, end_chunk = ceil_div(block_end, kChunk);
    T* queries = reinterpret_cast<T*>(smem);
    const KeyRows keys(p, seq, kv_head);
    T* stages = queries + kPrefillWarps * Shape::kQueries;
    PrefillRing<T, D> ring{stages, reinterpret_cast<int64_t*>(stages + Shape::kStages * Shape::kStage), p, block_begin,
                           block_end};
    ring.start(first_chunk, keys);
    copy_queries<kBlockRows, kUnits>(queries, p, rows, block_row0);  // the barrier of the first piece is theirs too
    queries += warp * Shape::kQueries;

    const int warp_last = min(row0 + kTileRows - 1, last);
    const int warp_begin = rows.begin(min(row0, last)), warp_end = row0 <= last ? rows.end(warp_last) : 0;
    const int row_end[2] = {rows.end(min(row0 + lane / 4, last)), rows.end(min(row0 + lane / 4 + 8, last))};
    RowState state;
    float total[D / 8][4] = {};
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
        const int chunk_begin = chunk * kChunk;
        const Span visible(warp_begin, warp_end, chunk_begin);
        float scores[kChunk / 8][4] = {};
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            const T* key_tile = ring.next(chunk, piece, keys);
            if (visible.meets(piece * Shape::kPieceKeys, Shape::kPieceKeys))
                add_scores<T, kUnits, Shape::kPieceKeys>(scores + piece * Shape::kPieceKeys / 8, queries, key_tile);
        }
        const int end[2] = {row_end[0] - chunk_begin, row_end[1] - chunk_begin};
        uint32_t weights[kChunk / 16][4];
        if (p.score_cap > 0) cap_scores(scores, p);
        const RowState now = softmax<T, true>(weights, scores, end, rows.window, p.scale);
        const Factors factors[2] = {{state.m[0], now.m[0]}, {state.m[1], now.m[1]}};
#pragma unroll
        for (int h = 0; h < 2; ++h) state.l[h] = factors[h].merge(state.l[h], now.l[h]);
#pragma unroll
        for (int right = 0; right < 2; ++right) {
            const T* value_tile = ring.next(chunk, 2 + right, keys);
            if (!visible.meets(0, kChunk)) continue;
#pragma unroll
            for (int unit = 0; unit < (right ? kUnits - kLeft : kLeft); unit += 4) {
                float (*to)[4] = total + right * kLeft + unit;
                if (unit + 4 <= (right ? kUnits - kLeft : kLeft))
                    merge_values<T, kLeft, 2>(to, weights, value_tile, unit, visible, factors);
                else
                    merge_values<T, kLeft, 1>(to, weights, value_tile, unit, visible, factors);
            }
        }
    }
    store_rows<T, D>(total, state, queries, row0, rows, p);
}

template <class T, int D>
cudaError_t launch_prefill(const AttentionKernelArgs& p, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(p.num_kv_heads), static_cast<unsigned>(p.work.num_prefill));
    return launch<attention_prefill_kernel<T, D>>({grid, dim3(kPrefillThreads), PrefillShape<D>::kBytes, stream}, p);
}

cudaError_t launch_attention_prefill(const AttentionKernelArgs& p, cudaStream_t stream) {
    return visit_dim(p.head_dim, [&](auto dim) {
        constexpr int D = decltype(dim)::value;
        return p.type == Type::bf16 ? launch_prefill<bf16, D>(p, stream) : launch_prefill<f16, D>(p, stream);
    });
}

}  // namespace infinilm::cuda
