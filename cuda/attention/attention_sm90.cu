// Attention of prompts on Hopper: what attention_prefill.cu does, bit for bit, by wgmma.
//
// Persistent blocks, one to an SM, over the tiles of the list of work (128 rows of a (sequence, kv head), those with
// most keys first). Four warps bring keys and values by TMA: a stage of their ring is the keys or the values of a
// chunk, in boxes of (a part of) a block of the cache; keys that no row sees come as zeros. Two warpgroups have 64 rows
// each. A warpgroup has all scores of a chunk in registers (Q K^T, both from shared memory), makes them weights by the
// arithmetic of attention.cuh, and multiplies these, from registers, by 64 columns of values at a time, which it merges
// into the totals; the keys of the next chunk are multiplied meanwhile. The sums of weights are eight more columns of
// the first product, whose values are ones. Heads of up to 64 columns run as 64, others as 128: zeros change no bit.
//
// Bytes: q and out once; keys and values from L2 once for every 128 rows, 128 operations a byte. Floor: 4 * head_dim
// operations for each (row, visible key) at the rate of wgmma; for narrow heads 2^x comes next: 16 a cycle and SM, so
// that those of 128 keys take as long as the products of head_dim 64. Ideas: FlashAttention-3 (Shah et al. 2024).
#include <algorithm>

#include "cuda/attention/attention.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx_sm90.cuh"

