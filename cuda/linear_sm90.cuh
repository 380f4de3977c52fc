// linear for many tokens on Hopper: the results of linear_prefill from the same packed weights, by wgmma.
// Mapping: persistent blocks, one per SM, over tiles of 128 packed rows x 128 tokens (or 64: choose_tile_tokens) in the
// order of tile_place(). One thread of the first warpgroup brings stages of 64 columns of k to shared memory: of the
// weight, for each of the 8 tiles of 16 rows, units as they lie in memory (bulk copies, no swizzle), 2 KB of as_type;
// of x a box of a tensor map with the 128-byte swizzle, zeros beyond the tokens and k. Two warpgroups multiply 64 rows
// each: wgmma's A in registers has the fragments of mma.m16n8k16 (ptx.cuh), so 16-byte reads fetch it; two wgmma in
// flight. Quantised weights are widened on that way: those of the next 32 columns while two wgmma multiply these.
// Outputs have a buffer of their own, so that the next tile is loaded meanwhile.
// Slices of k are chains of their own, as everywhere (linear.cuh); whether wgmma adds the products of a step as mma
// does, and rows thus equal those of linear_prefill bit for bit, only a GPU can tell.
// Bytes: the weight once for each 1024 tokens, x once from memory, then both from L2. Floor: 2 n k num_tokens / peak of
// wgmma. Shared memory comes next: a stage is 512 cycles of wgmma, 32 KB written and 48 KB read, by count 160 bytes a
// cycle where a port has 128. Alignment as in kernels.h. Ideas: pranjalssh/fast.cu (matmul_12: persistent,
// warp-specialised), the register-A wgmma of CUTLASS's mixed-input GEMM, IST-DASLab/marlin (weights as fragments).
#pragma once

#include "launch.cuh"
#include "linear_tile.cuh"
#include "ptx_sm90.cuh"

namespace infinilm::cuda {

constexpr int kHopperThreads = 384, kHopperStages = 4, kBoxSteps = 4, kBoxColumns = 16 * kBoxSteps;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // (40 + 2 x 232) x 128 <= 65536

template <class F, int kTokens>
struct HopperShape {
    static constexpr int kUnits = kBoxSteps / F::kUnitSteps, kTileBytes = kUnits * unit_bytes_of<F>;  // of a stage
    static constexpr int kWeightBytes = (kRowTiles * kTileBytes + 1023) / 1024 * 1024;
    static constexpr int kTokenBytes = kTokens * kBoxColumns * 2;
    static constexpr int kStageBytes = kWeightBytes + kTokenBytes, kBufferBytes = kTileRows * kTokens * 4;
    static constexpr int kSmemBytes = kHopperStages * kStageBytes + kBufferBytes;
};

// The ring of stages as both sides walk it: `fill` counts stages from the start of the kernel.
struct StageRing {
    uint64_t *full, *empty;  // [kHopperStages]: bytes have arrived; the 8 warps that read have done so
    uint8_t* smem;
    int stage_bytes;

