// What linear_sm90 and linear_split_sm90 share: how weights and x come to shared memory in stages of 64 columns of k,
// and how wgmma multiplies them. One thread brings a stage: of the weight, units as they lie, by one tensor map of the
// packed bytes; of x a box with the 128-byte swizzle. Two warpgroups multiply 64 rows each: wgmma's A in registers has
// the fragments of mma.m16n8k16 (ptx.cuh), so 16-byte reads fetch it, for two steps while two others are multiplied.
// Quantised weights are widened on that way. wgmma adds the products of a step as mma does, so rows have the bits of
// linear_prefill and linear_decode. Where inputs are rounded to e4m3, too, a stage is 128 columns, whose sums begin at
// zero and are added in float32, for the tensor cores keep 14 bits or so of a sum of e4m3 (as DeepGEMM does). Ideas:
// the register-A wgmma of CUTLASS's mixed-input GEMM, IST-DASLab/marlin (weights as fragments).
#pragma once

#include <type_traits>

#include "cuda/core/ptx_sm90.cuh"
#include "cuda/core/wgmma_e4m3.cuh"
#include "cuda/linear/linear_tile.cuh"

namespace infinilm::cuda {

constexpr int kBoxSteps = kBoxColumns / 16;
constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;

// What a stage holds: units of each tile of rows, then x, then the scales of its rows: of four boxes, as copies are 16
// bytes at the least.
template <class F, int kTokens>
struct StageShape {
    static constexpr int kUnits = kBoxSteps / F::kUnitSteps, kTileBytes = kUnits * unit_bytes_of<F>;
    // The columns of a tile of rows come by two copies where they are longer than one may be (TensorMapParams).
    static constexpr int kCopies = kTileBytes > 256 * 8 ? 2 : 1, kCopyUnits = kUnits / kCopies;
    static constexpr int kCopyBytes = kTileBytes / kCopies;  // of a tile
    static constexpr int kWeightBytes = kRowTiles * kTileBytes, kTokenBytes = kTokens * kBoxColumns * 2;
    static constexpr int kTokenOffset = (kWeightBytes + 1023) / 1024 * 1024;
    static constexpr int kScaleOffset = kTokenOffset + kTokenBytes, kScaleBytes = F::kBoxScales ? kTokens * 16 : 0;
    static constexpr int kStageBytes = (kScaleOffset + kScaleBytes + 1023) / 1024 * 1024;

    // Where a unit of a tile lies in a stage.
    __device__ __forceinline__ static constexpr int place(int tile, int unit) {
        return unit / kCopyUnits * kRowTiles * kCopyBytes + tile * kCopyBytes + unit % kCopyUnits * unit_bytes_of<F>;
    }
};

// The tensor maps of x: of its numbers, and where they have scales of boxes, of these.
template <bool kBoxScales>
struct InputMaps {
    TensorMap numbers;
};
template <>
struct InputMaps<true> {
    TensorMap numbers, scales;
};
template <class F>
using InputMapsOf = InputMaps<F::kBoxScales>;

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
    const InputMapsOf<F>& x;
    // In a cluster whose blocks have the same rows or the same tokens, each brings a part to all of these: the part's
    // first tile and token, and the blocks; or none, a block brings all it needs.
    int own_tile, own_token;
    uint16_t same_rows, same_tokens;