namespace infinilm::cuda {

// ptxas before 12.8 would wait for each wgmma of heads of 128 columns ("serialized"). What it builds takes mma.sync,
// which gives the same bits.
#if defined(__CUDACC__) && __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 8

cudaError_t attention_sm90(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    return attention(a, work, stream);
}
cudaError_t attention_sm90_in_turns(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    return attention(a, work, stream);
}

#else

constexpr int kSm90Groups = 2, kSm90Threads = 128 * (kSm90Groups + 1), kGroupRows = 64;
constexpr int kBoxColumns = 64, kPartBytes = kChunk * kBoxColumns * 2, kMostParts = 12;
constexpr int kLoaders = 4, kLoaderKeys = kChunk / kLoaders;  // warps, and keys of each
constexpr int kStepBytes = 16 * kBoxColumns * 2;              // of 16 keys of a part
constexpr int kGroupBytes = kGroupRows * kBoxColumns * 2;     // of a warpgroup's queries, 64 columns
// A block has the registers that it was launched with, and setmaxnreg waits for ever for what is beyond.
constexpr int kLoaderRegisters = 40, kGroupRegisters = 232;
static_assert(kLoaderRegisters + kSm90Groups * kGroupRegisters <= 65536 / kSm90Threads / 8 * 8 * (kSm90Groups + 1));

// What a block has in shared memory: a ring of stages, each the keys or the values of a chunk, in parts of 64 columns;
// ones as the values of 16 keys; queries [warpgroup][part].
template <int D>
struct Sm90Shape {
    static constexpr int kParts = ceil_div(D, kBoxColumns);
    static constexpr int kStages = kMostParts / kParts, kStageBytes = kParts * kPartBytes;
    static constexpr int kOnes = kStages * kStageBytes, kQueries = kOnes + kStepBytes;
    static constexpr int kBytes = kQueries + kSm90Groups * kParts * kGroupBytes;
};

// The tile of rows that a block has in its n-th turn. Turns go through the list forwards and backwards, so that no
// block has the longer tile each time.
struct Sm90Tile {
    int seq, kv_head, row0;
    bool exists;
    __device__ __forceinline__ Sm90Tile(const AttentionKernelArgs& p, int turn) {
        const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
        const int i = turn * blocks + (turn % 2 ? blocks - 1 - block : block);
        exists = i < p.work.num_prefill * p.num_kv_heads;
        const int number = i / p.num_kv_heads;
        const int4 item = p.work.array[p.work.prefill_begin + (exists ? number : 0)];  // AttentionPrefillItem
        seq = item.x, kv_head = i - number * p.num_kv_heads, row0 = item.y * kSm90Groups * kGroupRows;
    }
};

using SlidingRows = RowsOf<SlidingFirstKey>;

// The keys that any of rows [row0, row0 + count) sees, none if these rows are not there; and the chunks of the keys.
struct RowKeys {
    int begin, end;
    __device__ __forceinline__ RowKeys(const SlidingRows& rows, int row0, int count)
        : begin(rows.begin(min(row0, rows.count - 1))),
          end(row0 < rows.count ? rows.end(min(row0 + count, rows.count) - 1) : 0) {}
    __device__ __forceinline__ int first_chunk() const { return begin / kChunk; }
    __device__ __forceinline__ int end_chunk() const { return ceil_div(end, kChunk); }
};

// The ring of stages as all sides walk it: `fill` counts stages from the start of the kernel. Keys are even, values
// odd.
template <int D>
struct Sm90Ring {
    static constexpr unsigned kStages = Sm90Shape<D>::kStages;
    static_assert(kStages >= 2, "see Sm90Turns");
    uint64_t *full, *empty;  // [kStages]: bytes have arrived; the warps that read have done so
    uint8_t* stages;
    __device__ __forceinline__ uint8_t* stage(unsigned fill) const {
        return stages + fill % kStages * Sm90Shape<D>::kStageBytes;
    }
    __device__ __forceinline__ void wait_full(unsigned fill) const {
        mbarrier_wait(full + fill % kStages, fill / kStages % 2);
    }
    __device__ __forceinline__ void wait_empty(unsigned fill) const {
        mbarrier_wait(empty + fill % kStages, fill / kStages % 2 ^ 1);
    }
    __device__ __forceinline__ void release(unsigned fill) const {  // by a whole warp
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(empty + fill % kStages);
    }
};

// ---- four warps that load: a quarter of the keys of every stage each, a box by each lane that there are boxes for
// ------

struct Sm90Maps {
    TensorMap keys, values;  // [rows of KeyRows, head_dim]
    int box_rows;            // a power of two, of which block_size is a multiple
};

// Where a row sees a part of a box of a warp, sets those keys of the box to zero that no row sees: NaN may lie there,
// and a weight of 0 times NaN is not 0.
template <int kParts>
__device__ __forceinline__ void clear_unseen(uint8_t* stage, int first_key, Span visible, int box_rows) {
    const int key = first_key + static_cast<int>(lane_id());
    const int box = key & -box_rows;
    if (visible.meets(box, box_rows) && !visible.meets(key, 1))
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll 1
            for (int i = 0; i < kBoxColumns * 2; i += 16)
                *reinterpret_cast<uint4*>(stage + part * kPartBytes + key * kBoxColumns * 2 + i) =
                    make_uint4(0, 0, 0, 0);
    fence_proxy_async();
    __syncwarp();
}

// ragged: a barrier of this warp.
template <int D>
__device__ __forceinline__ void load_tiles(const AttentionKernelArgs& p, const Sm90Maps& maps, const Sm90Ring<D>& ring,
                                           uint64_t* ragged) {
    constexpr int kParts = Sm90Shape<D>::kParts;
    const int box_rows = maps.box_rows, lane = static_cast<int>(lane_id());
    const int first_key = static_cast<int>(warp_id()) * kLoaderKeys;
    const int key = first_key + lane / kParts * box_rows, part = lane % kParts;  // of this lane's box
    const bool has_box = key < first_key + kLoaderKeys;
    unsigned fill = 0, ragged_parity = 0;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        const Sm90Tile tile(p, turn);
        if (!tile.exists) break;
        const RowKeys seen(SlidingRows(p, tile.seq, tile.kv_head), tile.row0, kSm90Groups * kGroupRows);
        const KeyRows keys(p, tile.seq, tile.kv_head);
        // The box's row in the cache, or one that there is not.
        auto find_box = [&](int chunk) {
            return has_box && Span(seen.begin, seen.end, chunk * kChunk).meets(key, box_rows)
                       ? keys.row(chunk * kChunk + key)
                       : -box_rows;
        };
        int next = find_box(seen.first_chunk());
#pragma unroll 1
        for (int chunk = seen.first_chunk(); chunk < seen.end_chunk(); ++chunk) {
            const Span visible(seen.begin, seen.end, chunk * kChunk);
            const int row = next;
            next = find_box(chunk + 1);  // on its way while these are copied
            const bool is_ragged = ((visible.begin | visible.end) & (box_rows - 1)) != 0;
#pragma unroll
            for (int is_value = 0; is_value < 2; ++is_value, ++fill) {
                uint8_t* stage = ring.stage(fill);
                uint64_t *full = ring.full + fill % ring.kStages, *arrived = is_value && is_ragged ? ragged : full;
                ring.wait_empty(fill);
                if (lane == 0) mbarrier_arrive_expect_tx(arrived, kParts * kLoaderKeys * kBoxColumns * 2);
                __syncwarp();
                if (has_box)
                    tensor_load_2d(stage + part * kPartBytes + key * kBoxColumns * 2,
                                   is_value ? maps.values : maps.keys, part * kBoxColumns, row, arrived);
                __syncwarp();
                if (!is_value || !is_ragged) continue;
                mbarrier_wait(ragged, ragged_parity);
                ragged_parity ^= 1;
                clear_unseen<kParts>(stage, first_key, visible, box_rows);
                if (lane == 0) mbarrier_arrive(full);
            }
        }
    }
}