    __device__ __forceinline__ uint8_t* stage(unsigned fill) const {
        return smem + static_cast<int>(fill % kHopperStages) * stage_bytes;
    }
    __device__ __forceinline__ uint64_t* full_barrier(unsigned fill) const { return full + fill % kHopperStages; }
    __device__ __forceinline__ void wait_full(unsigned fill) const {
        mbarrier_wait(full_barrier(fill), fill / kHopperStages % 2);
    }
    __device__ __forceinline__ void wait_empty(unsigned fill) const {
        mbarrier_wait(empty + fill % kHopperStages, fill / kHopperStages % 2 ^ 1);
    }
    __device__ __forceinline__ void release(unsigned fill) const {  // by a whole warp
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(empty + fill % kHopperStages);
    }
};

// One thread: all stages of a tile. Tiles of 16 rows and units that the weight does not have are not loaded, and what
// is there instead is used for nothing that is stored.
template <class F, int kTokens>
__device__ __forceinline__ void produce(const PackedWeight& w, const TensorMap& map, const StageRing& ring, int tile,
                                        int token, unsigned& fill) {
    using Shape = HopperShape<F, kTokens>;
    const int units = units_of<F>(w.k), tiles = min(kRowTiles, num_tiles(w) - tile);
    const int64_t row_bytes = int64_t{unit_bytes_of<F>} * units;
    const uint8_t* rows = static_cast<const uint8_t*>(w.data) + tile * row_bytes;
    for (int unit = 0; unit < units; unit += Shape::kUnits, ++fill) {
        const int bytes = min(Shape::kUnits, units - unit) * unit_bytes_of<F>;
        uint8_t* stage = ring.stage(fill);
        uint64_t* full = ring.full_barrier(fill);
        ring.wait_empty(fill);
        mbarrier_arrive_expect_tx(full, tiles * bytes + Shape::kTokenBytes);
        tensor_load_2d(stage + Shape::kWeightBytes, map, unit * F::kUnitSteps * 16, token, full);
        for (int i = 0; i < tiles; ++i)
            bulk_load(stage + i * Shape::kTileBytes, rows + i * row_bytes + int64_t{unit_bytes_of<F>} * unit, bytes,
                      full);
    }
}

// A warpgroup's 64 rows x kTokens of a tile. row_tile: this warp's of the 8 tiles of 16 rows.
template <class T, int kTokens>
__device__ __forceinline__ void consume(const StageRing& ring, int row_tile, int steps, unsigned& fill,
                                        float (&totals)[1][kTokens / 8][4]) {
    using Shape = HopperShape<AsType, kTokens>;
    // The zeros are never added to anything, but ptxas before 12.9 lets no wgmma overlap another one where registers of
    // the accumulator may be undefined.
    float sums[kTokens / 2] = {};
    uint32_t a[kBoxSteps][4];  // by step, so that a wgmma in flight keeps its own
    auto load = [&](int step) {
        Unit<AsType> unit;
        unit.load_shared(ring.stage(fill) + row_tile * Shape::kTileBytes + step * 512);
        AsType::fragment<T>(a[step], unit, 0);
    };
    int accumulate = 0, end = slice_end(0, steps);
    ring.wait_full(fill);
    load(0);
    for (int first = 0; first < steps; first += kBoxSteps) {
        const uint64_t b = matrix_descriptor_128(ring.stage(fill) + Shape::kWeightBytes);
#pragma unroll
        for (int i = 0; i < kBoxSteps; ++i) {
            const int step = first + i;
            if (step >= steps) break;
            wgmma_fence();
            Wgmma<kTokens, T>::multiply(sums, a[i], b + i * 2, accumulate);  // descriptors count in 16 bytes
            wgmma_commit();
            accumulate = 1;
            if (step + 1 == end) {
                wgmma_wait<0>();
#pragma unroll
                for (int j = 0; j < kTokens / 2; ++j) totals[0][j / 4][j % 4] += sums[j];
                accumulate = 0, end = slice_end(end, steps);
            } else {
                wgmma_wait<1>();
            }
            if (i == 0 && step > 0) ring.release(fill - 1);  // only this stage's wgmma may still run
            if (step + 1 == steps) break;
            if (i == kBoxSteps - 1) ring.wait_full(++fill);
            load((i + 1) % kBoxSteps);
        }
    }
    wgmma_wait<0>();  // nothing is in flight, as the last slice has ended; but ptxas does not know
    ring.release(fill++);
}

// The same of quantised weights: two steps at a time, whose fragments are made while the two before are multiplied.
template <class T, class F, int kTokens>
__device__ __forceinline__ void consume_quantised(const StageRing& ring, int row_tile, int units, unsigned& fill,
                                                  float (&totals)[1][kTokens / 8][4]) {
    using Shape = HopperShape<F, kTokens>;
    constexpr int kUnitTurns = F::kUnitSteps / 2, kStageTurns = kBoxSteps / 2;
    constexpr bool kGroups = F::kScales > 0;  // products is then the chain of one turn, else that of the slice
    float products[kTokens / 2] = {}, sums[kGroups ? kTokens / 2 : 1] = {};
    uint32_t a[2][2][4];
    typename F::Scales scales[2] = {};
    auto load = [&](int at) {  // turn `at` of the stage, to a[at]
        Unit<F> unit;
        unit.load_shared(ring.stage(fill) + row_tile * Shape::kTileBytes + at / kUnitTurns * unit_bytes_of<F>);
#pragma unroll
        for (int s = 0; s < 2; ++s) F::template fragment<T>(a[at][s], unit, at % kUnitTurns * 2 + s);
        if constexpr (kGroups) scales[at] = F::scales_of(unit, at);
    };
    const int turns = units * kUnitTurns;
    int accumulate = 0, end = slice_end(0, units);
    ring.wait_full(fill);
    load(0);
    for (int first = 0; first < turns; first += kStageTurns) {
        const uint64_t b = matrix_descriptor_128(ring.stage(fill) + Shape::kWeightBytes);
        const unsigned stage = fill;
#pragma unroll
        for (int i = 0; i < kStageTurns; ++i) {
            const int turn = first + i;
            if (turn >= turns) break;
            wgmma_fence();
            Wgmma<kTokens, T>::multiply(products, a[i][0], b + i * 4, accumulate);  // descriptors count in 16 bytes
            Wgmma<kTokens, T>::multiply(products, a[i][1], b + i * 4 + 2, 1);
            wgmma_commit();
            if (turn + 1 < turns) {
                if (i == kStageTurns - 1) ring.wait_full(++fill);
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
                totals[0][j / 4][j % 4] += kGroups ? sums[j] : products[j];
                if constexpr (kGroups) sums[j] = 0.0f;
            }
        }
        if (first + kStageTurns < turns) ring.release(stage);
    }
    ring.release(fill++);
}

template <class T, class F, int kTokens>
__global__ void __launch_bounds__(kHopperThreads, 1)
    linear_sm90_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ TensorMap map,
                       int token_blocks) {
    begin_kernel();
    using Shape = HopperShape<F, kTokens>;
    INFINILM_DYNAMIC_SHARED(smem);  // [kHopperStages][kStageBytes], then the outputs
    INFINILM_SHARED(uint64_t, full, [kHopperStages]);
    INFINILM_SHARED(uint64_t, empty, [kHopperStages]);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kHopperStages; ++s) mbarrier_init(full + s, 1), mbarrier_init(empty + s, 8);
        mbarrier_init_fence();
    }
    __syncthreads();
    const PackedWeight& w = args.weight;
    const StageRing ring{full, empty, smem, Shape::kStageBytes};
    const int blocks = row_blocks(w), tiles = blocks * token_blocks, group = static_cast<int>(threadIdx.x) / 128 - 1;
    unsigned fill = 0;
    if (group < 0) {
        registers_decrease<kProducerRegisters>();
        if (threadIdx.x != 0) return;
        tensor_prefetch(map);
        for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
            const TilePlace place = tile_place(i, blocks, token_blocks);
            produce<F, kTokens>(w, map, ring, place.row_block * kRowTiles, place.token_block * kTokens, fill);
        }
        return;
    }
    registers_increase<kConsumerRegisters>();
    const int row_tile = 4 * group + static_cast<int>(warp_id()) % 4;
    float* buffer = reinterpret_cast<float*>(smem + kHopperStages * Shape::kStageBytes) + group * 64 * kTokens;
    auto sync = [&] { named_barrier_sync(1 + group, 128); };
    for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
        const TilePlace place = tile_place(i, blocks, token_blocks);
        float totals[1][kTokens / 8][4] = {};
        if constexpr (F::kTurnSteps == 1)
            consume<T, kTokens>(ring, row_tile, num_steps(w.k), fill, totals);
        else
            consume_quantised<T, F, kTokens>(ring, row_tile, units_of<F>(w.k), fill, totals);
        sync();  // the outputs of the tile before have been read
        store_sums<T, F, 4>(args, totals, buffer, place.row_block * kRowTiles + 4 * group, place.token_block * kTokens,
                            sync);
    }
}

