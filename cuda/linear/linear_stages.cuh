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

constexpr int kBoxSteps = kBoxColumns / 16;
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
    __device__ __forceinline__ int previous() const { return index == 0 ? kStages - 1 : index - 1; }
    // By a whole warp: it needs a stage no more.
    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        if (released) mbarrier_arrive_cluster(released, stage);
    }
};

// What one thread brings to shared memory: boxes of 64 columns, of the weight's rows from tile of 16 rows `tile` on and
// of x from `token` on, `boxes` of them from box `begin` of k on. What the weight, the tokens or k do not have comes
// as zeros.
struct Boxes {
    const TensorMap* weights;
    int tile, token, begin, boxes;
};
template <class F, int kTokens>
struct StageSource {
    using Shape = StageShape<F, kTokens>;
    const TensorMap& x;
    // In a cluster whose blocks have the same rows or the same tokens, each brings a part to all of these: the part's
    // first tile and token, and the blocks; or none, a block brings all it needs.
    int own_tile, own_token;
    uint16_t same_rows, same_tokens;

    template <class Ring>
    __device__ __forceinline__ void load_weights(const Ring& ring, const Boxes& from, int i) const {
        mbarrier_arrive_expect_tx(ring.full + ring.index, Shape::kWeightBytes + Shape::kTokenBytes);
        load(ring.stage() + own_tile * Shape::kTileBytes, *from.weights, (from.begin + i) * (Shape::kTileBytes / 8),
             from.tile + own_tile, ring.full + ring.index, same_rows);
    }
    template <class Ring>
    __device__ __forceinline__ void load_x(const Ring& ring, const Boxes& from, int i) const {
        load(ring.stage() + Shape::kTokenOffset + own_token * kBoxColumns * 2, x, (from.begin + i) * kBoxColumns,
             from.token + own_token, ring.full + ring.index, same_tokens);
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
// All of them, boxes_at(0) .. boxes_at(count - 1), which are called once and in this order. Weights are no kernel's
// output: the first are asked for before the kernel in front has ended.
template <class F, int kTokens, class Ring, class BoxesAt>
__device__ __forceinline__ void produce(const StageSource<F, kTokens>& source, Ring& ring, int count,
                                        const BoxesAt& boxes_at) {
    Boxes from = boxes_at(0);
    const int early = min(from.boxes, Ring::kCount);
    for (int i = 0; i < early; ++i, ring.advance()) source.load_weights(ring, from, i);
    grid_dependency_wait();
    ring.index = 0, ring.parity = 0;
    for (int i = 0; i < early; ++i, ring.advance()) source.load_x(ring, from, i);
    for (int at = 0; at < count; ++at) {
        if (at > 0) from = boxes_at(at);
        for (int i = at == 0 ? early : 0; i < from.boxes; ++i, ring.advance()) {
            ring.wait_empty();
            source.load_weights(ring, from, i);
            source.load_x(ring, from, i);
        }
    }
}

// A warpgroup's 64 rows x kTokens of a tile: the sums of one slice after the other, and end_slice() when they are
// there, but for those of the last one, which are left in `sums`. Slices without boxes are passed over: zeros. Two
// steps are a turn, whose fragments are made while the turn before is multiplied. row_tile: this warp's of the 8 tiles
// of 16 rows.
template <class T, class F, int kTokens, class Ring, class EndSlice>
__device__ __forceinline__ void consume_slices(Ring& ring, int row_tile, const SliceRange& slices,
                                               float (&sums)[kTokens / 2], const EndSlice& end_slice) {
    using Shape = StageShape<F, kTokens>;
    // The zeros are never added to anything, but ptxas before 12.9 lets no wgmma overlap another one where registers of
    // the accumulator may be undefined.
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
    uint32_t a[2][2][4];
    auto load = [&](int turn) {
        Unit<F> unit;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int at = 2 * turn + step;
            if (at % F::kUnitSteps == 0 || step == 0)
                unit.load_shared(ring.stage() + row_tile * Shape::kTileBytes + at / F::kUnitSteps * unit_bytes_of<F>);
            F::template fragment<T>(a[turn][step], unit, at % F::kUnitSteps);
        }
    };
    int accumulate = 0, slice = slices.first, end = 0;
    auto begin_slice = [&] {
        const int begin = end;
        while (end == begin && slice < slices.last) end = slices.end(slice++);
        accumulate = 0;
    };
    begin_slice();
    if (end == 0) return;
    ring.wait_full();
    load(0);
    for (int box = 0;;) {
        const uint64_t b = matrix_descriptor_128(ring.stage() + Shape::kTokenOffset);
        auto multiply = [&](int turn) {
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 2; ++step) {  // descriptors count in 16 bytes
                Wgmma<kTokens, T>::multiply(sums, a[turn][step], b + turn * 4 + step * 2, accumulate);
                accumulate = 1;
            }
            wgmma_commit();
            wgmma_wait<1>();  // the turn before is done, whose registers are filled next
        };
        multiply(0);
        if (box > 0) ring.release(ring.previous());
        load(1);
        multiply(1);
        const bool is_end = ++box == end;
        ring.advance();
        if (is_end && slice == slices.last) break;  // the last one is never empty
        ring.wait_full();
        load(0);
        if (!is_end) continue;
        wgmma_wait<0>();
        end_slice();
        begin_slice();
    }
    wgmma_wait<0>();
    ring.release(ring.previous());
}

// The tensor maps of a weight and of x, [num_tokens, k] of 16-bit numbers, for boxes of a stage.
inline cudaError_t make_weight_map(const PackedWeight& w, int box_tiles, TensorMap& map) {
    const uint64_t row_bytes = static_cast<uint64_t>(unit_bytes(w.format)) * static_cast<uint64_t>(num_units(w));
    const TensorMapParams params{w.data,
                                 row_bytes / 8,
                                 static_cast<uint64_t>(num_tiles(w)),
                                 row_bytes,
                                 static_cast<uint32_t>(kBoxSteps / unit_steps(w.format) * unit_bytes(w.format) / 8),
                                 static_cast<uint32_t>(box_tiles),
                                 Swizzle::none,
                                 8};
    return make_tensor_map(&map, params);
}
inline cudaError_t make_x_map(const LinearArgs& args, int box_tokens, TensorMap& map) {
    const TensorMapParams params{args.x,
                                 static_cast<uint64_t>(args.weight.k),
                                 static_cast<uint64_t>(args.num_tokens),
                                 static_cast<uint64_t>(args.x_stride) * 2,
                                 kBoxColumns,
                                 static_cast<uint32_t>(box_tokens)};
    return make_tensor_map(&map, params);
}

}  // namespace infinilm::cuda