// ---- warpgroups that multiply ------------------------------------------------------------------------------------

// The place of 8 columns of a warpgroup's queries, or of its outputs, swizzled as TMA would.
__device__ __forceinline__ uint8_t* query_place(uint8_t* queries, int row, int unit) {
    return queries + unit / 8 * kGroupBytes + row * kBoxColumns * 2 + (unit % 8 ^ (row & 7)) * 16;
}

// A warp's 16 rows from row0 on, which are rows first .. of the warpgroup.
template <class T, int D>
__device__ __forceinline__ void load_queries(uint8_t* queries, int first, const AttentionKernelArgs& p,
                                             const SlidingRows& rows, int row0) {
    constexpr int kUnits = D / 8;
    for (int i = static_cast<int>(lane_id()); i < kTileRows * kUnits; i += 32) {
        const int r = i / kUnits, unit = i % kUnits, row = row0 + r;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < rows.count && unit * 8 < p.head_dim)
            v = load_readonly_16(static_cast<const T*>(p.q) + rows.offset(row, p.q_stride, p.head_dim) + unit * 8);
        *reinterpret_cast<uint4*>(query_place(queries, first + r, unit)) = v;
    }
}

// A descriptor of what begins so many bytes further on, and of a `leading` that is so many bytes less. Nothing carries
// into its upper half.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int bytes, int less_leading = 0) {
    const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes / 16) -
                         (static_cast<uint32_t>(less_leading / 16) << 16);
    return (descriptor >> 32 << 32) | low;
}

// Starts scores = Q K^T of a chunk, whose keys are stage `fill`.
template <class T, int D>
__device__ __forceinline__ void start_scores(float (&scores)[kChunk / 2], const uint8_t* queries,
                                             const Sm90Ring<D>& ring, unsigned fill) {
    ring.wait_full(fill);
    wgmma_hold(scores);
    wgmma_fence();
    const uint64_t a = matrix_descriptor_128(queries), b = matrix_descriptor_128(ring.stage(fill));
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        const int part = k / kBoxColumns, column = k % kBoxColumns * 2;
        Wgmma<kChunk, T>::multiply(scores, further(a, part * kGroupBytes + column),
                                   further(b, part * kPartBytes + column), k > 0);
    }
    wgmma_commit();
}

