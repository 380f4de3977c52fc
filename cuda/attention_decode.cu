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
    static constexpr int kOffsets = kChunk * 8;
    static constexpr int kWarp =
        kOffsets + (kRing > kPartial ? kRing : kPartial);  // partial results take the ring's place
    static constexpr int kQueries = tile_elements<kUnits>(kTileRows) * 2;
    static constexpr int kBlocks = D <= 64 ? 4 : D <= 128 ? 3 : 2;  // of an SM, for which there are registers
};

// A warp's ring: pieces 0 .. kPieces - 1 are the keys of its chunk, the rest the values.
template <class T, int D>
struct DecodeRing {
    using Shape = DecodeShape<D>;
    T* stages;
    int64_t* offsets;  // of the chunk's keys
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
                offsets + piece % Shape::kPieces * Shape::kKeys, 0, p.head_dim, lane_id());
        cp_async_commit();
    }
    __device__ __forceinline__ void start(const KeyRows& keys) const {
        keys.locate<32>(offsets, chunk_begin, visible, lane_id());
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

// One chunk, by one warp whose ring is started: leaves m, l and o of rows 0 .. num_rows - 1 in `partial`, rows
// slot_stride(D) apart, which may lie in the ring.
template <class T, int D>
__device__ __forceinline__ void decode_chunk(float* partial, int num_rows, const DecodeRing<T, D>& ring,
                                             const T* queries, const Rows& rows, int row0, float scale) {
    using Shape = DecodeShape<D>;
    constexpr int kKeys = Shape::kKeys, kPieces = Shape::kPieces, kUnits = Shape::kUnits;
    const int lane = lane_id();
    float scores[kChunk / 8][4] = {};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
        ring.next(piece);
        if (ring.needs(piece)) add_scores<T, kUnits, kKeys>(scores + piece * kKeys / 8, queries, ring.stage(piece));
    }
    int end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) end[h] = rows.end(min(row0 + lane / 4 + 8 * h, rows.count - 1)) - ring.chunk_begin;
    uint32_t weights[kChunk / 16][4];
    if (ring.p.score_cap > 0) cap_scores(scores, ring.p);
    const RowState row = softmax<T, false>(weights, scores, end, rows.window, scale);

    float out[D / 8][4] = {};
#pragma unroll
    for (int piece = kPieces; piece < 2 * kPieces; ++piece) {
        ring.next(piece);
        if (ring.needs(piece))
            add_values<T, kUnits, kKeys / 16, D / 16>(out, weights + (piece - kPieces) * kKeys / 16, ring.stage(piece),
                                                      0, 0);
    }
    __syncwarp();  // nobody reads the ring any more
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = lane / 4 + 8 * h;
        if (r >= num_rows) continue;
        float* to = partial + r * slot_stride(D);
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
            *reinterpret_cast<float2*>(to + 8 * j + lane % 4 * 2) = make_float2(out[j][2 * h], out[j][2 * h + 1]);
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
__device__ __forceinline__ void merge_tile(const AttentionKernelArgs& p, const Rows& rows, int row0, int num_rows,
                                           const float* partial, int chunks) {
    // On their way: as many bytes as find registers beside those of the chunks' arithmetic.
    constexpr int kItems = Merged<D, kThreads>::kItems,
                  kMost = D == 128  ? 16
                          : D <= 64 ? 8
                                    : 4,
                  kAhead = kItems < kMost ? kMost / kItems : 1;
    Merged<D, kThreads> merged(num_rows);
    merged.template add<kAhead>(partial, static_cast<int64_t>(num_rows) * slot_stride(D), chunks);
    merged.template store<T>(p, rows, row0);
}

// One item of the list, for one kv head, by the whole block.
template <class T, int D>
__device__ __forceinline__ void run_item(const AttentionKernelArgs& p, const int4 item, int kv_head, int width,
                                         uint8_t* smem, bool* is_last) {
    using Shape = DecodeShape<D>;
    const int seq = item.x, row0 = item.y, slot = item.w, warp = warp_id();
    const Rows rows(p, seq, kv_head);
    const int num_rows = min(rows.count - row0, kTileRows), begin = rows.begin(row0),
              end = rows.end(row0 + num_rows - 1);
    const int chunk0 = begin / kChunk, chunks = ceil_div(end, kChunk) - chunk0;
    const bool whole = slot < 0;
    const int64_t chunk_stride = static_cast<int64_t>(num_rows) * slot_stride(D);
    float* partial = static_cast<float*>(p.work.workspace) + static_cast<int64_t>(slot) * slot_stride(D) +
                     kv_head * chunks * chunk_stride;
    T* queries = reinterpret_cast<T*>(smem);
    uint8_t* scratch = smem + Shape::kQueries;
    const KeyRows keys(p, seq, kv_head);
    copy_queries<kTileRows, Shape::kUnits>(queries, p, rows, row0);
    // Of a tile that this block walks through alone, what is merged so far lies in the place of the last warp.
    const int step = whole && chunks > width ? attention_chunks_at_once - 1 : width;
    float* merged_so_far = reinterpret_cast<float*>(scratch + (attention_chunks_at_once - 1) * Shape::kWarp);
    for (int first = item.z;; first += step) {
        const int chunk = first + warp, chunk_begin = (chunk0 + chunk) * kChunk;
        const bool active = warp < step && chunk < chunks;
        uint8_t* mine = scratch + warp * Shape::kWarp;
        const DecodeRing<T, D> ring{reinterpret_cast<T*>(mine + Shape::kOffsets), reinterpret_cast<int64_t*>(mine), p,
                                    chunk_begin, Span(begin, end, chunk_begin)};
        if (active) ring.start(keys);
        __syncthreads();  // the queries have come
        if (active)
            decode_chunk<T, D>(whole ? reinterpret_cast<float*>(ring.stages) : partial + chunk * chunk_stride, num_rows,
                               ring, queries, rows, row0, p.scale);
        __syncthreads();
        if (!whole) break;
        Merged<D, kDecodeThreads / kTileRows> merged(num_rows);
        if (first > 0) merged.template add<1>(merged_so_far, 0, 1);
        merged.template add<1>(reinterpret_cast<const float*>(scratch + Shape::kOffsets), Shape::kWarp / 4,
                               min(step, chunks - first));
        if (first + step >= chunks) return merged.template store<T>(p, rows, row0);
        merged.keep(merged_so_far);
        __syncthreads();  // before the rings are filled again
    }
    if (threadIdx.x == 0) {
        unsigned* counter = reinterpret_cast<unsigned*>(partial + D + 2);
        *is_last = atomic_add_acq_rel(counter, 1) + 1 == static_cast<unsigned>(ceil_div(chunks, width));
        if (*is_last) *counter = 0;  // ready for the next call
    }
    __syncthreads();
    if (!*is_last) return;
    if (num_rows <= 4)
        merge_tile<T, D, 32>(p, rows, row0, num_rows, partial, chunks);
    else
        merge_tile<T, D, 8>(p, rows, row0, num_rows, partial, chunks);
}

template <class T, int D>
__global__ void __launch_bounds__(kDecodeThreads, DecodeShape<D>::kBlocks)
    attention_decode_kernel(const AttentionKernelArgs p) {
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(bool, is_last, [1]);
    const int4 list = p.work.array[p.work.list];  // AttentionListHead
    const int i = static_cast<int>(blockIdx.x);
    if (i >= list.y * p.num_kv_heads) return;
    const int item = i / p.num_kv_heads;  // the kv heads of an item are neighbours: they read the same block table
    run_item<T, D>(p, p.work.array[list.x + item], i - item * p.num_kv_heads, list.z, smem, is_last);
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
