// Attention of the sequences with few rows (query_len * group <= attention_decode_rows): decode. One warp takes a tile
// of 16 rows and one chunk of 128 keys; the chunks are merged by their block, or through the workspace by the last
// block to arrive.
//
// Grid (items * num_kv_heads), 128 threads. An item of the list of work is up to `width` chunks, of which a warp has
// one, or all chunks of a tile, some at a time; all four warps merge. Blocks beyond the list end at once: in a graph
// the grid is a bound, of at most twice as many items. (Blocks that go through the list in a loop spill: ptxas then
// keeps 255 registers alive where this takes 168.) Bytes: every key and value of the context once for each row tile
// (one in practice), 2 * context * head_dim * 2 per kv head, and 1 / 128 of that for each row, written and read as
// partial results. That is the floor: the mma of rows that are not there cost less than the wait for the keys. Every
// warp has a ring of cp.async stages of its own, no barrier. Idea: Flash-Decoding (Dao et al. 2023), with a fixed chunk
// instead of a fixed number of splits.
#include "attention.cuh"
#include "launch.cuh"

namespace infinilm::cuda {

constexpr int kDecodeThreads = 32 * attention_chunks_at_once;

template <int D>
struct DecodeShape {
    static constexpr int kUnits = D / 8, kKeys = D <= 64 ? 32 : 16, kPieces = kChunk / kKeys;  // keys of a stage
    static constexpr int kStages = D <= 128 ? 3 : 2, kStage = tile_elements<kUnits>(kKeys);
    static constexpr int kRing = kStages * kStage * 2, kPartial = kTileRows * slot_stride(D) * 4;  // bytes
    static constexpr int kKeyRows = kChunk * 4;
    static constexpr int kWarp =
        kKeyRows + (kRing > kPartial ? kRing : kPartial);  // partial results take the ring's place
    static constexpr int kQueries = tile_elements<kUnits>(kTileRows) * 2;
    static constexpr int kBlocks = D <= 80 ? 4 : D <= 128 ? 3 : 2;  // of an SM, for which there are registers
};

// What a block has to do, in shared memory: the arithmetic of chunks needs all registers.
struct DecodeTile {
    int seq, row0, num_rows, kv_head;
    int begin, end, chunk0, chunks;  // keys that any row sees; the first of their chunks, and how many
    int slot, width;                 // of AttentionDecodeItem and AttentionListHead
    int step;                        // chunks that the block takes at a time
    int row_ends[kTileRows];         // of the keys that each row sees
    bool is_last;                    // of the blocks to arrive