// Starts out = weights V of a chunk and kColumns columns; from 64 on these are ones.
template <class T, int kColumns>
__device__ __forceinline__ void start_outputs(float (&out)[kColumns / 2], const uint32_t (&weights)[kChunk / 16][4],
                                              const uint8_t* part, const uint8_t* ones) {
    wgmma_hold(out);
    wgmma_fence();
    const uint64_t b = matrix_descriptor(part, static_cast<uint32_t>(ones - part), 1024, Layout::swizzle_128);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
        Wgmma<kColumns, T>::template multiply<true>(out, weights[step],
                                                    further(b, step * kStepBytes, step * kStepBytes), step > 0);
    wgmma_commit();
}

// Turns of the two warpgroups at the tensor cores: one starts its products while the other has its softmax, as in
// FlashAttention-3. Neither can wait for ever:
// - Both walk through the chunks of the same tiles and take a turn for each, chunks that they skip included, so
//   that each has as many turns as the other, by construction.
// - A turn begins when the other warpgroup has ended one more than before: turn n of the first waits for turn n - 1 of
//   the second, and that for turn n - 1 of the first. This order is one line, and turn 0 waits for nothing (start()).
// - Within a turn a warpgroup waits for one thing more, the keys of the next chunk: stage f + 2 of the ring, where the
//   turn's chunk has stages f and f + 1. They come once both have given stage f + 2 - kStages back. The other warpgroup
//   has ended the turn of the chunk before, and gives back all up to stage f without another turn.
template <bool kTaken>  // else each warpgroup goes on as it can
struct Sm90Turns {
    static constexpr int kFirst = 1 + kSm90Groups;  // barrier of the first warpgroup's turns, behind those of `attend`
    // Found again each time: there is no register for it.
    static __device__ __forceinline__ int group() { return static_cast<int>(opaque(threadIdx.x)) / 128 - 1; }
    // Before the first tile: the second warpgroup gives the first one its first turn.
    __device__ __forceinline__ void start() const {
        if (kTaken && group() == 1) named_barrier_arrive(kFirst, 128 * kSm90Groups);
    }
    // Behind the last: the first warpgroup takes in the last end, so that no barrier is left with threads at it.
    __device__ __forceinline__ void finish() const {
        if (kTaken && group() == 0) begin();
    }
    __device__ __forceinline__ void begin() const {
        if (kTaken) named_barrier_sync(kFirst + group(), 128 * kSm90Groups);
    }
    __device__ __forceinline__ void end() const {
        if (kTaken) named_barrier_arrive(kFirst + 1 - group(), 128 * kSm90Groups);
    }
};

// The rows of a lane, g and g + 8 of its warp's.
struct LaneRows {
    int end[2];                // of the keys that they see
    int first_full, end_full;  // chunks of which all rows of the warp see all keys
    RowState state[2];         // merged so far
    __device__ __forceinline__ LaneRows(const SlidingRows& rows, int row0) {
        const int last = rows.count - 1, row = row0 + static_cast<int>(lane_id()) / 4;
        end[0] = rows.end(min(row, last)), end[1] = rows.end(min(row + 8, last));
        first_full = of_warp(ceil_div(rows.begin(min(row0 + kTileRows - 1, last)), kChunk));
        end_full = of_warp(rows.end(min(row0, last)) / kChunk);
    }
};

template <class T>
__device__ __forceinline__ void weigh_chunk(uint32_t (&weights)[kChunk / 16][4], RowState (&now)[2],
                                            float (&scores)[kChunk / 2], const AttentionKernelArgs& p,
                                            const LaneRows& lane, int chunk) {
    const bool masks = chunk < lane.first_full || chunk >= lane.end_full;
#pragma unroll
    for (int piece = 0; piece < kChunk / kPiece; ++piece) {
        float (*of_piece)[4] = reinterpret_cast<float (&)[kChunk / 8][4]>(scores) + piece * kPiece / 8;
        if (p.cap > 0) cap_scores(of_piece, p);
        if (masks) {
            const int begin = chunk * kChunk + piece * kPiece, end[2] = {lane.end[0] - begin, lane.end[1] - begin};
            mask_scores(of_piece, end, kNoLimit, 0, 0, SlidingFirstKey(p));
        }
        add_weights<T>(weights, now, piece, of_piece, p.scale);
    }
}

