// linear for many tokens on Hopper: the bits of linear_prefill from the same packed weights, by wgmma.
// Mapping: clusters of two blocks, one block per SM, persistent, over tiles of 128 packed rows x 64 to 192 tokens
// (choose_hopper_tokens) in the order of tile_place(). The blocks of a cluster have the same tokens. One thread brings
// stages of 64 columns of k to shared memory: of the weight, units as they lie, by one tensor map of the packed bytes;
// of x a box with the 128-byte swizzle, half of its tokens for both blocks (multicast). What the weight, the tokens or
// k do not have comes as zeros. Two warpgroups multiply 64 rows each: wgmma's A in registers has the fragments of
// mma.m16n8k16 (ptx.cuh), so 16-byte reads fetch it, for two steps while two others are multiplied. Quantised weights
// are widened on that way. Outputs are left in shared memory, in T, and three warps that do nothing else bring them to
// memory with what is between (activation, residual), while the next tile is multiplied. Slices of k are chains of
// their own, as everywhere (linear.cuh): twice the accumulators, hence tiles of 192 tokens at most. wgmma adds the
// products of a step as mma does, so rows have the bits of linear_prefill and linear_decode. Bytes: the weight once for
// each 8 blocks of tokens, x once from memory, then both from L2: 28 KB an SM for a stage of 768 cycles of wgmma (192
// tokens). Floor: 2 n k num_tokens / peak of wgmma. Next come the bytes from L2 and the power the GPU may draw
// (docs/kernels.md). Alignment as in kernels.h. Ideas: pranjalssh/fast.cu (matmul_12: persistent, warp-specialised,
// clusters), the register-A wgmma of CUTLASS's mixed-input GEMM, IST-DASLab/marlin (weights as fragments).
#pragma once

#include "launch.cuh"
#include "linear_tile.cuh"
#include "ptx_sm90.cuh"

namespace infinilm::cuda {

constexpr int kHopperThreads = 384, kBoxSteps = 4, kBoxColumns = 16 * kBoxSteps, kClusterBlocks = 2;
constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers, kWriterWarps = 3;
constexpr int kHalfRows = kTileRows / kConsumers,
              kHalfTiles = kRowTiles / kConsumers;  // of a warpgroup that multiplies
constexpr int kHopperBytes = 226 * 1024;            // of shared memory, but for the barriers

template <class F, int kTokens>
struct HopperShape {
    static constexpr int kUnits = kBoxSteps / F::kUnitSteps, kTileBytes = kUnits * unit_bytes_of<F>;  // of a stage
    static constexpr int kWeightBytes = kRowTiles * kTileBytes, kTokenBytes = kTokens * kBoxColumns * 2;
    static constexpr int kTokenOffset = (kWeightBytes + 1023) / 1024 * 1024;
    static constexpr int kStageBytes = kTokenOffset + kTokenBytes;
    static constexpr int kHalfBytes = kTokens * kHalfRows * 2;  // of the outputs
    static constexpr int kMostStages = (kHopperBytes - kConsumers * kHalfBytes) / kStageBytes;
    static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
    static constexpr int kSmemBytes = kStages * kStageBytes + kConsumers * kHalfBytes;
    // Of a thread that multiplies, and of another one: (2 x 224 + 56) x 128 <= 65536.
    static constexpr int kSums = kTokens / 2 * (F::kScales > 0 ? 3 : 2);
    static constexpr int kConsumerRegisters = kSums > 176 ? 224 : kSums > 128 ? 208 : 200;
    static constexpr int kOtherRegisters = 504 - kConsumers * kConsumerRegisters;
};

// The ring of stages as each side walks it: the stage that comes next, and how often the ring has been walked.
template <int kStages, int kStageBytes>
struct StageRing {
    uint64_t *full, *empty;  // [kStages]: bytes have arrived; the warps that read, of both blocks, have done so
    uint8_t* smem;
    ClusterBarriers released;  // empty, of the block whose rank is this lane, for as many lanes as there are blocks
    int index = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ uint8_t* stage() const { return smem + index * kStageBytes; }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + index, parity); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty + index, parity ^ 1); }
    __device__ __forceinline__ void advance() {
        if (++index == kStages) index = 0, parity ^= 1;
    }
    // By a whole warp: it needs a stage no more.
    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        if (released) mbarrier_arrive_cluster(released, stage);
    }
};

