// What linear_sm90 and linear_split_sm90 share: how weights and x come to shared memory in stages of 64 columns of k,
// and how wgmma multiplies them. One thread brings a stage: of the weight, units as they lie, by one tensor map of the
// packed bytes; of x a box with the 128-byte swizzle. Two warpgroups multiply 64 rows each: wgmma's A in registers has
// the fragments of mma.m16n8k16 (ptx.cuh), so 16-byte reads fetch it, for two steps while two others are multiplied.
// Quantised weights are widened on that way. wgmma adds the products of a step as mma does, so rows have the bits of
// linear_prefill and linear_decode. Ideas: the register-A wgmma of CUTLASS's mixed-input GEMM, IST-DASLab/marlin
// (weights as fragments).
#pragma once

#include "cuda/core/ptx_sm90.cuh"
#include "cuda/linear/linear_tile.cuh"

namespace infinilm::cuda {

constexpr int kBoxSteps = 4, kBoxColumns = 16 * kBoxSteps;
constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;

// What a stage holds: units of each tile of rows, then x.
template <class F, int kTokens>
struct StageShape {
    static constexpr int kUnits = kBoxSteps / F::kUnitSteps, kTileBytes = kUnits * unit_bytes_of<F>;
    static constexpr int kWeightBytes = kRowTiles * kTileBytes, kTokenBytes = kTokens * kBoxColumns * 2;
    static constexpr int kTokenOffset = (kWeightBytes + 1023) / 1024 * 1024;
    static constexpr int kStageBytes = kTokenOffset + kTokenBytes;
};

// The ring of stages as each side walks it: the stage that comes next, and how often the ring has been walked.
template <int kStages, int kStageBytes>
struct StageRing {
    static constexpr int kCount = kStages;
    uint64_t *full, *empty;  // [kStages]: bytes have arrived; the warps that read have done so
    uint8_t* smem;
    ClusterBarriers released;  // empty, of a block that wants to know, another one in each lane; or none
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

// What one thread brings to shared memory: boxes of 64 columns, of the weight's rows from tile of 16 rows `tile` on and
// of x from `token` on, `boxes` of them from unit `begin` of k on. What the weight, the tokens or k do not have comes
// as zeros.
struct Boxes {
    int tile, token, begin, boxes;
};
template <class F, int kTokens>
struct StageSource {
    using Shape = StageShape<F, kTokens>;
    const TensorMap &weights, &x;
    // In a cluster whose blocks have the same rows or the same tokens, each brings a part to all of these: the part's
    // first tile and token, and the blocks; or none, a block brings all it needs.
    int own_tile, own_token;
    uint16_t same_rows, same_tokens;