// total[kFirst ..] = merged with kColumns columns of a chunk's outputs; total is scaled already.
template <int kColumns, int kFirst, int kTotals, int kOut>
__device__ __forceinline__ void add_outputs(float (&total)[kTotals], const float (&out)[kOut],
                                            const float (&factors)[2]) {
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j)
        total[kFirst / 2 + j] = __fmaf_rn(out[j], factors[j / 2 % 2], total[kFirst / 2 + j]);
}

// A warpgroup's tile.
template <class T, int D, bool kTurns>
__device__ __forceinline__ void attend(const AttentionKernelArgs& p, int turn, const Sm90Tile& tile,
                                       const Sm90Ring<D>& ring, const Sm90Turns<kTurns>& turns, unsigned& fill,
                                       uint8_t* queries, const uint8_t* ones, int group) {
    constexpr int kLeft = D < kBoxColumns ? D : kBoxColumns, kRight = D - kLeft;
    const SlidingRows rows(p, tile.seq, tile.kv_head);
    const int first = of_warp(static_cast<int>(warp_id())) % 4 * kTileRows, group_row0 = tile.row0 + group * kGroupRows;
    auto sync = [&] { named_barrier_sync(1 + group, 128); };
    load_queries<T, D>(queries, first, p, rows, group_row0 + first);
    fence_proxy_async();
    sync();

    const RowKeys block(rows, tile.row0, kSm90Groups * kGroupRows), seen(rows, group_row0, kGroupRows);
    LaneRows lane(rows, group_row0 + first);
    auto skip = [&](int chunks) {
        for (int i = 0; i < chunks; ++i, fill += 2) {
            turns.begin();
            turns.end();
            for (unsigned stage : {fill, fill + 1}) ring.wait_full(stage), ring.release(stage);
        }
    };
    const int end_chunk = of_warp(seen.end_chunk());
    int chunk = min(seen.first_chunk(), block.end_chunk());
    if (chunk >= end_chunk) {
        skip(block.end_chunk() - block.first_chunk());
        return;
    }
    skip(chunk - block.first_chunk());
    float total[D / 2] = {}, scores[kChunk / 2] = {};
    // The products of a chunk: first the left columns and the sums of weights, then the right columns.
    float left[kLeft / 2 + 4] = {};
    float (&right)[kRight > 0 ? kRight / 2 : 1] = reinterpret_cast<float (&)[kRight > 0 ? kRight / 2 : 1]>(left);
    uint32_t weights[kChunk / 16][4];
    float factors[2];  // of the chunk's sums, by row
    auto merge_left = [&] {
        wgmma_hold(left);
#pragma unroll
        for (int h = 0; h < 2; ++h) lane.state[h].l = __fmaf_rn(left[kLeft / 2 + 2 * h], factors[h], lane.state[h].l);
        add_outputs<kLeft, 0>(total, left, factors);
    };
    auto start_right = [&] {
        if constexpr (kRight > 0) start_outputs<T, kRight>(right, weights, ring.stage(fill + 1) + kPartBytes, ones);
    };
    auto merge_right = [&] {
        if constexpr (kRight > 0) wgmma_hold(right), add_outputs<kRight, kLeft>(total, right, factors);
    };
    start_scores<T, D>(scores, queries, ring, fill);
    wgmma_wait<0>();
    wgmma_hold(scores);
    ring.release(fill);
    for (;; ++chunk, fill += 2) {
        RowState now[2];
        weigh_chunk<T>(weights, now, scores, p, lane, chunk);
        // What Factors::merge does, in two steps. The first is mostly by 1, as the largest score of a chunk is seldom
        // larger than all before.
        float before[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Factors both(lane.state[h].m, now[h].m);
            before[h] = both.before, factors[h] = both.chunk;
        }
        if (__any_sync(0xffffffffu, before[0] != 1.0f || before[1] != 1.0f)) {
#pragma unroll
            for (int j = 0; j < D / 2; ++j) total[j] = __fmul_rn(total[j], before[j / 2 % 2]);
#pragma unroll
            for (int h = 0; h < 2; ++h) lane.state[h].l = __fmul_rn(lane.state[h].l, before[h]);
        }
        ring.wait_full(fill + 1);
        turns.begin();
        if (chunk + 1 == end_chunk) break;
        start_outputs<T, kLeft + 8>(left, weights, ring.stage(fill + 1), ones);
        start_scores<T, D>(scores, queries, ring, fill + 2);
        wgmma_wait<1>();
        merge_left();
        start_right();
        turns.end();
        wgmma_wait<0>();
        wgmma_hold(scores);
        merge_right();
        ring.release(fill + 1);
        ring.release(fill + 2);
    }
    start_outputs<T, kLeft + 8>(left, weights, ring.stage(fill + 1), ones);
    wgmma_wait<0>();
    merge_left();
    start_right();
    turns.end();
    wgmma_wait<0>();
    merge_right();
    ring.release(fill + 1);
    fill += 2;
    skip(block.end_chunk() - end_chunk);

    // By way of the place of the queries, of which every warp writes its own rows. What rows there are is found again:
    // in the loop above there is no register for that.
    sync();
    const Sm90Tile again(p, opaque(turn));
    const SlidingRows out_rows(p, again.seq, again.kv_head);
    const int g = static_cast<int>(lane_id()) / 4, row0 = again.row0 + group * kGroupRows + first;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = min(row0 + g + 8 * h, out_rows.count - 1);
        const float inverse = inverse_weight(p, out_rows.head(row), lane.state[h]);
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
            *reinterpret_cast<uint32_t*>(query_place(queries, first + g + 8 * h, j) + lane_id() % 4 * 4) =
                pack2<T>(finished(total[4 * j + 2 * h], inverse), finished(total[4 * j + 2 * h + 1], inverse));
    }
    __syncwarp();
    for (int i = static_cast<int>(lane_id()); i < kTileRows * D / 8; i += 32) {
        const int r = i / (D / 8), unit = i % (D / 8), row = row0 + r;
        if (row >= out_rows.count || unit * 8 >= p.head_dim) continue;
        *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + out_rows.offset(row, p.out_stride, p.head_dim) + unit * 8) =
            *reinterpret_cast<const uint4*>(query_place(queries, first + r, unit));
    }
    __syncwarp();
}

