// linear for many tokens on Hopper: the bits of linear_prefill from the same packed weights, by wgmma.
// Mapping: clusters of two blocks, one block per SM, persistent, over tiles of 128 packed rows x 32 to 192 tokens
// (choose_sm90) in the order of tile_place(). The blocks of a cluster have the same tokens, or the same rows, of which
// each brings half to both (multicast). Where tiles are too few for all SMs they have the same tile, and each sums half
// of its slices of k (SharedTile). Stages are brought and multiplied as linear_stages.cuh says, by one thread and by
// two warpgroups of 64 rows. Outputs are left in shared memory, in T, and three warps that do nothing else bring them
// to memory with what is between (activation, residual), while the next tile is multiplied. Slices of k are chains of
// their own, as everywhere (linear.cuh): twice the accumulators, hence tiles of 192 tokens at most. Bytes: the weight
// once for each 8 blocks of tokens, x once from memory, then both from L2: 28 KB an SM for a stage of 768 cycles of
// wgmma (192 tokens). Floor: 2 n k num_tokens / peak of wgmma. Next come the bytes from L2 and the power the GPU may
// draw (docs/kernels.md). Alignment as in kernels.h. Ideas: pranjalssh/fast.cu (matmul_12: persistent,
// warp-specialised, clusters).
#pragma once

#include <type_traits>

#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/linear/linear_choice.h"
#include "cuda/linear/linear_stages.cuh"

namespace infinilm::cuda {

constexpr int kHopperThreads = 384, kWriterWarps = 3, kClusterBlocks = hopper_pair;
constexpr int kHalfSlices = kSlices / kClusterBlocks;  // of a block, where two share a tile
constexpr int kHalfRows = kTileRows / kConsumers,
              kHalfTiles = kRowTiles / kConsumers;  // of a warpgroup that multiplies
constexpr int kHopperBytes = 226 * 1024;            // of shared memory, but for the barriers

// kShares: whether two blocks may share a tile (SharedTile), which takes room.
template <class F, int kTokens, bool kShares>
struct HopperShape : StageShape<F, kTokens> {
    using StageShape<F, kTokens>::kStageBytes;
    static constexpr int kHalfBytes = kTokens * kHalfRows * 2;  // of the outputs
    static constexpr int kPartBytes = kTileRows * kTokens * 4;  // of sums that blocks exchange or keep
    static constexpr int kOtherBytes = kShares ? kHalfSlices * kPartBytes : kConsumers * kHalfBytes;
    static constexpr int kMostStages = (kHopperBytes - kOtherBytes) / kStageBytes;
    static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
    static constexpr int kSmemBytes = kStages * kStageBytes + kOtherBytes;
    static_assert(kOtherBytes >= kConsumers * kHalfBytes && kStages * kStageBytes >= kConsumers * kHalfBytes);
    // Registers of a thread that multiplies, and of another one: (2 x 224 + 56) x 128 <= 65536.
    static constexpr int kSums = F::kRoundedInputs ? kTokens / 2 * 3 : kTokens;
    static constexpr int kConsumerRegisters = kSums > 176 ? 224 : kSums > 128 ? 208 : 200;
    static constexpr int kOtherRegisters = 504 - kConsumers * kConsumerRegisters;
};

// ---- outputs: a warpgroup leaves 64 rows x kTokens in T in a buffer [kTokens][64], whose pieces of 8 rows change
// places so that eight tokens lie in all banks; other warps bring them from there to memory.

template <class T>
__device__ __forceinline__ T* output_piece(uint8_t* buffer, int token, int piece) {
    return reinterpret_cast<T*>(buffer + token * (kHalfRows * 2) + (piece ^ token % 8) * 16);
}

// A warp's 16 rows to the buffer. tile: of these rows in the weight; token: the first; warp: of the warpgroup.
template <class T, class F, int kTokens>
__device__ __forceinline__ void stage_outputs(const LinearArgs& args, const float (&sums)[kTokens / 2], uint8_t* buffer,
                                              int tile, int token, int warp) {
    const RowEnd<F> end(args, tile);
    const int lane = opaque(static_cast<int>(lane_id())), half = lane / 8 % 2;
    uint8_t* to = reinterpret_cast<uint8_t*>(output_piece<T>(buffer, lane / 16 * 8 + lane % 8, 2 * warp + half));
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = sums + 4 * (j + i / 2) + 2 * (i % 2);
            const int first = token + 8 * (j + i / 2) + 2 * (lane % 4), last = args.num_tokens - 1;
            r[i] = pack2<T>(end(pair[0], i % 2, input_scale<F>(args, min(first, last))),
                            end(pair[1], i % 2, input_scale<F>(args, min(first + 1, last))));
        }
        stmatrix_x4_trans(to + j * 8 * kHalfRows * 2, r);
    }
}