    template <class Ring>
    __device__ __forceinline__ void load_weights(const Ring& ring, const Boxes& from, int i) const {
        mbarrier_arrive_expect_tx(ring.full + ring.index, Shape::kWeightBytes + Shape::kTokenBytes);
        load(ring.stage() + own_tile * Shape::kTileBytes, weights,
             from.begin * (unit_bytes_of<F> / 8) + i * (Shape::kTileBytes / 8), from.tile + own_tile,
             ring.full + ring.index, same_rows);
    }
    template <class Ring>
    __device__ __forceinline__ void load_x(const Ring& ring, const Boxes& from, int i) const {
        load(ring.stage() + Shape::kTokenOffset + own_token * kBoxColumns * 2, x,
             from.begin * F::kUnitSteps * 16 + i * kBoxColumns, from.token + own_token, ring.full + ring.index,
             same_tokens);
    }

private:
    static __device__ __forceinline__ void load(void* dst, const TensorMap& map, int column, int row, uint64_t* full,
                                                uint16_t blocks) {
        if (blocks)
            tensor_load_2d_multicast(dst, map, column, row, full, blocks);
        else
            tensor_load_2d(dst, map, column, row, full);
    }
};
// All of them, boxes_at(0) .. boxes_at(count - 1). Weights are no kernel's output: the first are asked for before the
// kernel in front has ended.
template <class F, int kTokens, class Ring, class BoxesAt>
__device__ __forceinline__ void produce(const StageSource<F, kTokens>& source, Ring& ring, int count,
                                        const BoxesAt& boxes_at) {
    const Boxes first = boxes_at(0);
    const int early = min(first.boxes, Ring::kCount);
    for (int i = 0; i < early; ++i, ring.advance()) source.load_weights(ring, first, i);
    grid_dependency_wait();
    ring.index = 0, ring.parity = 0;
    for (int i = 0; i < early; ++i, ring.advance()) source.load_x(ring, first, i);
    for (int at = 0; at < count; ++at) {
        const Boxes from = boxes_at(at);
        for (int i = at == 0 ? early : 0; i < from.boxes; ++i, ring.advance()) {
            ring.wait_empty();
            source.load_weights(ring, from, i);
            source.load_x(ring, from, i);
        }
    }
}

// A warpgroup's 64 rows x kTokens of a tile: the sums of one slice after the other, and end_slice() when they are
// there, but for those of the last one, which are left in `sums`. Slices without steps are passed over: zeros.
// row_tile: this warp's of the 8 tiles of 16 rows.
template <class T, int kTokens, class Ring, class EndSlice>
__device__ __forceinline__ void consume(Ring& ring, int row_tile, const SliceRange& slices, float (&sums)[kTokens / 2],
                                        const EndSlice& end_slice) {
    using Shape = StageShape<AsType, kTokens>;
    // The zeros are never added to anything, but ptxas before 12.9 lets no wgmma overlap another one where registers of
    // the accumulator may be undefined.
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
    uint32_t a[kBoxSteps][4];  // two pairs of steps: one is multiplied while the other is fetched
    auto load_pair = [&](int step) {
#pragma unroll
        for (int i = step; i < step + 2; ++i) {
            Unit<AsType> unit;
            unit.load_shared(ring.stage() + row_tile * Shape::kTileBytes + i * 512);
            AsType::fragment<T>(a[i], unit, 0);
        }
    };
    const int steps = slices.length();
    int accumulate = 0, slice = slices.first, end = 0, previous = ring.index;
    auto begin_slice = [&] {
        const int begin = end;
        while (end == begin && slice < slices.last) end = slices.end(slice++);
        accumulate = 0;
    };
    auto next_slice = [&] {
        end_slice();
        begin_slice();
    };
    if (steps == 0) return;
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
            if (end == last && last < steps) {
                wgmma_wait<0>();
                next_slice();
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
                if (first + i + 1 == steps) break;  // what follows in the stage is of no slice of these
                if (first + i + 1 == end) next_slice();
            }
            load_next();
        }
    }
    wgmma_wait<0>();  // nothing is in flight, as the last slice has ended; but ptxas does not know
    ring.release(previous);
}

template <bool kFirst, class A, class B>
__device__ __forceinline__ auto& first_if(A& a, B& b) {
    if constexpr (kFirst)
        return a;
    else
        return b;
}