// One thread: all stages of a tile. What the weight, the tokens or k do not have comes as zeros. Each block of the
// cluster brings its own weights, and its half of the tokens to both.
template <class F, int kTokens, class Ring>
__device__ __forceinline__ void produce(const TensorMap& weights, const TensorMap& x, Ring& ring, int stages, int tile,
                                        int token, uint32_t rank) {
    using Shape = HopperShape<F, kTokens>;
    constexpr int kHalf = kTokens / kClusterBlocks;
    for (int i = 0; i < stages; ++i, ring.advance()) {
        uint8_t* stage = ring.stage();
        uint64_t* full = ring.full + ring.index;
        ring.wait_empty();
        mbarrier_arrive_expect_tx(full, Shape::kWeightBytes + Shape::kTokenBytes);
        tensor_load_2d(stage, weights, i * (Shape::kTileBytes / 8), tile, full);
        tensor_load_2d_multicast(stage + Shape::kTokenOffset + static_cast<int>(rank) * kHalf * kBoxColumns * 2, x,
                                 i * kBoxColumns, token + static_cast<int>(rank) * kHalf, full,
                                 (1 << kClusterBlocks) - 1);
    }
}

// A warpgroup's 64 rows x kTokens of a tile. row_tile: this warp's of the 8 tiles of 16 rows. Steps beyond k are zeros.
template <class T, int kTokens, class Ring>
__device__ __forceinline__ void consume(Ring& ring, int row_tile, int steps, float (&totals)[kTokens / 2]) {
    using Shape = HopperShape<AsType, kTokens>;
    // The zeros are never added to anything, but ptxas before 12.9 lets no wgmma overlap another one where registers of
    // the accumulator may be undefined.
    float sums[kTokens / 2] = {};
    uint32_t a[kBoxSteps][4];  // two pairs of steps: one is multiplied while the other is fetched
    auto load_pair = [&](int step) {
#pragma unroll
        for (int i = step; i < step + 2; ++i) {
            Unit<AsType> unit;
            unit.load_shared(ring.stage() + row_tile * Shape::kTileBytes + i * 512);
            AsType::fragment<T>(a[i], unit, 0);
        }
    };
    int accumulate = 0, slice = 0, end = 0, previous = ring.index;
    auto begin_slice = [&] {  // empty ones are skipped: they would add zero
        const int begin = end;
        while (end == begin && slice < kSlices) end = slice_begin(++slice, steps);
        accumulate = 0;
    };
    auto end_slice = [&] {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) totals[i] += sums[i];
        begin_slice();
    };
    begin_slice();
    ring.wait_full();
    load_pair(0);
    for (int first = 0; first < steps; first += kBoxSteps) {
        const uint64_t b = matrix_descriptor_128(ring.stage() + Shape::kTokenOffset);
        const int last = first + kBoxSteps, index = ring.index;
        auto multiply = [&](int i) {
            Wgmma<kTokens, T>::multiply(sums, a[i], b + i * 2, accumulate);  // descriptors count in 16 bytes
            accumulate = 1;
        };
        auto multiply_pair = [&](int i) {
            wgmma_fence();
            multiply(i), multiply(i + 1);
            wgmma_commit();
            wgmma_wait<1>();  // the pair before is done
        };
        auto release_previous = [&] {
            if (first > 0) ring.release(previous);
            previous = index;
            load_pair(2);
        };
        auto load_next = [&] {
            ring.advance();
            if (last >= steps) return;
            ring.wait_full();
            load_pair(0);
        };
        if (end >= last) {
            multiply_pair(0);
            release_previous();
            multiply_pair(2);
            load_next();
            if (end == last) {
                wgmma_wait<0>();
                end_slice();
            }
        } else {  // slices end inside the stage
            wgmma_wait<0>();
            release_previous();
#pragma unroll
            for (int i = 0; i < kBoxSteps; ++i) {
                wgmma_fence();
                multiply(i);
                wgmma_commit();
                wgmma_wait<0>();
                if (first + i + 1 == end) end_slice();
            }
            load_next();
        }
    }
    wgmma_wait<0>();  // nothing is in flight, as the last slice has ended; but ptxas does not know
    ring.release(previous);
}