// y + residual, for 8 numbers in T.
template <class T>
__device__ __forceinline__ uint4 add8(uint4 y, uint4 residual) {
    float a[8], b[8];
    unpack8<T>(y, a), unpack8<T>(residual, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] += b[i];
    return pack8<T>(a);
}

// From the buffer to out, and what stands between them: activation(gate) * up, the residual. tile, token: the first of
// the buffer; thread: of kThreads. Residuals of kBatch tokens are on their way at a time, of gates one.
template <class T, int kTokens, int kThreads, int kBatch>
__device__ __forceinline__ void write_half(const LinearArgs& args, uint8_t* buffer, int tile, int token, int thread) {
    const PackedWeight& w = args.weight;
    const bool gate_up = opaque(joins_gate_up(args)) != 0;  // so that what follows takes up no registers before
    thread = opaque(thread);
    const int pieces = gate_up ? 4 : 8, piece = thread % pieces, stride = kThreads / pieces;
    const int feature = gate_up ? 8 * (tile + piece) : feature_of_row(w, 16 * tile + 8 * piece);
    // Where gates and ups are apart, rows beyond the last tile would be other features.
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
    auto staged_piece = [&](int t, int of_token) {
        return *reinterpret_cast<const uint4*>(output_piece<T>(buffer, t, of_token));
    };
    if (gate_up || args.gate_in_out)
        write(std::integral_constant<int, 1>{}, [&](int t) {
            const uint4 gate =
                gate_up ? staged_piece(t, 2 * piece) : *reinterpret_cast<const uint4*>(out + t * out_stride);
            return act_mul8<T>(args.activation, gate, staged_piece(t, gate_up ? 2 * piece + 1 : piece));
        });
    else
        write(std::integral_constant<int, kBatch>{}, [&](int t) { return staged_piece(t, piece); });
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
            float y = end(sums[i / 2 * 4 + 2 * half + i % 2], half, input_scale<F>(args, static_cast<int>(t)));
            if (args.residual)
                y = rounded<T>(y) + to_float(static_cast<const T*>(args.residual)[t * args.residual_stride + feature]);
            static_cast<float*>(args.out)[t * args.out_stride + feature] = y;
        }
    }
}

// Which tiles are whose: in each turn a cluster has two, of the same tokens or of the same rows; or, with kShares, its
// blocks share one in the only turn there is.
template <int kTokens, bool kShares>
struct HopperGrid {
    HopperPair pair;
    int row_places, places;  // of clusters: along the rows, all

    HopperGrid(const LinearArgs& args, const HopperPlan& plan)
        : pair(plan.pair),
          row_places(ceil_div(row_blocks(args.weight), pair == HopperPair::same_tokens ? kClusterBlocks : 1)),
          places(hopper_places(args, kTokens, pair)) {}
    // The pairs have the same tokens.
    __host__ __device__ HopperGrid(const PackedWeight& weight, int token_blocks)
        : pair(HopperPair::same_tokens),
          row_places(ceil_div(row_blocks(weight), kClusterBlocks)),
          places(row_places * token_blocks) {}
    __device__ __forceinline__ int index_at(int turn) const {
        return static_cast<int>(blockIdx.x + turn * gridDim.x) / kClusterBlocks;
    }
    __device__ __forceinline__ bool has(int turn) const { return index_at(turn) < places; }
    __device__ __forceinline__ int rank() const { return opaque(static_cast<int>(blockIdx.x)) % kClusterBlocks; }
    __device__ __forceinline__ TilePlace tile_at(int turn) const {
        TilePlace place = tile_place(index_at(turn), row_places, places / row_places);
        if (pair == HopperPair::same_rows) place.token_block = place.token_block * kClusterBlocks + rank();
        if (pair == HopperPair::same_tokens) place.row_block = place.row_block * kClusterBlocks + rank();
        return place;
    }
    __device__ __forceinline__ bool shares_tile() const { return kShares && pair == HopperPair::same_tile; }
    // The slices of this block.
    __device__ __forceinline__ SliceRange slices(int boxes) const {
        if (!shares_tile()) return {boxes, 0, kSlices};
        return {boxes, rank() * kHalfSlices, (rank() + 1) * kHalfSlices};
    }
    // How many blocks read what is brought to a stage, and the n-th of them.
    __device__ __forceinline__ int readers() const { return shares_tile() ? 1 : kClusterBlocks; }
    __device__ __forceinline__ int reader(int n) const { return shares_tile() ? rank() : n; }
};