template <class T, int D, bool kTurns>
__global__ void __launch_bounds__(kSm90Threads, 1)
    attention_sm90_kernel(const __grid_constant__ AttentionKernelArgs p, const __grid_constant__ Sm90Maps maps) {
    using Shape = Sm90Shape<D>;
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(uint64_t, full, [Shape::kStages]);
    INFINILM_SHARED(uint64_t, empty, [Shape::kStages]);
    INFINILM_SHARED(uint64_t, ragged, [kLoaders]);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::kStages; ++i)
            mbarrier_init(full + i, kLoaders), mbarrier_init(empty + i, 4 * kSm90Groups);
        for (int i = 0; i < kLoaders; ++i) mbarrier_init(ragged + i, 1);
        mbarrier_init_fence();
    }
    const uint32_t ones = pack2<T>(1.0f, 1.0f);
    for (unsigned i = threadIdx.x; i < kStepBytes / 4; i += kSm90Threads)
        reinterpret_cast<uint32_t*>(smem + Shape::kOnes)[i] = ones;
    fence_proxy_async();
    __syncthreads();
    grid_dependency_wait();
    const Sm90Ring<D> ring{full, empty, smem};
    const int group = of_warp(static_cast<int>(threadIdx.x) / 128) - 1;
    if (group < 0) {
        registers_decrease<kLoaderRegisters>();
        load_tiles<D>(p, maps, ring, ragged + warp_id());
        return;
    }
    registers_increase<kGroupRegisters>();
    const Sm90Turns<kTurns> turns;
    turns.start();
    unsigned fill = 0;
    for (int turn = 0;; ++turn) {
        const Sm90Tile tile(p, turn);
        if (!tile.exists) break;
        attend<T, D, kTurns>(p, turn, tile, ring, turns, fill,
                             smem + Shape::kQueries + group * Shape::kParts * kGroupBytes, smem + Shape::kOnes, group);
    }
    turns.finish();
}