// The same of quantised weights: two steps at a time, whose fragments are made while the two before are multiplied.
template <class T, class F, int kTokens, class Ring>
__device__ __forceinline__ void consume_quantised(Ring& ring, int row_tile, int units, float (&totals)[kTokens / 2]) {
    using Shape = HopperShape<F, kTokens>;
    constexpr int kUnitTurns = F::kUnitSteps / 2, kStageTurns = kBoxSteps / 2;
    constexpr bool kGroups = F::kScales > 0;  // products is then the chain of one turn, else that of the slice
    float products[kTokens / 2] = {}, sums[kGroups ? kTokens / 2 : 1] = {};
    uint32_t a[2][2][4];
    typename F::Scales scales[2] = {};
    auto load = [&](int at) {  // turn `at` of the stage, to a[at]
        Unit<F> unit;
        unit.load_shared(ring.stage() + row_tile * Shape::kTileBytes + at / kUnitTurns * unit_bytes_of<F>);
#pragma unroll
        for (int s = 0; s < 2; ++s) F::template fragment<T>(a[at][s], unit, at % kUnitTurns * 2 + s);
        if constexpr (kGroups) scales[at] = F::scales_of(unit, at);
    };
    const int turns = units * kUnitTurns;
    int accumulate = 0, end = slice_end(0, units);
    ring.wait_full();
    load(0);
    for (int first = 0; first < turns; first += kStageTurns) {
        const uint64_t b = matrix_descriptor_128(ring.stage() + Shape::kTokenOffset);
        const int index = ring.index;
#pragma unroll
        for (int i = 0; i < kStageTurns; ++i) {
            const int turn = first + i;
            if (turn >= turns) break;
            wgmma_fence();
            Wgmma<kTokens, T>::multiply(products, a[i][0], b + i * 4, accumulate);  // descriptors count in 16 bytes
            Wgmma<kTokens, T>::multiply(products, a[i][1], b + i * 4 + 2, 1);
            wgmma_commit();
            if (turn + 1 < turns) {
                if (i == kStageTurns - 1) ring.advance(), ring.wait_full();
                load((i + 1) % kStageTurns);
            }
            wgmma_wait<0>();
            if constexpr (kGroups) {
#pragma unroll
                for (int j = 0; j < kTokens / 2; j += 4)
                    add_scaled(reinterpret_cast<float (&)[4]>(sums[j]), reinterpret_cast<float (&)[4]>(products[j]),
                               scales[i]);
            }
            accumulate = kGroups ? 0 : 1;
            if (turn % kUnitTurns != kUnitTurns - 1 || turn / kUnitTurns + 1 != end) continue;
            end = slice_end(end, units), accumulate = 0;
#pragma unroll
            for (int j = 0; j < kTokens / 2; ++j) {
                totals[j] += kGroups ? sums[j] : products[j];
                if constexpr (kGroups) sums[j] = 0.0f;
            }
        }
        ring.release(index);
    }
    ring.advance();
}

// ---- outputs: a warpgroup leaves 64 rows x kTokens in T in a buffer [kTokens][64], whose pieces of 8 rows change
// places so that eight tokens lie in all banks; other warps bring them from there to memory.

template <class T>
__device__ __forceinline__ T* output_piece(uint8_t* buffer, int token, int piece) {
    return reinterpret_cast<T*>(buffer + token * (kHalfRows * 2) + (piece ^ token % 8) * 16);
}

// A warp's 16 rows to the buffer. tile: of these rows in the weight; warp: of the warpgroup.
template <class T, class F, int kTokens>
__device__ __forceinline__ void stage_outputs(const LinearArgs& args, const float (&sums)[kTokens / 2], uint8_t* buffer,
                                              int tile, int warp) {
    const RowEnd<F> end(args, tile);
    const int lane = opaque(static_cast<int>(lane_id())), half = lane / 8 % 2;
    uint8_t* to = reinterpret_cast<uint8_t*>(output_piece<T>(buffer, lane / 16 * 8 + lane % 8, 2 * warp + half));
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = sums + 4 * (j + i / 2) + 2 * (i % 2);
            r[i] = pack2<T>(end(pair[0], i % 2), end(pair[1], i % 2));
        }
        stmatrix_x4_trans(to + j * 8 * kHalfRows * 2, r);
    }
}