    // By the first warp.
    __device__ __forceinline__ void find(const AttentionKernelArgs& p, int4 item, int head, int chunks_at_once) {
        const int lane = lane_id();
        const Rows rows(p, item.x, head);
        const int count = min(rows.count - item.y, kTileRows), row_end = rows.end(item.y + min(lane, count - 1));
        if (lane < kTileRows) row_ends[lane] = row_end;
        if (lane == kTileRows - 1) {
            seq = item.x, row0 = item.y, num_rows = count, kv_head = head;
            begin = rows.begin(item.y), end = row_end;
            chunk0 = begin / kChunk, chunks = ceil_div(end, kChunk) - chunk0;
            slot = item.w, width = chunks_at_once;
            // Of a tile that this block walks through alone, what is merged so far lies in the place of the last warp.
            step = slot < 0 && chunks > width ? attention_chunks_at_once - 1 : width;
        }
    }
    __device__ __forceinline__ bool is_whole() const { return slot < 0; }
    // Of a chunk's partial results.
    template <int D>
    __device__ __forceinline__ float* partial(const AttentionKernelArgs& p, int chunk) const {
        const int64_t row = slot + static_cast<int64_t>(kv_head * chunks + chunk) * num_rows;
        return static_cast<float*>(p.work.workspace) + row * slot_stride(D);
    }
};

// A warp's ring: pieces 0 .. kPieces - 1 are the keys of its chunk, the rest the values.
template <class T, int D>
struct DecodeRing {
    using Shape = DecodeShape<D>;
    T* stages;
    int* rows;  // of the chunk's keys (KeyRows)
    const AttentionKernelArgs& p;
    int chunk_begin;
    Span visible;  // to any row of the tile
    __device__ __forceinline__ bool needs(int piece) const {
        return visible.meets(piece % Shape::kPieces * Shape::kKeys, Shape::kKeys);
    }
    __device__ __forceinline__ T* stage(int piece) const { return stages + piece % Shape::kStages * Shape::kStage; }
    __device__ __forceinline__ void load(int piece) const {
        if (piece < 2 * Shape::kPieces && needs(piece))
            copy_tile<32, Shape::kKeys, Shape::kUnits>(
                stage(piece), static_cast<const T*>(piece < Shape::kPieces ? p.k_cache : p.v_cache),
                rows + piece % Shape::kPieces * Shape::kKeys, 0, p.head_dim);
        cp_async_commit();
    }
    __device__ __forceinline__ void start(const KeyRows& keys) const {
        keys.locate<32>(rows, chunk_begin, visible, lane_id());
        __syncwarp();
#pragma unroll
        for (int piece = 0; piece < Shape::kStages - 1; ++piece) load(piece);
    }
    // Waits for a piece and starts the load into the stage of the one before.
    __device__ __forceinline__ void next(int piece) const {
        cp_async_wait<Shape::kStages - 2>();
        __syncwarp();
        load(piece + Shape::kStages - 1);
    }
};

// One chunk, by one warp whose ring is started: leaves m, l and o of the tile's rows, slot_stride(D) apart, in the
// ring's place or in the workspace.
template <class T, int D>
__device__ __forceinline__ void decode_chunk(const DecodeRing<T, D>& ring, const T* queries, const DecodeTile& tile) {
    using Shape = DecodeShape<D>;
    constexpr int kKeys = Shape::kKeys, kPieces = Shape::kPieces, kUnits = Shape::kUnits;
    const int lane = lane_id();
    uint32_t weights[1][kChunk / 16][4];
    RowState row;
#pragma unroll
    for (int piece = 0; piece < kChunk / kPiece; ++piece) {
        float scores[1][kPiece / 8][4] = {};
#pragma unroll
        for (int i = 0; i < kPiece / kKeys; ++i) {
            const int stage = piece * (kPiece / kKeys) + i;
            ring.next(stage);
            if (ring.needs(stage)) add_scores<T, kUnits, kKeys>(scores, i * kKeys, queries, ring.stage(stage), 0);
        }
        if (ring.p.cap > 0) cap_scores(scores[0], ring.p);
        const int begin = ring.chunk_begin + piece * kPiece, window = window_of(ring.p);
        if (tile.row_ends[0] < begin + kPiece || tile.end - window > begin) {  // some row does not see all
            const int end[2] = {tile.row_ends[lane / 4] - begin, tile.row_ends[lane / 4 + 8] - begin};
            mask_scores(scores[0], end, window);
        }
        add_weights<T>(weights[0], row, piece, scores[0], ring.p.scale);
    }

    if (D <= 128) sum_weights<T>(row, weights[0]);
    float out[D / 8][1][4] = {};
#pragma unroll
    for (int piece = kPieces; piece < 2 * kPieces; ++piece) {
        ring.next(piece);
        if (ring.needs(piece))
            add_values<T, kUnits, kKeys / 16, D / 16>(out, weights, (piece - kPieces) * kKeys / 16, ring.stage(piece),
                                                      0, 0);
    }
    if (D > 128) sum_weights<T>(row, weights[0]);  // later, as the outputs leave no register for the sums
    __syncwarp();                                  // nobody reads the ring any more
    float* partial = tile.is_whole() ? reinterpret_cast<float*>(ring.stages)
                                     : tile.partial<D>(ring.p, ring.chunk_begin / kChunk - tile.chunk0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = lane / 4 + 8 * h;
        if (r >= tile.num_rows) continue;
        float* to = partial + r * slot_stride(D);
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
            *reinterpret_cast<float2*>(to + 8 * j + lane % 4 * 2) = make_float2(out[j][0][2 * h], out[j][0][2 * h + 1]);
        if (lane % 4 == 0) *reinterpret_cast<float2*>(to + D) = make_float2(row.m[h], row.l[h]);
    }
}

// What is merged so far of a tile: kThreads threads have a row, thread t of them columns 4 t .. of every 4 * kThreads.
template <int D, int kThreads>
struct Merged {
    static constexpr int kColumns = 4 * kThreads, kItems = ceil_div(D, kColumns);
    // What a thread reads of a chunk.
    struct Part {
        float2 state;  // m, l
        float4 x[kItems];
    };
    const int row = threadIdx.x / kThreads, column0 = threadIdx.x % kThreads * 4;
    const bool active;
    float m = -INFINITY, l = 0.0f, o[kItems][4] = {};
    __device__ __forceinline__ explicit Merged(int num_rows) : active(row < num_rows && column0 < D) {}

