// linear for a few dozen to some hundred tokens on Hopper where the tiles of linear_sm90 are too few for all SMs to
// read weights: the eight slices of k (linear.cuh) are shared out to the blocks of a cluster. Bound by reading the
// weights once (2 n k bytes). Mapping: a cluster of 8 or 4 blocks has a tile of 128 packed rows x 32, 64 or 128 tokens,
// in the order of tile_place(). In one phase, or in each of two, a block has one slice, whose sums it makes as
// linear_sm90 does. Each of its eight warps has those of 16 rows, and sends them to the block that ends these rows
// (st.async, which a barrier there counts). That block adds the slices in order; those of the last phase become outputs
// as in linear_decode (linear_output.cuh). Meanwhile the next weights come. Up to 64 tokens (32 with rounded inputs) an
// SM has two blocks, so that one reads while the other ends. Bytes beside the weights: x from L2, num_tokens / 128 of
// them; sums from block to block, 16 num_tokens / k of them. The bits are those of linear_decode. Alignment as in
// kernels.h.
#pragma once

#include <type_traits>

#include "cuda/core/launch.cuh"
#include "cuda/linear/linear_output.cuh"
#include "cuda/linear/linear_stages.cuh"

namespace infinilm::cuda {

constexpr int kSplitThreads = 128 * kConsumers + 32;

template <class F, int kTokens>
struct SplitShape : StageShape<F, kTokens> {
    using StageShape<F, kTokens>::kStageBytes;
    static constexpr int kBlocksPerSm = kTokens <= (F::kRoundedInputs ? 32 : 64) ? 2 : 1;  // as registers allow
    static constexpr int kRowBytes = 16 * kTokens * 4;             // of the sums of a warp's 16 rows
    static constexpr int kRoomBytes = kConsumerWarps * kRowBytes;  // of a phase, for the rows that a block ends
    static constexpr int kTotalBytes = kRoomBytes / 4;             // of the first of two phases
    static constexpr int kBarrierBytes = 256;
    // An SM has 228 KB, of which the system takes one for each block.
    static constexpr int kMostStages =
        ((228 / kBlocksPerSm - 1) * 1024 - kBarrierBytes - kRoomBytes - kTotalBytes) / kStageBytes;
    static constexpr int kStages = kMostStages < 12 ? kMostStages : 12;
    static_assert(kStages >= 2 && (2 * kStages + 2) * 8 <= kBarrierBytes);
    static constexpr int kSmemBytes = kStages * kStageBytes + kRoomBytes + kTotalBytes + kBarrierBytes;
};

// The tiles of clusters of 2^bits blocks.
struct SplitGrid {
    int bits, tiles, token_blocks;

    __host__ __device__ int blocks() const { return 1 << bits; }
    __host__ __device__ int phases() const { return kSlices >> bits; }  // and tiles of 16 rows that a block ends
    __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) & (blocks() - 1); }
    __device__ __forceinline__ int tile_at(int turn) const {
        return static_cast<int>(blockIdx.x + turn * gridDim.x) >> bits;
    }
};

template <class T, class F, int kTokens>
__global__ void __launch_bounds__(kSplitThreads, SplitShape<F, kTokens>::kBlocksPerSm)
    linear_split_sm90_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ TensorMap weights,
                             const __grid_constant__ InputMapsOf<F> x, const __grid_constant__ SplitGrid grid) {
    using Shape = SplitShape<F, kTokens>;
    // [kStages][kStageBytes]; of a phase [blocks][row tiles][kTokens / 8][32] float4; totals without [blocks]; barriers
    INFINILM_DYNAMIC_SHARED(smem);
    float4* room = reinterpret_cast<float4*>(smem + Shape::kStages * Shape::kStageBytes);
    float4* totals = room + Shape::kRoomBytes / 16;
    uint64_t* full = reinterpret_cast<uint64_t*>(totals + Shape::kTotalBytes / 16);  // [kStages]
    uint64_t* empty = full + Shape::kStages;                                         // [kStages]
    uint64_t* arrived = empty + Shape::kStages;  // the sums of a phase, of the rows that this block ends
    uint64_t* drained = arrived + 1;             // all blocks have added those of the phase before
    const PackedWeight& w = args.weight;
    const int warp = static_cast<int>(warp_id()), lane = static_cast<int>(lane_id());
    StageRing<Shape::kStages, Shape::kStageBytes> ring{full, empty, smem, {}};
    auto place_at = [&](int turn) { return tile_place(grid.tile_at(turn), row_blocks(w), grid.token_blocks); };
    auto slice_of = [&](int phase) {
        const int slice = (phase << grid.bits) + grid.rank();
        return SliceRange{num_boxes(w), slice, slice + 1};
    };
    if (threadIdx.x == 128 * kConsumers) {
        for (int s = 0; s < Shape::kStages; ++s) mbarrier_init(full + s, 1), mbarrier_init(empty + s, kConsumerWarps);
        mbarrier_init(arrived, 1);
        mbarrier_arrive_expect_tx(arrived, Shape::kRoomBytes);
        mbarrier_init(drained, kConsumerWarps * grid.blocks());
        mbarrier_init_fence();
    }
    cluster_sync();
    if (warp == kConsumerWarps) {
        if (lane == 0) {
            int turns = 1;
            while (grid.tile_at(turns) < grid.tiles) ++turns;
            produce(StageSource<F, kTokens>{x, 0, 0, 0, 0}, ring, turns * grid.phases(), [&](int at) {
                const TilePlace place = place_at(at / grid.phases());
                const SliceRange slice = slice_of(at % grid.phases());
                return Boxes{&weights, place.row_block * kRowTiles, place.token_block * kTokens, slice.begin(),
                             slice.boxes()};
            });
            grid_launch_dependents();  // the last of the weights are on their way
        }
        return;
    }
    grid_dependency_wait();
    ring.released = lane == 0 ? cluster_barriers(empty, grid.rank()) : ClusterBarriers{};
    uint32_t parity = 0;
    for (int turn = 0; grid.tile_at(turn) < grid.tiles; ++turn) {
        for (int phase = 0; phase < grid.phases(); ++phase, parity ^= 1) {
            float sums[kTokens / 2];
            consume_slices<T, F, kTokens>(ring, warp, slice_of(phase), sums, [] {});
            // To the block that ends this warp's rows.
            const int owner = warp / grid.phases();
            const ClusterMemory target = cluster_memory(room, owner);
            const ClusterBarriers target_arrived = cluster_barriers(arrived, owner);
            const int at = (grid.rank() * grid.phases() + warp % grid.phases()) * Shape::kRowBytes + lane * 16;
            mbarrier_wait(drained, parity ^ 1);
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j)
                store_async_16(target, at + 512 * j,
                               make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]),
                               target_arrived);

            const TilePlace place = place_at(turn);
            const int first_tile = place.row_block * kRowTiles + grid.rank() * grid.phases();
            const int stride = grid.phases() * Shape::kRowBytes / 16;
            mbarrier_wait(arrived, parity);
            if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, Shape::kRoomBytes);  // before others may send
