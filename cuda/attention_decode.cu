// Attention of the sequences with few rows (query_len * group <= kDecodeRows): decode. One warp takes a tile of 16 rows
// and one chunk of 128 keys; the chunks are merged by their block, or through the workspace by the last block to
// arrive.
//
// Grid (rounds, num_kv_heads * row_tiles, num_seqs), 128 threads: `width` warps of a block take the `width` chunks of a
// round, all four merge. x covers the longest context, blocks beyond a sequence's own end at once; with x = 1 a block
// takes every round of its tile. Partial results [chunk][row][slot_stride] lie in the workspace behind the counters.
// Bytes: every key and value of the context once for each row tile (one in practice), 2 * context * head_dim * 2 per kv
// head, and 1 / 128 of that for each row, written and read as partial results. That is the floor: the mma of rows that
// are not there cost less than the wait for the keys. Every warp has a ring of cp.async stages of its own, no barrier.
// Idea: Flash-Decoding (Dao et al. 2023), with a fixed chunk instead of a fixed number of splits.
#include "attention.cuh"
#include "launch.cuh"

namespace infinilm::cuda {

constexpr int kDecodeThreads = 128;

template <int D>
struct DecodeShape {
    static constexpr int kUnits = D / 8, kKeys = D <= 64 ? 32 : 16, kPieces = kChunk / kKeys;  // keys of a stage
    static constexpr int kStages = D <= 128 ? 3 : 2, kStage = tile_elements<kUnits>(kKeys);
    static constexpr int kRing = kStages * kStage * 2, kPartial = kTileRows * slot_stride(D) * 4;  // bytes
    static constexpr int kOffsets = kChunk * 8;
    static constexpr int kWarp =
        kOffsets + (kRing > kPartial ? kRing : kPartial);  // partial results take the ring's place
    static constexpr int kQueries = tile_elements<kUnits>(kTileRows) * 2;
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

// What is merged so far of a tile: eight threads have a row, thread t of them columns 4 t .. of every 32.
template <int D>
struct Merged {
    static constexpr int kItems = ceil_div(D, 32);
    const int row = threadIdx.x / 8, column0 = threadIdx.x % 8 * 4;
    const bool active;
    float m = -INFINITY, l = 0.0f, o[kItems][4] = {};
    __device__ __forceinline__ explicit Merged(int num_rows) : active(row < num_rows) {}

    // count chunks in order; partial: the first one's rows, chunks chunk_stride apart.
    __device__ __forceinline__ void add(const float* partial, int64_t chunk_stride, int count) {
        if (!active) return;
        const float* from = partial + row * slot_stride(D);
#pragma unroll 4
        for (int chunk = 0; chunk < count; ++chunk, from += chunk_stride) {
            const float2 state = *reinterpret_cast<const float2*>(from + D);
            const Factors factors(m, state.x);
            l = factors.merge(l, state.y);
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
                const int column = column0 + 32 * i;
                if (D % 32 != 0 && column >= D) break;
                const float4 x = *reinterpret_cast<const float4*>(from + column);
                o[i][0] = factors.merge(o[i][0], x.x);
                o[i][1] = factors.merge(o[i][1], x.y);
                o[i][2] = factors.merge(o[i][2], x.z);
                o[i][3] = factors.merge(o[i][3], x.w);
            }
        }
    }
    template <class T>
    __device__ __forceinline__ void store(const AttentionKernelArgs& p, const Rows& rows, int row0) const {
        if (!active) return;
        T* to = static_cast<T*>(p.out) + rows.offset(row0 + row, p.out_stride, p.head_dim);
        const float inverse = inverse_weight(p, rows.head(row0 + row), m, l);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            const int column = column0 + 32 * i;
            if (column >= p.head_dim) break;
            *reinterpret_cast<uint2*>(to + column) =
                make_uint2(pack2<T>(finished(o[i][0], inverse), finished(o[i][1], inverse)),
                           pack2<T>(finished(o[i][2], inverse), finished(o[i][3], inverse)));
        }
    }
};