    __device__ __forceinline__ void load(Part& part, const float* from) const {
        part.state = *reinterpret_cast<const float2*>(from + D);
#pragma unroll
        for (int i = 0; i < kItems; ++i)
            if (D % kColumns == 0 || column0 + kColumns * i < D)
                part.x[i] = *reinterpret_cast<const float4*>(from + column0 + kColumns * i);
    }
    __device__ __forceinline__ void merge(const Part& part) {
        const Factors factors(m, part.state.x);
        l = factors.merge(l, part.state.y);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            o[i][0] = factors.merge(o[i][0], part.x[i].x);
            o[i][1] = factors.merge(o[i][1], part.x[i].y);
            o[i][2] = factors.merge(o[i][2], part.x[i].z);
            o[i][3] = factors.merge(o[i][3], part.x[i].w);
        }
    }
    // count chunks in order, of which kAhead are on their way; partial: the first one's rows, chunks chunk_stride
    // apart.
    template <int kAhead>
    __device__ __forceinline__ void add(const float* partial, int64_t chunk_stride, int count) {
        if (!active) return;
        const float* from = partial + row * slot_stride(D);
        Part parts[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            if (i < count) load(parts[i], from + i * chunk_stride);
#pragma unroll 1
        for (int chunk = 0; chunk < count; chunk += kAhead) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (chunk + i < count) merge(parts[i]);
                if (chunk + i + kAhead < count) load(parts[i], from + (chunk + i + kAhead) * chunk_stride);
            }
        }
    }
    // As the rows of a chunk. Merging these into nothing gives them again.
    __device__ __forceinline__ void keep(float* partial) const {
        if (!active) return;
        float* to = partial + row * slot_stride(D);
        if (column0 == 0) *reinterpret_cast<float2*>(to + D) = make_float2(m, l);
#pragma unroll
        for (int i = 0; i < kItems; ++i)
            if (D % kColumns == 0 || column0 + kColumns * i < D)
                *reinterpret_cast<float4*>(to + column0 + kColumns * i) =
                    make_float4(o[i][0], o[i][1], o[i][2], o[i][3]);
    }
    template <class T>
    __device__ __forceinline__ void store(const AttentionKernelArgs& p, const Rows& rows, int row0) const {
        if (!active) return;
        T* to = static_cast<T*>(p.out) + rows.offset(row0 + row, p.out_stride, p.head_dim);
        const float inverse = inverse_weight(p, rows.head(row0 + row), m, l);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            const int column = column0 + kColumns * i;
            if (column >= p.head_dim) break;
            *reinterpret_cast<uint2*>(to + column) =
                make_uint2(pack2<T>(finished(o[i][0], inverse), finished(o[i][1], inverse)),
                           pack2<T>(finished(o[i][2], inverse), finished(o[i][3], inverse)));
        }
    }
};

// Merges all chunks of a tile from the workspace, by as many threads to a row as there are.
template <class T, int D, int kThreads>
__device__ __forceinline__ void merge_tile(const AttentionKernelArgs& p, const DecodeTile& tile) {
    // On their way: as many bytes as find registers beside those of the chunks' arithmetic.
    constexpr int kItems = Merged<D, kThreads>::kItems,
                  kMost = D == 128  ? 16
                          : D <= 64 ? 8
                                    : 4,
                  kAhead = kItems < kMost ? kMost / kItems : 1;
    Merged<D, kThreads> merged(tile.num_rows);
    merged.template add<kAhead>(tile.partial<D>(p, 0), static_cast<int64_t>(tile.num_rows) * slot_stride(D),
                                tile.chunks);
    merged.template store<T>(p, Rows(p, tile.seq, tile.kv_head), tile.row0);
}