// Boxes are rows of one block each, as many as a power of two can be.
static int box_rows_of(int block_size) { return std::min(block_size & -block_size, kLoaderKeys); }

template <class T, int D>
cudaError_t launch_sm90(const AttentionKernelArgs& p, int num_sms, bool takes_turns, cudaStream_t stream) {
    Sm90Maps maps;
    maps.box_rows = box_rows_of(p.block_size);
    const struct {
        const void* cache;
        TensorMap* map;
    } both[2] = {{p.k_cache, &maps.keys}, {p.v_cache, &maps.values}};
    for (const auto& one : both) {
        // The cache has fewer rows; nothing behind it is read, as all boxes are in blocks of the table.
        const TensorMapParams params{one.cache,         static_cast<uint64_t>(p.head_dim),
                                     uint64_t{1} << 31, static_cast<uint64_t>(p.head_dim) * sizeof(T),
                                     kBoxColumns,       static_cast<uint32_t>(maps.box_rows)};
        if (cudaError_t error = make_tensor_map(one.map, params)) return error;
    }
    const int tiles = p.work.num_prefill * p.num_kv_heads;
    const LaunchConfig config{dim3(static_cast<unsigned>(tiles < num_sms ? tiles : num_sms)), dim3(kSm90Threads),
                              Sm90Shape<D>::kBytes, stream};
    return takes_turns ? launch<attention_sm90_kernel<T, D, true> >(config, p, maps)
                       : launch<attention_sm90_kernel<T, D, false> >(config, p, maps);
}

template <int D>
cudaError_t launch_sm90(const AttentionKernelArgs& p, int num_sms, bool takes_turns, cudaStream_t stream) {
    return p.type == Element::bf16 ? launch_sm90<bf16, D>(p, num_sms, takes_turns, stream)
                                   : launch_sm90<f16, D>(p, num_sms, takes_turns, stream);
}

static cudaError_t attend_sm90(const AttentionArgs& a, const AttentionWorkArgs& work, bool takes_turns,
                               cudaStream_t stream) {
    if (work.num_prefill == 0 || a.head_dim > 128 || a.value_dim < a.head_dim || a.block_size % 8 != 0 || a.chunked ||
        a.two_way || a.two_way_seqs || a.position_bias)
        return attention(a, work, stream);
    AttentionKernelArgs p(a, work);
    if (cudaError_t error = launch_decode_items(p, {}, stream)) return error;
    if (cudaError_t error = widen_prefill_keys(p, stream)) return error;
    int num_sms = 0;
    if (cudaError_t error = device_sms(num_sms)) return error;
    return p.head_dim <= 64 ? launch_sm90<64>(p, num_sms, takes_turns, stream)
                            : launch_sm90<128>(p, num_sms, takes_turns, stream);
}
cudaError_t attention_sm90(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    return attend_sm90(a, work, false, stream);
}
cudaError_t attention_sm90_in_turns(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    return attend_sm90(a, work, true, stream);
}

#endif

}  // namespace infinilm::cuda