// Of 8 numbers in T: activation(gate) * up, and y + residual.
template <class T>
__device__ __forceinline__ uint4 act_mul8(Activation activation, const T* gates, const T* ups) {
    const uint4 gate = *reinterpret_cast<const uint4*>(gates), up = *reinterpret_cast<const uint4*>(ups);
    const uint32_t g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        float y[4] = {unpack_low<T>(g[i]), unpack_high<T>(g[i]), unpack_low<T>(g[i + 1]), unpack_high<T>(g[i + 1])};
        float f[4] = {unpack_low<T>(u[i]), unpack_high<T>(u[i]), unpack_low<T>(u[i + 1]), unpack_high<T>(u[i + 1])};
        act_mul4(activation, y, f);
        out[i] = pack2<T>(y[0], y[1]), out[i + 1] = pack2<T>(y[2], y[3]);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}
template <class T>
__device__ __forceinline__ uint4 add8(uint4 y, uint4 residual) {
    float a[8], b[8];
    unpack8<T>(y, a), unpack8<T>(residual, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] += b[i];
    return pack8<T>(a);
}

// From the buffer to out, and what stands between them: activation(gate) * up, the residual. tile, token: the first of
// the buffer; thread: of kThreads. Residuals of kBatch tokens are on their way at a time.
template <class T, int kTokens, int kThreads, int kBatch>
__device__ __forceinline__ void write_half(const LinearArgs& args, uint8_t* buffer, int tile, int token, int thread) {
    const PackedWeight& w = args.weight;
    const bool gate_up = opaque(joins_gate_up(args)) != 0;  // so that what follows takes up no registers before
    thread = opaque(thread);
    const int pieces = gate_up ? 4 : 8, piece = thread % pieces, stride = kThreads / pieces;
    const int feature = gate_up ? 8 * (tile + piece) : feature_of_row(w, 16 * tile + 8 * piece);
    // Of gates and ups apart, rows beyond the last tile would be other features.
    if (feature >= (gate_up ? w.n / 2 : w.n) || tile + piece / (gate_up ? 1 : 2) >= num_tiles(w)) return;
    const int tokens = min(kTokens, args.num_tokens - token);
    const T* residual = static_cast<const T*>(args.residual) + token * args.residual_stride + feature;
    T* out = static_cast<T*>(args.out) + token * args.out_stride + feature;
    const int residual_stride = static_cast<int>(args.residual_stride), out_stride = static_cast<int>(args.out_stride);
    auto write = [&](auto batch, auto output_of) {
        constexpr int kAtOnce = decltype(batch)::value;
        for (int first = thread / pieces; first < tokens; first += kAtOnce * stride) {
            uint4 residuals[kAtOnce];
            if (args.residual)
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    if (const int t = first + i * stride; t < tokens)
                        residuals[i] = *reinterpret_cast<const uint4*>(residual + t * residual_stride);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int t = first + i * stride;
                if (t >= tokens) break;
                uint4 y = output_of(t);
                if (args.residual) y = add8<T>(y, residuals[i]);
                *reinterpret_cast<uint4*>(out + t * out_stride) = y;
            }
        }
    };
    if (gate_up)
        write(std::integral_constant<int, 1>{}, [&](int t) {
            return act_mul8<T>(args.activation, output_piece<T>(buffer, t, 2 * piece),
                               output_piece<T>(buffer, t, 2 * piece + 1));
        });
    else
        write(std::integral_constant<int, kBatch>{},
              [&](int t) { return *reinterpret_cast<const uint4*>(output_piece<T>(buffer, t, piece)); });
}

// float32 outputs of a warp's 16 rows (logits), where registers are left for it (HopperShape::kSums): each from the
// lane that has it: eight lanes write 32 bytes.
template <class T, class F, int kTokens>
__device__ __forceinline__ void write_float32(const LinearArgs& args, const float (&sums)[kTokens / 2], int tile,
                                              int token) {
    const PackedWeight& w = args.weight;
    const RowEnd<F> end(args, tile);
    if (tile >= num_tiles(w)) return;  // of gates and ups apart, it would be other features
    token += static_cast<int>(lane_id()) % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int feature = feature_of_row(w, 16 * tile + 8 * half + static_cast<int>(lane_id()) / 4);
        if (feature >= w.n) break;
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) {
            const int64_t t = token + i / 2 * 8 + i % 2;
            if (t >= args.num_tokens) break;
            float y = end(sums[i / 2 * 4 + 2 * half + i % 2], half);
            if (args.residual)
                y = rounded<T>(y) + to_float(static_cast<const T*>(args.residual)[t * args.residual_stride + feature]);
            static_cast<float*>(args.out)[t * args.out_stride + feature] = y;
        }
    }
}

