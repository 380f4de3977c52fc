// Attention of prompts with wide heads (more than 256 columns) and with latents, whose values are the ends of their
// keys: what attention_prefill.cu does, with the bits of attention_decode.cu. The totals of 32 rows of 512 columns take
// half the registers of four warps, so these share 32 rows: each has the scores of 32 keys of a chunk, then all
// weights, by way of shared memory, and a quarter of the columns of the values.
//
// A block takes 64 rows of a (sequence, kv head), 32 to each half of its eight warps, and goes through the chunks that
// any of them sees. A row is a (token, head of the group): where many heads have one latent, its keys serve them all.
// Grid (num_kv_heads, tiles of the list of work, those with most keys first), 256 threads. Queries stay in shared
// memory. Keys and values come 64 columns of 128 keys at a time through a ring of cp.async stages, values of latents a
// second time, from L2: so that 64 rows and enough stages fit an SM. Where a block has less shared memory (sm_86,
// sm_89, sm_120), it takes one half of a tile, and there are twice as many.
//
// Bytes: q and out once; keys and values from L2 once for every 64 rows: 64 operations a byte. Floor: 2 * (head_dim +
// value_dim) operations for each (row, visible key) at the rate of mma.sync. Where the tiles are those of many
// sequences of one token each: the keys from memory, once.
#include "cuda/attention/attention.cuh"
#include "cuda/core/launch.cuh"

namespace infinilm::cuda {

constexpr int kWideTiles = 2, kHalfThreads = kPieces * 32, kHalfRows = kWideTiles * kTileRows;  // of half a tile
constexpr int kPartUnits = 8, kPartColumns = kPartUnits * 8;
constexpr int kMostValueParts = attention_wide_values / kPartColumns;
static_assert(attention_wide_rows == 2 * kHalfRows);
static_assert(kPartColumns == kPieces * 16, "a warp has 16 columns of each part of the values");

__host__ __device__ constexpr int wide_parts(int columns) { return ceil_div(columns, kPartColumns); }

// A block: kHalves of a tile, and the stages of its ring.
template <int kStages_, int kHalves_>
struct WideShape {
    static constexpr int kStages = kStages_, kHalves = kHalves_, kThreads = kHalves * kHalfThreads,
                         kRows = kHalves * kHalfRows, kBlocks = 2 / kHalves;  // of a tile
};

// Shared memory of a block.
template <class Shape>
struct WideRoom {
    static constexpr int kStage = tile_elements<kPartUnits>(kChunk);
    static constexpr int kQueries = tile_elements<kPartUnits>(Shape::kRows);
    static constexpr int kWeights = kChunk / 16 * 32;  // uint4, of a tile of 16 rows
    static constexpr size_t bytes(int key_parts) {
        return 2 * (size_t{Shape::kStages} * kStage + static_cast<size_t>(key_parts) * kQueries) +
               16 * size_t{Shape::kRows / kTileRows} * kWeights + 4 * (kPieces * Shape::kRows + 2 * kChunk);
    }
    uint8_t* stages;
    uint4* weights;    // [tiles of rows][steps of 16 keys][lanes]
    float* maxima;     // [pieces][rows]
    int* key_rows;     // [2][kChunk], of even and odd chunks (KeyRows)
    uint8_t* queries;  // a tile for each part of the columns
    __device__ __forceinline__ explicit WideRoom(uint8_t* smem)
        : stages(smem),
          weights(reinterpret_cast<uint4*>(smem + 2 * Shape::kStages * kStage)),
          maxima(reinterpret_cast<float*>(weights + Shape::kRows / kTileRows * kWeights)),
          key_rows(reinterpret_cast<int*>(maxima + kPieces * Shape::kRows)),
          queries(reinterpret_cast<uint8_t*>(key_rows + 2 * kChunk)) {}
};

// Which rows are the block's.
struct WideItem {
    int seq, row0;
};
template <class Shape>
__device__ __forceinline__ WideItem wide_item(const AttentionKernelArgs& p) {
    const int block = static_cast<int>(blockIdx.x);
    const int4 item = p.work.array[p.work.prefill_begin + block / Shape::kBlocks];  // AttentionPrefillItem
    return {item.x, item.y * attention_wide_rows + block % Shape::kBlocks * kHalfRows};
}

// What a block has to do, in shared memory: in its loop there are no registers for it.
template <class Shape>
struct WideTile {
    int seq, begin, end;         // keys that any row of the block sees; end 0: it has no rows
    int key_parts, parts;        // of a chunk
    int ahead;                   // see RowsOf::keys_ahead
    int row_ends[Shape::kRows];  // of the keys that each row sees, as far as there are some; rows beyond the last are
                                 // like it
    int half_ends[Shape::kHalves];  // of the keys that any of a half's rows sees; 0: it has none
    int all_begins[Shape::kHalves], all_ends[Shape::kHalves];  // keys that all rows of a half see
    // By all threads.
    __device__ __forceinline__ void find(const AttentionKernelArgs& p, WideItem item) {
        const Rows rows(p, item.seq, static_cast<int>(blockIdx.y));
        const int thread = static_cast<int>(threadIdx.x), row0 = item.row0, last = rows.count - 1;
        if (thread < Shape::kRows) row_ends[thread] = rows.end(min(row0 + thread, last));
        if (thread < Shape::kHalves) {
            const int first = row0 + thread * kHalfRows;
            half_ends[thread] = first <= last ? rows.seen_end(min(first + kHalfRows - 1, last)) : 0;
            all_begins[thread] = rows.begin(min(first + kHalfRows - 1, last));
            all_ends[thread] = first <= last ? rows.seen_end(first) : 0;
        }
        if (thread == 0) key_parts = wide_parts(p.head_dim), parts = key_parts + wide_parts(p.value_dim);
        if (thread == 0) seq = item.seq, begin = rows.begin(min(row0, last));
        if (thread == 0) ahead = Rows::keys_ahead(p, item.seq);
        if (thread == 0) end = row0 <= last ? rows.seen_end(min(row0 + Shape::kRows - 1, last)) : 0;
    }
    // What a half sees of a chunk.
    __device__ __forceinline__ Span visible(const AttentionKernelArgs& p, int half, int chunk) const {
        return Span(max(0, p.first_key(row_ends[half * kHalfRows]) - ahead), half_ends[half], chunk * kChunk);
    }
};

// The block's ring of stages: of each chunk the parts of its keys, then those of its values.
template <class T, class Shape>
struct WideRing {
    using Room = WideRoom<Shape>;
    static constexpr int kAhead = Shape::kStages - 1;
    const AttentionKernelArgs& p;
    const Room& room;
    const WideTile<Shape>& tile;
    int chunk;                // of the next load
    int part = 0, stage = 0;  // of the next load; of the next part to be read