// What two blocks that share a tile leave in the second one's shared memory: the total of the first one's slices, and
// the sums of each of the second one's slices but the last. These are added in this order, that of linear.cuh. A thread
// finds in a part its own numbers, or those of the same thread of the first block.
template <int kTokens>
struct SharedTile {
    static constexpr int kPart = kTileRows * kTokens / 4;
    float4* parts;  // [kHalfSlices][kConsumerWarps][kTokens / 8][32]; a thread's first

    __device__ __forceinline__ static void put(float4* part, const float (&sums)[kTokens / 2]) {
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j)
            part[32 * j] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
    }
    __device__ __forceinline__ void send(const float (&totals)[kTokens / 2]) const {
        put(shared_of_rank(parts, 1), totals);
    }
    __device__ __forceinline__ void keep(int slice, const float (&sums)[kTokens / 2]) const {
        put(parts + (1 + slice) * kPart, sums);
    }
    // totals: zeros.
    __device__ __forceinline__ void add_parts(float (&totals)[kTokens / 2]) const {
#pragma unroll 1
        for (int part = 0; part < kHalfSlices; ++part)
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) {
                const float4 sums = parts[part * kPart + 32 * j];
                totals[4 * j] += sums.x, totals[4 * j + 1] += sums.y;
                totals[4 * j + 2] += sums.z, totals[4 * j + 3] += sums.w;
            }
    }
};

// What a tile is of: rows of the one weight that all tiles have, and of x. linear_grouped_sm90.cuh has another one.
struct BroughtTile {
    const TensorMap* weights;
    int row_block, token;  // token: the first one
};
template <int kTokens>
struct OneWeight {
    static constexpr bool kListed = false;
    const LinearArgs& args;
    const TensorMap& weights;

    struct Tile {
        const LinearArgs& args;
        int row_block, token;
    };
    // By the thread that brings stages, for turns 0, 1, ..
    template <class Grid>
    __device__ __forceinline__ BroughtTile bring(const Grid& grid, int turn) const {
        const TilePlace place = grid.tile_at(turn);
        return {&weights, place.row_block, place.token_block * kTokens};
    }
    // By others, which have received what was brought.
    template <class Grid>
    __device__ __forceinline__ Tile at(const Grid& grid, int turn) const {
        const TilePlace place = grid.tile_at(turn);
        return {args, place.row_block, place.token_block * kTokens};
    }
};