template <class T, class F, int kTokens>
__global__ void __launch_bounds__(kHopperThreads, 1)
    linear_sm90_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ TensorMap weights,
                       const __grid_constant__ TensorMap x, int token_blocks) {
    grid_dependency_wait();
    using Shape = HopperShape<F, kTokens>;
    INFINILM_DYNAMIC_SHARED(smem);  // [kStages][kStageBytes], [kConsumers][kHalfBytes]
    INFINILM_SHARED(uint64_t, full, [Shape::kStages]);
    INFINILM_SHARED(uint64_t, empty, [Shape::kStages]);
    INFINILM_SHARED(uint64_t, staged, [kConsumers]);   // the outputs of a warpgroup are in its buffer
    INFINILM_SHARED(uint64_t, written, [kConsumers]);  // and are there no more
    if (threadIdx.x == 0) {
        for (int s = 0; s < Shape::kStages; ++s) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, kConsumerWarps * kClusterBlocks);
        }
        for (int i = 0; i < kConsumers; ++i) mbarrier_init(staged + i, 4), mbarrier_init(written + i, kWriterWarps);
        mbarrier_init_fence();
    }
    cluster_sync();
    const PackedWeight& w = args.weight;
    const int rank = static_cast<int>(blockIdx.x) % kClusterBlocks, group = static_cast<int>(threadIdx.x) / 128 - 1;
    const int pairs = ceil_div(row_blocks(w), kClusterBlocks), tiles = pairs * token_blocks;
    // The tile that the cluster computes in its turn number `turn`.
    auto tile_at = [](int turn) { return static_cast<int>(blockIdx.x + turn * gridDim.x) / kClusterBlocks; };
    uint8_t* outputs = smem + Shape::kStages * Shape::kStageBytes;
    StageRing<Shape::kStages, Shape::kStageBytes> ring{full, empty, smem, {}};
    auto first_tile = [&](const TilePlace& place) { return (place.row_block * kClusterBlocks + rank) * kRowTiles; };
    if (group < 0) {
        registers_decrease<Shape::kOtherRegisters>();
        if (threadIdx.x == 0) {
            tensor_prefetch(weights);
            tensor_prefetch(x);
            for (int turn = 0; tile_at(turn) < tiles; ++turn) {
                const TilePlace place = tile_place(tile_at(turn), pairs, token_blocks);
                produce<F, kTokens>(weights, x, ring, ceil_div(units_of<F>(w.k), Shape::kUnits), first_tile(place),
                                    place.token_block * kTokens, rank);
            }
        } else if (warp_id() > 0 && !args.out_float32) {
            for (int turn = 0; tile_at(turn + 1) < tiles; ++turn) {
                const TilePlace place = tile_place(tile_at(turn), pairs, token_blocks);
                for (int half = 0; half < kConsumers; ++half) {
                    mbarrier_wait(staged + half, turn % 2);
                    write_half<T, kTokens, 32 * kWriterWarps, (Shape::kOtherRegisters - 40) / 16>(
                        args, outputs + half * Shape::kHalfBytes, first_tile(place) + half * kHalfTiles,
                        place.token_block * kTokens, static_cast<int>(threadIdx.x) - 32);
                    __syncwarp();
                    if (lane_id() == 0) mbarrier_arrive(written + half);
                }
            }
        }
    } else {
        registers_increase<Shape::kConsumerRegisters>();
        const int row_tile = group * kHalfTiles + static_cast<int>(warp_id()) % 4;
        ring.released = lane_id() < kClusterBlocks ? cluster_barriers(empty, lane_id()) : ClusterBarriers{};
        int turn = 0;
        for (; tile_at(turn) < tiles; ++turn) {
            float totals[kTokens / 2] = {};
            if constexpr (F::kTurnSteps == 1)
                consume<T, kTokens>(ring, row_tile, num_steps(w.k), totals);
            else
                consume_quantised<T, F, kTokens>(ring, row_tile, units_of<F>(w.k), totals);
            const TilePlace place = tile_place(tile_at(turn), pairs, token_blocks);
            const int warp = opaque(static_cast<int>(threadIdx.x)) / 32 % 4;
            const int tile = first_tile(place) + group * kHalfTiles + warp;
            if constexpr (Shape::kSums <= 128) {
                if (args.out_float32) {
                    write_float32<T, F, kTokens>(args, totals, tile, place.token_block * kTokens);
                    continue;
                }
            }
            uint8_t* buffer = outputs + group * Shape::kHalfBytes;
            mbarrier_wait(written + group, turn % 2 ^ 1);
            stage_outputs<T, F, kTokens>(args, totals, buffer, tile, warp);
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(staged + group);
        }
        if (!args.out_float32) {  // the outputs of the last tile: there is nothing else to do
            const TilePlace place = tile_place(tile_at(turn - 1), pairs, token_blocks);
            const int thread = opaque(static_cast<int>(threadIdx.x)) % 128;
            mbarrier_wait(staged + group, (turn - 1) % 2);
            write_half<T, kTokens, 128, 4>(args, outputs + group * Shape::kHalfBytes,
                                           first_tile(place) + group * kHalfTiles, place.token_block * kTokens, thread);
        }
    }
    cluster_sync();  // no block's shared memory goes while the other may still arrive in it
}