    __device__ __forceinline__ T* stage_at(int at) const {
        return reinterpret_cast<T*>(room.stages) + at * Room::kStage;
    }
    __device__ __forceinline__ void locate(int of) const {
        locate_keys<Shape::kThreads>(KeyRows(p, tile.seq, static_cast<int>(blockIdx.y)),
                                     room.key_rows + of % 2 * kChunk, of * kChunk,
                                     Span(tile.begin, tile.end, of * kChunk), threadIdx.x);
    }
    // Behind a barrier since locate() of the chunk. Nothing of a chunk beyond the last.
    __device__ __forceinline__ void load(int to) {
        const int key_parts = tile.key_parts;
        if (chunk * kChunk < tile.end) {
            const bool is_value = part >= key_parts;
            copy_tile<Shape::kThreads, kChunk, kPartUnits>(
                stage_at(to), static_cast<const T*>(is_value ? p.v_cache : p.k_cache),
                room.key_rows + chunk % 2 * kChunk, (is_value ? part - key_parts : part) * kPartUnits, p.head_dim,
                is_value ? p.value_dim : p.head_dim);
        }
        cp_async_commit();
        if (part == 0) locate(chunk + 1);  // in the place of the chunk before, of which all is loading
        if (++part == tile.parts) part = 0, ++chunk;
    }
    __device__ __forceinline__ void start() {
        locate(chunk);
#pragma unroll 1
        for (int to = 0; to < kAhead; ++to) {
            __syncthreads();
            load(to);
        }
    }
    // Waits for a part and starts the load into the stage of the one before.
    __device__ __forceinline__ const T* next() {
        cp_async_wait<kAhead - 1>();
        __syncthreads();
        load(stage == 0 ? kAhead : stage - 1);
        const T* now = stage_at(stage);
        stage = stage == kAhead ? 0 : stage + 1;
        return now;
    }
};

template <class T, class Shape>
__device__ __forceinline__ void copy_all_queries(T* queries, const AttentionKernelArgs& p) {
    const WideItem item = wide_item<Shape>(p);
    const Rows rows(p, item.seq, static_cast<int>(blockIdx.y));
    for (int part = 0; part < wide_parts(p.head_dim); ++part)
        copy_queries<Shape::kRows, kPartUnits>(queries + part * WideRoom<Shape>::kQueries, p, rows, item.row0,
                                               part * kPartUnits);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) attention_wide_kernel(const AttentionKernelArgs p) {
    grid_dependency_wait();
    using Room = WideRoom<Shape>;
    using Keeper = RowKeeper<kWideTiles>;
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(WideTile<Shape>, tile, [1]);
    const Room room(smem);
    const int warp = of_warp(static_cast<int>(warp_id())), half = warp / kPieces, piece = warp % kPieces;
    tile->find(p, wide_item<Shape>(p));
    __syncthreads();
    if (tile->end == 0) return;
    WideRing<T, Shape> ring{p, room, *tile, tile->begin / kChunk};
    ring.start();
    T* queries = reinterpret_cast<T*>(room.queries);
    copy_all_queries<T, Shape>(queries, p);  // the barrier of the first part is theirs
    queries += tile_elements<kPartUnits>(half * kHalfRows);

    // The place that a lane gives to an ldmatrix of its warp's columns, for the first 16 keys of a part.
    const int value_place =
        place<kPartUnits>(static_cast<int>(lane_id()) % 16, 2 * piece + static_cast<int>(lane_id()) / 16);
    Keeper own;
    float total[kWideTiles][4 * kMostValueParts / 2][4] = {};  // of 16 columns of each part
    for (int chunk = tile->begin / kChunk; chunk * kChunk < tile->end; ++chunk) {
        const Span visible = tile->visible(p, half, chunk);
        const bool meets = visible.meets(piece * kPiece, kPiece);
        float scores[kWideTiles][kPiece / 8][4] = {};
#pragma unroll 1
        for (int part = 0; part < tile->key_parts; ++part) {
            const T* keys = ring.next();
            if (meets)
                add_scores<T, kPartUnits, kPiece>(scores, 0, queries + part * Room::kQueries,
                                                  keys + tile_elements<kPartUnits>(piece * kPiece), 0);
        }
        const int begin = chunk * kChunk + piece * kPiece;
        const int* ends = tile->row_ends + half * kHalfRows;
        const bool all_see = tile->all_ends[half] >= begin + kPiece && tile->all_begins[half] <= begin;
        float* maxima = room.maxima + half * kHalfRows;
#pragma unroll
        for (int t = 0; t < kWideTiles; ++t) {
            if (p.cap > 0) cap_scores(scores[t], p);
            if (p.position_bias) {
                const WideItem of = wide_item<Shape>(p);
                const Rows rows(p, of.seq, static_cast<int>(blockIdx.y));
                add_position_bias(scores[t], p, rows, of.row0 + half * kHalfRows + t * kTileRows, begin);
            }
            if (!all_see) {
                const int row = t * kTileRows + static_cast<int>(lane_id()) / 4;
                const int end[2] = {ends[row], ends[row + 8]};
                mask_scores(scores[t], end, tile->half_ends[half], begin, tile->ahead, p.first_key);
            }
            tell_maxima<Shape::kRows>(maxima + t * kTileRows, piece, scores[t], p.scale);
        }
        named_barrier_sync(1 + half, kHalfThreads);
        RowState now[kWideTiles][2];
#pragma unroll
        for (int t = 0; t < kWideTiles; ++t)
            tell_weights<T, Shape::kRows>(room.weights + (half * kWideTiles + t) * Room::kWeights, now[t],
                                          maxima + t * kTileRows, piece, scores[t], p.scale);
        named_barrier_sync(1 + half, kHalfThreads);
        uint32_t weights[kWideTiles][kChunk / 16][4];
#pragma unroll
        for (int t = 0; t < kWideTiles; ++t)
            read_weights(weights[t], room.weights + (half * kWideTiles + t) * Room::kWeights);
        const Factors mine = own.template merge<T>(now, weights);
#pragma unroll
        for (int part = 0; part < kMostValueParts; ++part) {
            if (part >= tile->parts - tile->key_parts) break;
            const T* values = ring.next();
            if (!visible.meets(0, kChunk)) continue;
            float out[2][kWideTiles][4] = {};
#pragma unroll
            for (int first = 0; first < kChunk; first += kChunk / 2)
                if (visible.meets(first, kChunk / 2))
                    add_pair<T, kPartUnits, kChunk / 32>(out, weights, first / 16,
                                                         values + value_place + tile_elements<kPartUnits>(first));
            Factors factors[kWideTiles][2];  // given each time: there are no registers to keep them
            Keeper::give_all(factors, mine);
            merge_outputs<2>(total, 2 * part, out, factors);
        }
    }
    const WideItem item = wide_item<Shape>(p);  // read again: in the loop above there is no register for it
    const Rows rows(p, item.seq, static_cast<int>(blockIdx.y));
    const int row0 = item.row0 + half * kHalfRows;
    const float inverse_l = inverse_weight(p, rows.head(min(row0 + Keeper::row(), rows.count - 1)), own.merged);
    const int first_column = piece * 16 + static_cast<int>(lane_id()) % 4 * 2;
#pragma unroll
    for (int t = 0; t < kWideTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = Keeper::give(inverse_l, t, h);
            const int row = row0 + t * kTileRows + static_cast<int>(lane_id()) / 4 + 8 * h;
            if (row >= rows.count) continue;
            T* to = static_cast<T*>(p.out) + rows.offset(row, p.out_stride, p.value_dim);
#pragma unroll
            for (int j = 0; j < 2 * kMostValueParts; ++j) {
                const int column = j / 2 * kPartColumns + first_column + j % 2 * 8;
                if (column < p.value_dim)
                    *reinterpret_cast<uint32_t*>(to + column) =
                        pack2<T>(finished(total[t][j][2 * h], inverse), finished(total[t][j][2 * h + 1], inverse));
            }
        }
}

template <class T, class Shape>
static cudaError_t launch_wide(const AttentionKernelArgs& p, cudaStream_t stream) {
    // Items in x, of which there may be more than 65,535: 64 rows of 128 heads on one latent are half a token.
    const dim3 grid(static_cast<unsigned>(p.work.num_prefill * Shape::kBlocks), static_cast<unsigned>(p.num_kv_heads));
    return launch<attention_wide_kernel<T, Shape>>(
        {grid, dim3(Shape::kThreads), WideRoom<Shape>::bytes(wide_parts(p.head_dim)), stream}, p);
}

template <class T>
static cudaError_t launch_wide_of(const AttentionKernelArgs& p, cudaStream_t stream) {
    using Whole = WideShape<4, 2>;
    using Half = WideShape<3, 1>;
    static_assert(fits_any_device(WideRoom<Half>::bytes(wide_parts(attention_widest_head))));
    static_assert(sizeof(WideTile<Whole>) <= declared_shared_bytes);
    bool whole_fits = false;
    if (cudaError_t error = fits_device(whole_fits, WideRoom<Whole>::bytes(wide_parts(p.head_dim)))) return error;
    return whole_fits ? launch_wide<T, Whole>(p, stream) : launch_wide<T, Half>(p, stream);
}

cudaError_t launch_attention_wide(const AttentionKernelArgs& p, cudaStream_t stream) {
    return p.type == Element::bf16 ? launch_wide_of<bf16>(p, stream) : launch_wide_of<f16>(p, stream);
}

}  // namespace infinilm::cuda