// The same of quantised weights: two steps at a time, whose fragments are made while the two before are multiplied.
// With scales of groups these must have ended before the next begin, as they are the same accumulators; else they queue
// up.
template <class T, class F, int kTokens, class Ring, class EndSlice>
__device__ __forceinline__ void consume_quantised(Ring& ring, int row_tile, const SliceRange& slices,
                                                  float (&sums)[kTokens / 2], const EndSlice& end_slice) {
    using Shape = StageShape<F, kTokens>;
    constexpr int kUnitTurns = F::kUnitSteps / 2, kStageTurns = kBoxSteps / 2;
    constexpr bool kGroups = F::kScales > 0;  // products are then the chain of one turn, else that of the slice
    float group[kGroups ? kTokens / 2 : 1] = {};
    auto& products = first_if<kGroups>(group, sums);
    uint32_t a[2][2][4];
    typename F::Scales scales[2] = {};
    auto load = [&](int at) {  // turn `at` of the stage, to a[at]
        Unit<F> unit;
        unit.load_shared(ring.stage() + row_tile * Shape::kTileBytes + at / kUnitTurns * unit_bytes_of<F>);
#pragma unroll
        for (int s = 0; s < 2; ++s) F::template fragment<T>(a[at][s], unit, at % kUnitTurns * 2 + s);
        if constexpr (kGroups) scales[at] = F::scales_of(unit, at);
    };
    const int turns = slices.length() * kUnitTurns;
    int accumulate = 0, slice = slices.first, end = 0, previous = ring.index;
    auto begin_slice = [&] {
        const int begin = end;
        while (end == begin && slice < slices.last) end = slices.end(slice++);
        if constexpr (kGroups)
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
    };
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
    if (turns == 0) return;
    begin_slice();
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
            if constexpr (!kGroups) wgmma_wait<1>();  // the turn before is done, whose registers are filled next
            if (i == 0 && first > 0) ring.release(previous);
            if (turn + 1 < turns) {
                if (i == kStageTurns - 1) ring.advance(), ring.wait_full();
                load((i + 1) % kStageTurns);
            }
            if constexpr (kGroups) {
                wgmma_wait<0>();
#pragma unroll
                for (int j = 0; j < kTokens / 2; j += 4)
                    add_scaled(reinterpret_cast<float (&)[4]>(sums[j]), reinterpret_cast<float (&)[4]>(products[j]),
                               scales[i]);
            }
            accumulate = kGroups ? 0 : 1;
            if (turn % kUnitTurns != kUnitTurns - 1 || turn / kUnitTurns + 1 != end || turn + 1 == turns) continue;
            accumulate = 0;
            wgmma_wait<0>();
            end_slice();
            begin_slice();
        }
        previous = index;
    }
    wgmma_wait<0>();  // nothing is in flight, as the last slice has ended; but ptxas does not know
    ring.release(previous);
    ring.advance();
}

template <class T, class F, int kTokens, class Ring, class EndSlice>
__device__ __forceinline__ void consume_slices(Ring& ring, int row_tile, const SliceRange& slices,
                                               float (&sums)[kTokens / 2], const EndSlice& end_slice) {
    if constexpr (F::kTurnSteps == 1)
        consume<T, kTokens>(ring, row_tile, slices, sums, end_slice);
    else
        consume_quantised<T, F, kTokens>(ring, row_tile, slices, sums, end_slice);
}

// The tensor maps of a weight and of x, for boxes of a stage.
template <class T, class F>
cudaError_t make_maps(const LinearArgs& args, int box_tiles, int box_tokens, TensorMap& weights, TensorMap& x) {
    const PackedWeight& w = args.weight;
    constexpr int kTileBytes = StageShape<F, 64>::kTileBytes;
    const uint64_t row_bytes = static_cast<uint64_t>(unit_bytes_of<F>) * units_of<F>(w.k);
    const TensorMapParams of_weights{w.data,
                                     row_bytes / 8,
                                     static_cast<uint64_t>(num_tiles(w)),
                                     row_bytes,
                                     kTileBytes / 8,
                                     static_cast<uint32_t>(box_tiles),
                                     Swizzle::none,
                                     8};
    const TensorMapParams of_x{args.x,
                               static_cast<uint64_t>(w.k),
                               static_cast<uint64_t>(args.num_tokens),
                               static_cast<uint64_t>(args.x_stride) * sizeof(T),
                               kBoxColumns,
                               static_cast<uint32_t>(box_tokens)};
    if (cudaError_t error = make_tensor_map(&weights, of_weights)) return error;
    return make_tensor_map(&x, of_x);
}

}  // namespace infinilm::cuda