template <class T, class F, int kTokens>
cudaError_t launch_sm90(const LinearArgs& args, int num_sms, cudaStream_t stream) {
    const PackedWeight& w = args.weight;
    using Shape = HopperShape<F, kTokens>;
    TensorMap weights, x;
    const uint64_t row_bytes = static_cast<uint64_t>(unit_bytes_of<F>) * units_of<F>(w.k);
    const TensorMapParams of_weights{w.data,
                                     row_bytes / 8,
                                     static_cast<uint64_t>(num_tiles(w)),
                                     row_bytes,
                                     Shape::kTileBytes / 8,
                                     kRowTiles,
                                     Swizzle::none,
                                     8};
    const TensorMapParams of_x{args.x,
                               static_cast<uint64_t>(w.k),
                               static_cast<uint64_t>(args.num_tokens),
                               static_cast<uint64_t>(args.x_stride) * sizeof(T),
                               kBoxColumns,
                               kTokens / kClusterBlocks};
    if (cudaError_t error = make_tensor_map(&weights, of_weights)) return error;
    if (cudaError_t error = make_tensor_map(&x, of_x)) return error;
    const int token_blocks = ceil_div(args.num_tokens, kTokens);
    const int tiles = ceil_div(row_blocks(w), kClusterBlocks) * token_blocks;
    const int clusters = max(1, min(tiles, num_sms / kClusterBlocks));
    LaunchConfig config{dim3(static_cast<unsigned>(clusters * kClusterBlocks)), dim3(kHopperThreads), Shape::kSmemBytes,
                        stream};
    config.cluster = kClusterBlocks;
    return launch<linear_sm90_kernel<T, F, kTokens>>(config, args, weights, x, token_blocks);
}

inline cudaError_t num_sms_of_device(int& num_sms) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    return cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
}

// Tokens of a tile. Fewer give more tiles, so that a product fills the GPU and the last tiles leave few SMs idle, but
// the time of a tile does not fall as fast: it was about as tokens + 100 on an H100 (docs/kernels.md).
inline int choose_hopper_tokens(const LinearArgs& a, int num_sms) {
    const int pairs = ceil_div(row_blocks(a.weight), kClusterBlocks), clusters = max(1, num_sms / kClusterBlocks);
    auto cost = [&](int tokens) {
        return int64_t{ceil_div(int64_t{pairs} * ceil_div(a.num_tokens, tokens), int64_t{clusters})} * (tokens + 100);
    };
    int best = 128;
    for (int tokens : {64, 176, 192})
        if (cost(tokens) < cost(best) && (tokens < best || !a.out_float32)) best = tokens;
    return best;
}

// linear_sm90 of a quantised weight: tiles of 128 tokens alone, for which weights are widened half as often.
template <class F>
cudaError_t linear_sm90_as(const LinearArgs& args, cudaStream_t stream) {
    if (F::kScales > 0 && args.out_float32) return linear_prefill(args, stream);  // there are no registers for it
    int num_sms = 0;
    if (cudaError_t error = num_sms_of_device(num_sms)) return error;
    return args.weight.type == Type::bf16 ? launch_sm90<bf16, F, 128>(args, num_sms, stream)
                                          : launch_sm90<f16, F, 128>(args, num_sms, stream);
}

}  // namespace infinilm::cuda
