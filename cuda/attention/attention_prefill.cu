// Attention of the sequences with many rows: prompts, whole or in part. A block takes 128 rows of a (sequence, kv
// head), 32 to a warp, and goes through the chunks that any of them sees; the warps share keys and values. With
// head_dim over 128 there are registers for 16 rows to a warp. Grid (num_kv_heads, tiles), 128 threads; the tiles are
// those of the list of work, which has the ones with most keys first. A chunk comes in four parts through a ring of
// cp.async stages: keys 0 .. 63, keys 64 .. 127, the left columns of all values, the right ones. So a whole chunk of
// weights is in registers, as 16-bit numbers, and outputs are made and merged a few columns at a time. Idea:
// FlashAttention-2 (Dao 2023). Floor: 4 * head_dim operations for each (row, visible key) at the rate of mma.sync.
// Bytes: q and out once; keys and values from L2 once for every 128 rows, 128 operations a byte. A warp reads the tiles
// with ldmatrix for its 32 rows: 16 bytes of shared memory for 256 multiply-adds, half of what an SM of sm_80 can read
// while it does these.
#include "cuda/attention/attention.cuh"
#include "cuda/core/launch.cuh"

namespace infinilm::cuda {

constexpr int kPrefillWarps = 4, kPrefillThreads = 32 * kPrefillWarps;

template <int D>
struct PrefillShape {
    static constexpr int kBlockRows = attention_prefill_rows(D), kWarpRows = kBlockRows / kPrefillWarps;
    static constexpr int kTiles = kWarpRows / kTileRows;
    static constexpr int kUnits = D / 8, kHalf = kChunk / 2;
    static constexpr int kAtOnce = D <= 64 ? 64 : 32;        // keys whose scores are in registers
    static constexpr int kLeftUnits = (D / 16 + 1) / 2 * 2;  // of values; whole pairs of 8 columns
    static constexpr int kKeyTile = tile_elements<kUnits>(kHalf), kValueTile = tile_elements<kLeftUnits>(kChunk);
    static constexpr int kStage = kKeyTile > kValueTile ? kKeyTile : kValueTile, kStages = D <= 128 ? 3 : 2;
    static constexpr int kQueries = tile_elements<kUnits>(kWarpRows);  // of a warp
    static constexpr size_t kBytes = 2 * (size_t{kPrefillWarps} * kQueries + size_t{kStages} * kStage) + 2 * kChunk * 4;
};

// The block's ring of stages. Parts 0 .. 3 of a chunk as above.
template <class T, int D>
struct PrefillRing {
    using Shape = PrefillShape<D>;
    T* stages;
    int* rows;  // [2][kChunk], of the keys of even and odd chunks (KeyRows)
    const AttentionKernelArgs& p;
    int seq, kv_head;
    int begin, end;  // keys that any row of the block sees
    int stage = 0;   // of the next part
    __device__ __forceinline__ Span visible(int chunk) const { return Span(begin, end, chunk * kChunk); }
    __device__ __forceinline__ void locate(int chunk) const {
        locate_keys<kPrefillThreads>(KeyRows(p, opaque(seq), kv_head), rows + chunk % 2 * kChunk, chunk * kChunk,
                                     visible(chunk), threadIdx.x);
    }
    __device__ __forceinline__ void load(int chunk, int part, int to) const {  // nothing of a chunk beyond the last
        const int* of = rows + chunk % 2 * kChunk;
        T* tile = stages + to * Shape::kStage;
        if (part < 2 && visible(chunk).meets(part * Shape::kHalf, Shape::kHalf))
            copy_tile<kPrefillThreads, Shape::kHalf, Shape::kUnits>(
                tile, static_cast<const T*>(p.k_cache), of + part * Shape::kHalf, 0, p.head_dim, p.head_dim);
        if (part >= 2 && visible(chunk).meets(0, kChunk))
            copy_tile<kPrefillThreads, kChunk, Shape::kLeftUnits>(
                tile, static_cast<const T*>(p.v_cache), of, (part - 2) * Shape::kLeftUnits, p.head_dim, p.head_dim);
        cp_async_commit();
    }
    __device__ __forceinline__ void start(int chunk) const {
        locate(chunk);
        __syncthreads();
#pragma unroll
        for (int part = 0; part < Shape::kStages - 1; ++part) load(chunk, part, part);
    }
    // Waits for a part and starts the load into the stage of the one before.
    __device__ __forceinline__ const T* next(int chunk, int part) {
        constexpr int kAhead = Shape::kStages - 1;
        cp_async_wait<kAhead - 1>();
        __syncthreads();
        if (part == 0) locate(chunk + 1);  // read after the next barrier; of chunk - 1 all is loading by now
        load(chunk + (part + kAhead) / 4, (part + kAhead) % 4, stage == 0 ? kAhead : stage - 1);
        const T* tile = stages + stage * Shape::kStage;
        stage = stage == kAhead ? 0 : stage + 1;
        return tile;
    }
};

// Writes a warp's rows by way of its queries' place, which no thread has read since the barrier of the last part.
template <class T, int D, int kTiles>
__device__ __forceinline__ void store_rows(const float (&total)[kTiles][D / 8][4], float inverse_l, T* tile, int row0,
                                           const Rows& rows, const AttentionKernelArgs& p) {
    constexpr int kUnits = D / 8;
    const int lane = lane_id();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = RowKeeper<kTiles>::give(inverse_l, t, h);
#pragma unroll
            for (int j = 0; j < kUnits; ++j)
                *reinterpret_cast<uint32_t*>(tile + place<kUnits>(t * kTileRows + lane / 4 + 8 * h, j) + lane % 4 * 2) =
                    pack2<T>(finished(total[t][j][2 * h], inverse), finished(total[t][j][2 * h + 1], inverse));
        }
    __syncwarp();
    for (int i = lane; i < kTiles * kTileRows * kUnits; i += 32) {
        const int r = i / kUnits, unit = i % kUnits;
        if (row0 + r >= rows.count || unit * 8 >= p.head_dim) continue;
        T* to = static_cast<T*>(p.out) + rows.offset(row0 + r, p.out_stride, p.head_dim) + unit * 8;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + place<kUnits>(r, unit));
    }
}

