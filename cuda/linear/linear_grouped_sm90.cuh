// linear_grouped for items of many rows on Hopper, as prompts give the experts of a layer: linear_sm90
// (linear_sm90.cuh), whose code this is, with tiles of 128 packed rows x the rows of an item. So a row has the bits it
// has there. Rows of x lie in the order of items, because a tensor map brings neighbours; what stands behind an item's
// rows is multiplied and dropped. The blocks of a cluster have the rows of one item, and two blocks of rows of its
// weight. Each weight has a tensor map in device memory, made when the weights are loaded. The thread that brings
// stages looks the next tile up while those of the last one are under way, and leaves it in shared memory to those that
// end its outputs. Floor: 2 n k rows / peak of wgmma, or the weights of each item once from memory; L2 gives 24 KB an
// SM for a stage of 684 cycles. Rows that an item lacks of 128 are lost. Idea: the list of groups of DeepGEMM's grouped
// GEMM (contiguous layout).
#pragma once

#include "cuda/linear/linear_sm90.cuh"

namespace infinilm::cuda {

// A tile as it is handed on. Slots are written again when their tile is long over: the thread that brings stages is
// ahead of the outputs by the stages, at least one a tile, and two tiles whose outputs are being made and written.
struct ListedTile {
    const void* data;
    const float* bias;
    int row_block, token, end;  // token, end: of the rows of the item
};
constexpr int kListedSlots = 16;

struct ListedTiles {
    static constexpr bool kListed = true;
    const GroupedLinearArgs& grouped;
    const LinearArgs& args;
    ListedTile* slots;               // [kListedSlots] in shared memory
    ListedTile next = {};            // of the thread that brings stages
    const TensorMap* map = nullptr;  // of the weight of `next`

    struct Tile {
        LinearArgs args;
        int row_block, token;
    };
    template <class Grid>
    __device__ __forceinline__ void look_up(const Grid& grid, int turn) {
        const TilePlace place = grid.tile_at(turn);  // whose blocks of tokens are the items
        const int4 item = grouped.items[place.token_block];
        const GroupWeight& weight = grouped.weights[item.x];
        next = {weight.data, weight.bias, place.row_block, item.y, item.y + item.z};
        map = reinterpret_cast<const TensorMap*>(static_cast<const uint8_t*>(grouped.maps) +
                                                 static_cast<int64_t>(item.x) * weight_map_bytes);
        tensor_map_acquire(*map);
        tensor_prefetch(*map);
    }
    template <class Grid>
    __device__ __forceinline__ BroughtTile bring(const Grid& grid, int turn) {
        if (turn == 0) look_up(grid, 0);
        const BroughtTile tile{map, next.row_block, next.token};
        slots[turn % kListedSlots] = next;  // its first stage, which others wait for, comes behind it
        if (grid.has(turn + 1)) look_up(grid, turn + 1);
        return tile;
    }
    template <class Grid>
    __device__ __forceinline__ Tile at(const Grid&, int turn) const {
        const ListedTile& slot = slots[turn % kListedSlots];
        Tile tile{args, slot.row_block, slot.token};
        tile.args.weight.data = slot.data, tile.args.weight.bias = slot.bias, tile.args.num_tokens = slot.end;
        return tile;
    }
};

template <class T, class F>
__global__ void __launch_bounds__(kHopperThreads, 1)
    linear_grouped_sm90_kernel(const __grid_constant__ GroupedLinearArgs args,
                               const __grid_constant__ InputMapsOf<F> x) {
    static_assert(HopperShape<F, hopper_item_rows, false>::kStages + 2 <= kListedSlots);
    grid_dependency_wait();  // the list is an output of the kernel in front
    INFINILM_SHARED(ListedTile, slots, [kListedSlots]);
    const HopperGrid<hopper_item_rows, false> grid(args.linear.weight,
                                                   args.num_items ? *args.num_items : args.most_items);
    if (!grid.has(0)) return;  // nor has the other block of the cluster
    ListedTiles tiles{args, args.linear, slots};
    multiply_tiles<T, F, hopper_item_rows, false>(grid, tiles, x);
}

// linear_grouped_sm90 of weights of one format.
template <class F>
cudaError_t linear_grouped_sm90_as(const GroupedLinearArgs& args, cudaStream_t stream) {
    auto run_type = [&](auto t) {
        constexpr auto kernel = linear_grouped_sm90_kernel<decltype(t), F>;
        InputMapsOf<F> x;
        if (cudaError_t error = make_x_maps(args.linear, hopper_item_rows / kClusterBlocks, x)) return error;
        LaunchConfig config{dim3(), dim3(kHopperThreads), HopperShape<F, hopper_item_rows, false>::kSmemBytes, stream};
        config.cluster = kClusterBlocks;
        int clusters = 0;
        if (cudaError_t error = max_clusters<kernel>(config, clusters)) return error;
        const int places = HopperGrid<hopper_item_rows, false>(args.linear.weight, args.most_items).places;
        config.grid = dim3(static_cast<unsigned>(min(places, clusters) * kClusterBlocks));
        return launch<kernel>(config, args, x);
    };
    return args.linear.weight.type == Element::bf16 ? run_type(bf16{}) : run_type(f16{});
}

}  // namespace infinilm::cuda