template <class T, int D>
__global__ void __launch_bounds__(kDecodeThreads) attention_decode_kernel(const AttentionKernelArgs p) {
    using Shape = DecodeShape<D>;
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(bool, is_last, [1]);
    const int seq = blockIdx.z, kv_head = blockIdx.y / p.row_tiles, row0 = blockIdx.y % p.row_tiles * kTileRows;
    const Rows rows(p, seq, kv_head);
    if (rows.count > kDecodeRows || row0 >= rows.count) return;
    const int num_rows = min(rows.count - row0, kTileRows), begin = rows.begin(row0),
              end = rows.end(row0 + num_rows - 1);
    const int first_chunk = begin / kChunk, chunks = ceil_div(end, kChunk) - first_chunk;
    const int rounds = ceil_div(chunks, p.width), warp = warp_id();
    if (static_cast<int>(blockIdx.x) >= rounds) return;

    const bool shared = rounds == 1 || gridDim.x == 1;  // between the blocks of the tile, or by this one alone
    const int64_t slot = static_cast<int64_t>(p.slot_rows) * slot_stride(D),
                  tile = int64_t{seq} * gridDim.y + blockIdx.y;
    float* slots = attention_slots(p.workspace) + tile * p.max_chunks * slot;
    T* queries = reinterpret_cast<T*>(smem);
    uint8_t* scratch = smem + Shape::kQueries;
    const KeyRows keys(p, seq, kv_head);
    copy_queries<kTileRows, Shape::kUnits>(queries, p, rows, row0);
    Merged<D> merged(num_rows);
    for (int round = blockIdx.x; round < rounds; round += gridDim.x) {
        const int first = round * p.width, chunk = first + warp, chunk_begin = (first_chunk + chunk) * kChunk;
        const bool active = warp < p.width && chunk < chunks;
        uint8_t* mine = scratch + warp * Shape::kWarp;
        const DecodeRing<T, D> ring{reinterpret_cast<T*>(mine + Shape::kOffsets), reinterpret_cast<int64_t*>(mine), p,
                                    chunk_begin, Span(begin, end, chunk_begin)};
        if (active) ring.start(keys);
        __syncthreads();  // the queries have come
        if (active)
            decode_chunk<T, D>(shared ? reinterpret_cast<float*>(ring.stages) : slots + chunk * slot, num_rows, ring,
                               queries, rows, row0, p.scale);
        __syncthreads();
        if (!shared) break;
        merged.add(reinterpret_cast<const float*>(scratch + Shape::kOffsets), Shape::kWarp / 4,
                   min(p.width, chunks - first));
        if (round + static_cast<int>(gridDim.x) < rounds) __syncthreads();  // before the rings are filled again
    }
    if (!shared) {
        if (threadIdx.x == 0) {
            unsigned* counter = attention_counters(p.workspace) + tile;
            *is_last = atomic_add_acq_rel(counter, 1) + 1 == static_cast<unsigned>(rounds);
            if (*is_last) *counter = 0;  // ready for the next call
        }
        __syncthreads();
        if (!*is_last) return;
        merged.add(slots, slot, chunks);
    }
    merged.template store<T>(p, rows, row0);
}

template <class T, int D>
cudaError_t launch_decode(const AttentionKernelArgs& p, unsigned rounds, cudaStream_t stream) {
    using Shape = DecodeShape<D>;
    const dim3 grid(rounds, static_cast<unsigned>(p.num_kv_heads * p.row_tiles), static_cast<unsigned>(p.num_seqs));
    const size_t bytes = Shape::kQueries + static_cast<size_t>(p.width) * Shape::kWarp;
    return launch<attention_decode_kernel<T, D>>({grid, dim3(kDecodeThreads), bytes, stream}, p);
}

cudaError_t launch_attention_decode(const AttentionKernelArgs& p, unsigned rounds, cudaStream_t stream) {
    return visit_dim(p.head_dim, [&](auto dim) {
        constexpr int D = decltype(dim)::value;
        return p.type == Type::bf16 ? launch_decode<bf16, D>(p, rounds, stream)
                                    : launch_decode<f16, D>(p, rounds, stream);
    });
}

}  // namespace infinilm::cuda