template <class T, int D>
__global__ void __launch_bounds__(kPrefillThreads, 2) attention_prefill_kernel(const AttentionKernelArgs p) {
    grid_dependency_wait();
    using Shape = PrefillShape<D>;
    constexpr int kUnits = Shape::kUnits, kLeft = Shape::kLeftUnits, kTiles = Shape::kTiles;
    constexpr int kAtOnce = Shape::kAtOnce, kPairs = kTiles == 1 ? 2 : 1;
    INFINILM_DYNAMIC_SHARED(smem);
    const int4 item = p.work.array[p.work.prefill_begin + blockIdx.y];  // AttentionPrefillItem
    const int seq = item.x, kv_head = blockIdx.x;
    const int warp = of_warp(static_cast<int>(warp_id()));
    const Rows rows(p, seq, kv_head);
    const int block_row0 = item.y * Shape::kBlockRows, row0 = block_row0 + warp * Shape::kWarpRows,
              last = rows.count - 1;
    const int block_begin = of_warp(rows.begin(block_row0)),
              block_end = of_warp(rows.seen_end(min(block_row0 + Shape::kBlockRows - 1, last)));
    const int first_chunk = block_begin / kChunk;
    T* queries = reinterpret_cast<T*>(smem);
    T* stages = queries + kPrefillWarps * Shape::kQueries;
    PrefillRing<T, D> ring{
        stages,   reinterpret_cast<int*>(stages + Shape::kStages * Shape::kStage), p, seq, kv_head, block_begin,
        block_end};
    ring.start(first_chunk);
    copy_queries<Shape::kBlockRows, kUnits>(queries, p, rows, block_row0);  // the barrier of the first part is theirs
    queries += warp * Shape::kQueries;

    using Keeper = RowKeeper<kTiles>;
    const int last_row = min(row0 + Shape::kWarpRows - 1, last);
    const int warp_begin = of_warp(rows.begin(min(row0, last))),
              warp_end = of_warp(row0 <= last ? rows.seen_end(last_row) : 0);
    const int all_begin = of_warp(rows.begin(last_row)), all_end = of_warp(rows.seen_end(min(row0, last)));
    const int own_row = min(row0 + Keeper::row(), last), own_end = rows.end(own_row);
    Keeper own;  // of own_row
    float total[kTiles][D / 8][4] = {};
    for (int chunk = first_chunk; chunk * kChunk < block_end; ++chunk) {
        const Span visible(warp_begin, warp_end, chunk * kChunk);
        uint32_t weights[kTiles][kChunk / 16][4];
        RowState now[kTiles][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const T* key_tile = ring.next(chunk, half);
#pragma unroll
            for (int at = half * Shape::kHalf; at < (half + 1) * Shape::kHalf; at += kAtOnce) {
                if (!visible.meets(at, kAtOnce)) {
#pragma unroll
                    for (int i = 0; i < kTiles * kAtOnce / kPiece; ++i)
                        add_no_weights(weights[i % kTiles], at / kPiece + i / kTiles);
                    continue;
                }
                float scores[kTiles][kAtOnce / 8][4] = {};
                add_scores<T, kUnits, kAtOnce>(scores, 0, queries, key_tile, at - half * Shape::kHalf);
#pragma unroll
                for (int i = 0; i < kTiles * kAtOnce / kPiece; ++i) {
                    const int t = i % kTiles, piece = at / kPiece + i / kTiles;
                    float (*of_piece)[4] = scores[t] + i / kTiles * kPiece / 8;
                    if (p.cap > 0) cap_scores(of_piece, p);
                    const int begin = chunk * kChunk + piece * kPiece;
                    if (p.position_bias) {
                        const int4 of = p.work.array[p.work.prefill_begin + blockIdx.y];  // read again: see below
                        const Rows biased(p, of.x, kv_head);
                        add_position_bias(of_piece, p, biased, row0 + t * kTileRows, begin);
                    }
                    if (all_end < begin + kPiece || all_begin > begin) {  // some row does not see all
                        const int end[2] = {Keeper::give(own_end, t, 0), Keeper::give(own_end, t, 1)};
                        int ahead = 0;
                        if (p.two_way_seqs)  // the item is read again: see below
                            ahead = Rows::keys_ahead(p, p.work.array[p.work.prefill_begin + blockIdx.y].x);
                        mask_scores(of_piece, end, warp_end, begin, ahead, p.first_key);
                    }
                    add_weights<T>(weights[t], now[t], piece, of_piece, p.scale);
                }
            }
        }
        Factors factors[kTiles][2];
        Keeper::give_all(factors, own.template merge<T>(now, weights));
#pragma unroll
        for (int right = 0; right < 2; ++right) {
            const T* value_tile = ring.next(chunk, 2 + right);
            if (!visible.meets(0, kChunk)) continue;
#pragma unroll
            for (int unit = 0; unit < (right ? kUnits - kLeft : kLeft); unit += 2 * kPairs) {
                if (unit + 2 * kPairs <= (right ? kUnits - kLeft : kLeft))
                    merge_values<T, kLeft, kPairs>(total, right * kLeft + unit, weights, value_tile, unit, visible,
                                                   factors);
                else
                    merge_values<T, kLeft, 1>(total, right * kLeft + unit, weights, value_tile, unit, visible, factors);
            }
        }
    }
    // Read again: in the loop above there is no register for any of this.
    const int4 again = p.work.array[p.work.prefill_begin + blockIdx.y];
    const Rows out_rows(p, again.x, kv_head);
    const int out_row0 = again.y * Shape::kBlockRows + static_cast<int>(warp_id()) * Shape::kWarpRows;
    const int head = out_rows.head(min(out_row0 + Keeper::row(), out_rows.count - 1));
    store_rows<T, D>(total, inverse_weight(p, head, own.merged), queries, out_row0, out_rows, p);
}

template <class T, int D>
cudaError_t launch_prefill(const AttentionKernelArgs& p, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(p.num_kv_heads), static_cast<unsigned>(p.work.num_prefill));
    return launch<attention_prefill_kernel<T, D>>({grid, dim3(kPrefillThreads), PrefillShape<D>::kBytes, stream}, p);
}

cudaError_t launch_attention_prefill(const AttentionKernelArgs& p, cudaStream_t stream) {
    return visit_dim(p.head_dim, [&](auto dim) {
        constexpr int D = decltype(dim)::value;
        return p.type == Element::bf16 ? launch_prefill<bf16, D>(p, stream) : launch_prefill<f16, D>(p, stream);
    });
}

}  // namespace infinilm::cuda