template <class T, class F, int kTokens>
cudaError_t launch_sm90(const LinearArgs& args, int num_sms, cudaStream_t stream) {
    const PackedWeight& w = args.weight;
    TensorMap map;
    const TensorMapParams x{args.x,
                            static_cast<uint64_t>(w.k),
                            static_cast<uint64_t>(args.num_tokens),
                            static_cast<uint64_t>(args.x_stride) * sizeof(T),
                            kBoxColumns,
                            kTokens};
    if (cudaError_t error = make_tensor_map(&map, x)) return error;
    const int token_blocks = ceil_div(args.num_tokens, kTokens), tiles = row_blocks(w) * token_blocks;
    const LaunchConfig config{dim3(static_cast<unsigned>(tiles < num_sms ? tiles : num_sms)), dim3(kHopperThreads),
                              HopperShape<F, kTokens>::kSmemBytes, stream};
    return launch<linear_sm90_kernel<T, F, kTokens>>(config, args, map, token_blocks);
}

inline cudaError_t num_sms_of_device(int& num_sms) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    return cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
}

// linear_sm90 of a quantised weight: tiles of 128 tokens alone, for which weights are widened half as often.
template <class F>
cudaError_t linear_sm90_as(const LinearArgs& args, cudaStream_t stream) {
    int num_sms = 0;
    if (cudaError_t error = num_sms_of_device(num_sms)) return error;
    return args.weight.type == Type::bf16 ? launch_sm90<bf16, F, 128>(args, num_sms, stream)
                                          : launch_sm90<f16, F, 128>(args, num_sms, stream);
}

}  // namespace infinilm::cuda