// One item of the list from its chunk `first` on, for one kv head, by the whole block.
template <class T, int D>
__device__ __forceinline__ void run_item(const AttentionKernelArgs& p, DecodeTile& tile, int first, uint8_t* smem) {
    using Shape = DecodeShape<D>;
    const int warp = warp_id();
    T* queries = reinterpret_cast<T*>(smem);
    uint8_t* scratch = smem + Shape::kQueries;
    copy_queries<kTileRows, Shape::kUnits>(queries, p, Rows(p, tile.seq, tile.kv_head), tile.row0);
    float* merged_so_far = reinterpret_cast<float*>(scratch + (attention_chunks_at_once - 1) * Shape::kWarp);
    for (;; first += tile.step) {
        const int chunk = first + warp, chunk_begin = (tile.chunk0 + chunk) * kChunk;
        const bool active = warp < tile.step && chunk < tile.chunks;
        uint8_t* mine = scratch + warp * Shape::kWarp;
        const DecodeRing<T, D> ring{reinterpret_cast<T*>(mine + Shape::kKeyRows), reinterpret_cast<int*>(mine), p,
                                    chunk_begin, Span(tile.begin, tile.end, chunk_begin)};
        if (active) ring.start(KeyRows(p, tile.seq, tile.kv_head));
        __syncthreads();  // the queries have come
        if (active) decode_chunk<T, D>(ring, queries, tile);
        __syncthreads();
        if (!tile.is_whole()) break;
        Merged<D, kDecodeThreads / kTileRows> merged(tile.num_rows);
        if (first > 0) merged.template add<1>(merged_so_far, 0, 1);
        merged.template add<1>(reinterpret_cast<const float*>(scratch + Shape::kKeyRows), Shape::kWarp / 4,
                               min(tile.step, tile.chunks - first));
        if (first + tile.step >= tile.chunks)
            return merged.template store<T>(p, Rows(p, tile.seq, tile.kv_head), tile.row0);
        merged.keep(merged_so_far);
        __syncthreads();  // before the rings are filled again
    }
    if (threadIdx.x == 0) {
        unsigned* counter = reinterpret_cast<unsigned*>(tile.partial<D>(p, 0) + D + 2);
        const unsigned blocks = static_cast<unsigned>(ceil_div(tile.chunks, tile.width));
        tile.is_last = atomic_add_acq_rel(counter, 1) + 1 == blocks;
        if (tile.is_last) *counter = 0;  // ready for the next call
    }
    __syncthreads();
    if (!tile.is_last) return;
    if (tile.num_rows <= 4)
        merge_tile<T, D, 32>(p, tile);
    else
        merge_tile<T, D, 8>(p, tile);
}

template <class T, int D>
__global__ void __launch_bounds__(kDecodeThreads, DecodeShape<D>::kBlocks)
    attention_decode_kernel(const AttentionKernelArgs p) {
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(DecodeTile, tile, [1]);
    const int4 list = p.work.array[p.work.list];  // AttentionListHead
    const int i = static_cast<int>(blockIdx.x);
    if (i >= list.y * p.num_kv_heads) return;
    const int number = i / p.num_kv_heads;  // the kv heads of an item are neighbours: they read the same block table
    const int4 item = p.work.array[list.x + number];
    if (warp_id() == 0) tile->find(p, item, i - number * p.num_kv_heads, list.z);
    __syncthreads();
    run_item<T, D>(p, *tile, item.z, smem);
}

template <class T, int D>
cudaError_t launch_decode(const AttentionKernelArgs& p, cudaStream_t stream) {
    using Shape = DecodeShape<D>;
    constexpr size_t kBytes = Shape::kQueries + attention_chunks_at_once * size_t{Shape::kWarp};
    const dim3 grid(static_cast<unsigned>(p.work.most_decode * p.num_kv_heads));
    return launch<attention_decode_kernel<T, D>>({grid, dim3(kDecodeThreads), kBytes, stream}, p);
}

cudaError_t launch_attention_decode(const AttentionKernelArgs& p, cudaStream_t stream) {
    return visit_dim(p.head_dim, [&](auto dim) {
        constexpr int D = decltype(dim)::value;
        return p.type == Type::bf16 ? launch_decode<bf16, D>(p, stream) : launch_decode<f16, D>(p, stream);
    });
}

}  // namespace infinilm::cuda