// All of a block's tiles; there is one at least.
template <class T, class F, int kTokens, bool kShares, class Tiles>
__device__ __forceinline__ void multiply_tiles(const HopperGrid<kTokens, kShares>& grid, Tiles& tiles,
                                               const InputMapsOf<F>& x) {
    using Shape = HopperShape<F, kTokens, kShares>;
    // [kStages][kStageBytes], then [kConsumers][kHalfBytes] of outputs; or, of a shared tile, its parts, and the
    // outputs where the stages were.
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(uint64_t, full, [Shape::kStages]);
    INFINILM_SHARED(uint64_t, empty, [Shape::kStages]);
    INFINILM_SHARED(uint64_t, staged, [kConsumers]);   // the outputs of a warpgroup are in its buffer
    INFINILM_SHARED(uint64_t, written, [kConsumers]);  // and are there no more
    if (threadIdx.x == 0) {
        for (int s = 0; s < Shape::kStages; ++s) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, kConsumerWarps * grid.readers());
        }
        for (int i = 0; i < kConsumers; ++i) mbarrier_init(staged + i, 4), mbarrier_init(written + i, kWriterWarps);
        mbarrier_init_fence();
    }
    cluster_sync();
    const LinearArgs& args = tiles.args;
    const PackedWeight& w = args.weight;
    const int group = static_cast<int>(threadIdx.x) / 128 - 1;
    uint8_t* outputs = smem + (grid.shares_tile() ? 0 : Shape::kStages * Shape::kStageBytes);
    StageRing<Shape::kStages, Shape::kStageBytes> ring{full, empty, smem, {}};
    if (group < 0) {
        registers_decrease<Shape::kOtherRegisters>();
        if (threadIdx.x == 0) {
            if constexpr (!Tiles::kListed) tensor_prefetch(tiles.weights);
            tensor_prefetch(x.numbers);
            if constexpr (F::kBoxScales) tensor_prefetch(x.scales);
            constexpr uint16_t both = (1 << kClusterBlocks) - 1;
            const bool same_rows = grid.pair == HopperPair::same_rows;
            const bool same_tokens = grid.pair == HopperPair::same_tokens;
            const StageSource<F, kTokens> source{x, same_rows ? kRowTiles / kClusterBlocks * grid.rank() : 0,
                                                 same_tokens ? kTokens / kClusterBlocks * grid.rank() : 0,
                                                 same_rows ? both : uint16_t{0}, same_tokens ? both : uint16_t{0}};
            const SliceRange slices = grid.slices(num_boxes(w));
            int turns = 1;
            while (grid.has(turns)) ++turns;
            produce(source, ring, turns, [&](int turn) {
                const BroughtTile tile = tiles.bring(grid, turn);
                return Boxes{tile.weights, tile.row_block * kRowTiles, tile.token, slices.begin(), slices.boxes()};
            });
            grid_launch_dependents();  // the last of what is read is on its way
        } else if (warp_id() > 0 && !args.out_float32) {
            grid_dependency_wait();
            for (int turn = 0; grid.has(turn + 1); ++turn) {
                for (int half = 0; half < kConsumers; ++half) {
                    mbarrier_wait(staged + half, turn % 2);
                    const auto tile = tiles.at(grid, turn);
                    write_half<T, kTokens, 32 * kWriterWarps, (Shape::kOtherRegisters - 40) / 16>(
                        tile.args, outputs + half * Shape::kHalfBytes, tile.row_block * kRowTiles + half * kHalfTiles,
                        tile.token, static_cast<int>(threadIdx.x) - 32);
                    __syncwarp();
                    if (lane_id() == 0) mbarrier_arrive(written + half);
                }
            }
        }
    } else {
        registers_increase<Shape::kConsumerRegisters>();
        grid_dependency_wait();
        const int row_tile = group * kHalfTiles + static_cast<int>(warp_id()) % 4;
        const int lane = static_cast<int>(lane_id());
        ring.released = lane < grid.readers() ? cluster_barriers(empty, grid.reader(lane)) : ClusterBarriers{};
        int turn = 0;
        for (; grid.has(turn); ++turn) {
            const SliceRange slices = grid.slices(num_boxes(w));
            float totals[kTokens / 2] = {}, sums[kTokens / 2];
            auto add = [&] {
#pragma unroll
                for (int i = 0; i < kTokens / 2; ++i) totals[i] += sums[i];
            };
            if (slices.first == 0) {
                consume_slices<T, F, kTokens>(ring, row_tile, slices, sums, add);
                add();
            }
            if constexpr (kShares) {
                if (grid.shares_tile()) {
                    float4* parts = reinterpret_cast<float4*>(smem + Shape::kStages * Shape::kStageBytes);
                    const SharedTile<kTokens> shared{parts + row_tile * (4 * kTokens) + lane};
                    if (slices.first == 0) {
                        shared.send(totals);
                    } else {
                        int slice = 0;
                        consume_slices<T, F, kTokens>(ring, row_tile, slices, sums,
                                                      [&] { shared.keep(slice++, sums); });
                    }
                    cluster_sync();  // all parts are there, and no thread reads stages any more
                    if (slices.first == 0) return;
                    shared.add_parts(totals);
                    add();
                }
            }
            const auto tile = tiles.at(grid, opaque(turn));
            const int warp = opaque(static_cast<int>(threadIdx.x)) / 32 % 4;
            const int row_tile_of_warp = tile.row_block * kRowTiles + group * kHalfTiles + warp;
            if constexpr (Shape::kSums <= 128 && !Tiles::kListed) {
                if (args.out_float32) {
                    write_float32<T, F, kTokens>(args, totals, row_tile_of_warp, tile.token);
                    continue;
                }
            }
            uint8_t* buffer = outputs + group * Shape::kHalfBytes;
            mbarrier_wait(written + group, turn % 2 ^ 1);
            stage_outputs<T, F, kTokens>(tile.args, totals, buffer, row_tile_of_warp, tile.token, warp);
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(staged + group);
        }
        if (!args.out_float32) {  // the outputs of the last tile: there is nothing else to do
            const auto tile = tiles.at(grid, turn - 1);
            const int thread = opaque(static_cast<int>(threadIdx.x)) % 128;
            mbarrier_wait(staged + group, (turn - 1) % 2);
            write_half<T, kTokens, 128, 4>(tile.args, outputs + group * Shape::kHalfBytes,
                                           tile.row_block * kRowTiles + group * kHalfTiles, tile.token, thread);
        }
    }
    // No block's shared memory goes while the other may still arrive in it; those that share a tile have met already.
    if (group < 0 || !grid.shares_tile()) cluster_sync();
}