#pragma unroll 1
            for (int unit = opaque(static_cast<int>(threadIdx.x)); unit < stride; unit += 128 * kConsumers) {
                const int tile = first_tile + unit / (4 * kTokens);
                const int token = place.token_block * kTokens + unit / 32 % (kTokens / 8) * 8 + unit % 4 * 2;
                const float4 before = phase == 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : totals[unit];
                const float4 sum = add_slices(before, room + unit, grid.blocks(), stride);
                if (phase + 1 < grid.phases())
                    totals[unit] = sum;
                else if (tile < num_tiles(w) && token < args.num_tokens)
                    finish_tokens<T, F>(AllRows{args}, sum, token, 16 * tile + unit % 32 / 4);
            }
            __syncwarp();
            if (lane < grid.blocks() && (phase + 1 < grid.phases() || grid.tile_at(turn + 1) < grid.tiles))
                mbarrier_arrive_cluster(cluster_barriers(drained, lane), 0);
        }
    }
}

template <class T, class F, int kTokens>
cudaError_t launch_split(const LinearArgs& args, int bits, cudaStream_t stream) {
    using Shape = SplitShape<F, kTokens>;
    TensorMap weights;
    InputMapsOf<F> x;
    if (cudaError_t error = make_weight_map(args.weight, kRowTiles, weights)) return error;
    if (cudaError_t error = make_x_maps(args, kTokens, x)) return error;
    const int token_blocks = ceil_div(args.num_tokens, kTokens);
    const SplitGrid grid{bits, row_blocks(args.weight) * token_blocks, token_blocks};
    LaunchConfig config{dim3(), dim3(kSplitThreads), Shape::kSmemBytes, stream};
    config.cluster = static_cast<unsigned>(grid.blocks());
    int clusters = 0;
    if (cudaError_t error = max_clusters<linear_split_sm90_kernel<T, F, kTokens>>(config, clusters)) return error;
    config.grid = dim3(static_cast<unsigned>(min(grid.tiles, clusters) * grid.blocks()));
    return launch<linear_split_sm90_kernel<T, F, kTokens>>(config, args, weights, x, grid);
}

// linear_split_sm90 of weights of one format. More blocks to a cluster where there are few tiles, so that most SMs
// read.
template <class F>
cudaError_t linear_split_sm90_as(const LinearArgs& args, cudaStream_t stream) {
    int num_sms = 0;
    if (cudaError_t error = device_sms(num_sms)) return error;
    const int bits = 16 * row_blocks(args.weight) < 3 * num_sms ? 3 : 2;
    auto run_type = [&](auto t) {
        using T = decltype(t);
        if constexpr (F::kUnitSteps == 1)  // of others these are linear_decode's (linear_choice.h)
            if (args.num_tokens <= 32) return launch_split<T, F, 32>(args, bits, stream);
        if (args.num_tokens <= 64) return launch_split<T, F, 64>(args, bits, stream);
        if constexpr (F::kRoundedInputs)
            return cudaErrorInvalidValue;  // most_split_tokens: there are no registers for more
        else
            return launch_split<T, F, 128>(args, bits, stream);
    };
    return args.weight.type == Element::bf16 ? run_type(bf16{}) : run_type(f16{});
}

}  // namespace infinilm::cuda