    template <class Ring>
    __device__ __forceinline__ void load_weights(const Ring& ring, const Boxes& from, int i) const {
        mbarrier_arrive_expect_tx(ring.full + ring.index,
                                  Shape::kWeightBytes + Shape::kTokenBytes + Shape::kScaleBytes);
#pragma unroll
        for (int copy = 0; copy < Shape::kCopies; ++copy)
            load(ring.stage() + Shape::place(own_tile, copy * Shape::kCopyUnits), *from.weights,
                 (from.begin + i) * (Shape::kTileBytes / 8) + copy * (Shape::kCopyBytes / 8), from.tile + own_tile,
                 ring.full + ring.index, same_rows);
    }
    template <class Ring>
    __device__ __forceinline__ void load_x(const Ring& ring, const Boxes& from, int i) const {
        load(ring.stage() + Shape::kTokenOffset + own_token * kBoxColumns * 2, x.numbers,
             (from.begin + i) * kBoxColumns, from.token + own_token, ring.full + ring.index, same_tokens);
        if constexpr (F::kBoxScales)  // columns of 8 bytes
            load(ring.stage() + Shape::kScaleOffset + own_token * 16, x.scales, (from.begin + i) / 4 * 2,
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

// Adds the sums of a box of columns, of rounded inputs, which are in `stage`. place: of the box among the four whose
// scales are there.
template <class F, int kTokens>
__device__ __forceinline__ void add_box(float (&sums)[kTokens / 2], const float (&of_box)[kTokens / 2],
                                        const uint8_t* stage, int row_tile, int place) {
    using Shape = StageShape<F, kTokens>;
    BoxScales scales{};
    if constexpr (F::kBoxScales) {
        const float* of_rows =
            reinterpret_cast<const float*>(stage + Shape::place(row_tile, 0) + F::kCodeBytes + F::scale_place(0));
        scales.rows[0] = of_rows[0], scales.rows[1] = of_rows[1];
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
        if constexpr (F::kBoxScales) {
            const float* of_tokens = reinterpret_cast<const float*>(
                stage + Shape::kScaleOffset + (8 * j + static_cast<int>(lane_id()) % 4 * 2) * 16 + place * 4);
            scales.tokens = make_float2(of_tokens[0], of_tokens[4]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& sum = sums[4 * j + i];
            sum = F::kBoxScales ? scales.add(sum, of_box[4 * j + i], i) : __fadd_rn(sum, of_box[4 * j + i]);
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
    float of_box[F::kRoundedInputs ? kTokens / 2 : 1] = {};
    float (&products)[kTokens / 2] = *[&] {
        if constexpr (F::kRoundedInputs)
            return &of_box;
        else
            return &sums;
    }();
    using Factor = std::conditional_t<F::kRoundedInputs, e4m3, T>;
    uint32_t a[2][2][4];
    auto load = [&](int turn) {
        Unit<F> unit;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int at = 2 * turn + step;
            if (at % F::kUnitSteps == 0 || step == 0)
                unit.load_shared(ring.stage() + Shape::place(row_tile, at / F::kUnitSteps));
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
        const uint8_t* stage = ring.stage();
        const uint64_t b = matrix_descriptor_128(stage + Shape::kTokenOffset);
        auto multiply = [&](int turn) {
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 2; ++step) {  // descriptors count in 16 bytes
                Wgmma<kTokens, Factor>::multiply(products, a[turn][step], b + turn * 4 + step * 2, accumulate);
                accumulate = 1;
            }
            wgmma_commit();
            wgmma_wait<1>();  // the turn before is done, whose registers are filled next
        };
        multiply(0);
        if (box > 0) ring.release(ring.previous());
        load(1);
        multiply(1);
        const bool is_end = ++box == end, is_last = is_end && slice == slices.last;  // the last one is never empty
        ring.advance();
        if (!is_last) {
            ring.wait_full();
            load(0);
        }
        if constexpr (F::kRoundedInputs) {
            wgmma_wait<0>();
            add_box<F, kTokens>(sums, of_box, stage, row_tile, (slices.begin() + box - 1) % 4);
            accumulate = 0;
        }
        if (is_last) break;
        if (!is_end) continue;
        wgmma_wait<0>();
        end_slice();
        begin_slice();
        if constexpr (F::kRoundedInputs)
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
    }
    wgmma_wait<0>();
    ring.release(ring.previous());
}

// The tensor maps of a weight and of x, [num_tokens, k] of 16-bit numbers, for boxes of a stage.
inline cudaError_t make_weight_map(const PackedWeight& w, int box_tiles, TensorMap& map) {
    const uint64_t row_bytes = static_cast<uint64_t>(unit_bytes(w.format)) * static_cast<uint64_t>(num_units(w));
    const int columns = kBoxSteps / unit_steps(w.format) * unit_bytes(w.format) / 8;  // of a box, by one copy or two
    const TensorMapParams params{w.data,
                                 row_bytes / 8,
                                 static_cast<uint64_t>(num_tiles(w)),
                                 row_bytes,
                                 static_cast<uint32_t>(columns > 256 ? columns / 2 : columns),
                                 static_cast<uint32_t>(box_tiles),
                                 Swizzle::none,
                                 8};
    return make_tensor_map(&map, params);
}
template <bool kBoxScales>
cudaError_t make_x_maps(const LinearArgs& args, int box_tokens, InputMaps<kBoxScales>& maps) {
    const auto rows = static_cast<uint64_t>(args.num_tokens), stride = static_cast<uint64_t>(args.x_stride) * 2;
    if constexpr (kBoxScales) {  // of four boxes: two columns of 8 bytes
        const auto boxes = static_cast<uint64_t>(num_boxes(args.weight));
        const TensorMapParams scales{input_scales(args, 0),
                                     (boxes + 3) / 4 * 2,
                                     rows,
                                     stride,
                                     2,
                                     static_cast<uint32_t>(box_tokens),
                                     Swizzle::none,
                                     8};
        if (cudaError_t error = make_tensor_map(&maps.scales, scales)) return error;
    }
    const TensorMapParams params{args.x,      static_cast<uint64_t>(args.weight.k), rows, stride,
                                 kBoxColumns, static_cast<uint32_t>(box_tokens)};
    return make_tensor_map(&maps.numbers, params);
}

}  // namespace infinilm::cuda