template <class T, class F, int kTokens, bool kShares>
__global__ void __launch_bounds__(kHopperThreads, 1)
    linear_sm90_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ TensorMap weights,
                       const __grid_constant__ InputMapsOf<F> x,
                       const __grid_constant__ HopperGrid<kTokens, kShares> grid) {
    OneWeight<kTokens> tiles{args, weights};
    multiply_tiles<T, F, kTokens, kShares>(grid, tiles, x);
}

template <class T, class F, int kTokens, bool kShares>
cudaError_t launch_sm90(const LinearArgs& args, const HopperPlan& plan, cudaStream_t stream) {
    TensorMap weights;
    InputMapsOf<F> x;
    const int box_tiles = kRowTiles / (plan.pair == HopperPair::same_rows ? kClusterBlocks : 1);
    const int box_tokens = kTokens / (plan.pair == HopperPair::same_tokens ? kClusterBlocks : 1);
    if (cudaError_t error = make_weight_map(args.weight, box_tiles, weights)) return error;
    if (cudaError_t error = make_x_maps(args, box_tokens, x)) return error;
    const HopperGrid<kTokens, kShares> grid(args, plan);
    LaunchConfig config{dim3(), dim3(kHopperThreads), HopperShape<F, kTokens, kShares>::kSmemBytes, stream};
    config.cluster = kClusterBlocks;
    int clusters = grid.places;
    if (plan.pair != HopperPair::same_tile) {
        if (cudaError_t error = max_clusters<linear_sm90_kernel<T, F, kTokens, kShares>>(config, clusters))
            return error;
    }
    config.grid = dim3(static_cast<unsigned>(min(grid.places, clusters) * kClusterBlocks));
    return launch<linear_sm90_kernel<T, F, kTokens, kShares>>(config, args, weights, x, grid);
}

// linear_sm90 of weights of one format, by a plan of choose_sm90(). Tiles of 64 tokens of 16-bit weights have a kernel
// for pairs that share them and one with more stages.
template <class F>
cudaError_t linear_sm90_as(const LinearArgs& args, const HopperPlan& plan, cudaStream_t stream) {
    constexpr bool kIsAsType = std::is_same_v<F, AsType>;
    auto run_type = [&](auto t) {
        using T = decltype(t);
        if constexpr (!F::kBoxScales)
            if (plan.tokens == 128) return launch_sm90<T, F, 128, false>(args, plan, stream);
        if constexpr (kIsAsType || F::kRoundedInputs)
            if (plan.tokens == 32) return launch_sm90<T, F, 32, true>(args, plan, stream);
        if constexpr (kIsAsType) {
            if (plan.tokens == 176) return launch_sm90<T, F, 176, false>(args, plan, stream);
            if (plan.tokens == 192) return launch_sm90<T, F, 192, false>(args, plan, stream);
            if (plan.pair != HopperPair::same_tile) return launch_sm90<T, F, 64, false>(args, plan, stream);
        }
        return launch_sm90<T, F, 64, true>(args, plan, stream);
    };
    return args.weight.type == Element::bf16 ? run_type(bf16{}) : run_type(f16{});
}

}  // namespace infinilm::cuda
