// linear for many tokens on every GPU from sm_80 on: out[t, f] = epilogue(x[t] . weight[f]), without norm and rope.
// Mapping: a block of 8 warps computes 128 packed rows x 128 tokens (or 64: choose_prefill), a warp 64 x 32 (32 x 32);
// which tile, tile_place() says. Where tiles of 64 tokens are too few for all SMs, 2, 4 or 8 blocks share each: they
// have some of its slices of k, leave the sums in a workspace (kernels.h), and the last to arrive adds them. k comes in
// stages of two turns (weight_formats.cuh: of a step of 16 columns, or two where weights are quantised) through four
// buffers of shared memory, by cp.async: the weight as the contiguous units it is packed in, one 16-byte read of a lane
// each; x row by row, its 16-byte pieces swizzled for ldmatrix. Weights that are not quantised are read one turn ahead
// of their mma. A slice of k is a chain of its own, added to the total at its end (linear.cuh): twice the accumulators,
// 128 registers of a thread, and one block per SM, is the price of rows whose bits do not depend on num_tokens. Bytes:
// the weight once for each 1024 tokens, x once from memory, then both from L2. Floor: 2 n k num_tokens / peak of
// mma.sync. Shared memory comes next: a warp reads 3 KB for 16 mma, 96 of the 128 bytes a cycle of an A100. Alignment
// as in kernels.h. Ideas: IST-DASLab/marlin (weights stored as fragments), CUTLASS's multistage mainloop.
#pragma once

#include <type_traits>

#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/linear/linear_choice.h"
#include "cuda/linear/linear_tile.cuh"

namespace infinilm::cuda {

constexpr int kPrefillThreads = 256, kPrefillStages = 4, kStageTurns = 2;

// How kTokens x 128 are cut among 8 warps, and what a stage holds: units of each tile of rows, then blocks of 32
// columns of x, [kTokenBlocks][kTokens][64 bytes].
template <class F, int kTokens>
struct TileShape {
    static constexpr int kColumns = 4, kTiles = kTokens / 32;  // of a warp: 8 tokens each; 16 rows each
    static constexpr int kTokenWarps = kTokens / (8 * kColumns);
    static constexpr int kSteps = kStageTurns * F::kTurnSteps, kUnits = kSteps / F::kUnitSteps;  // of a stage
    static constexpr int kTileBytes = kUnits * unit_bytes_of<F>, kWeightBytes = kRowTiles * kTileBytes;
    static constexpr int kTokenBlocks = kSteps / 2, kTokenBytes = kTokenBlocks * kTokens * 64;
    static constexpr int kScaleBytes = F::kBoxScales ? kTokens * 4 : 0;  // of the tokens, behind x
    static_assert(!F::kBoxScales || 16 * kSteps <= kBoxColumns, "a stage has columns of one box");
    static constexpr int kStageBytes = kWeightBytes + kTokenBytes + kScaleBytes,
                         kSmemBytes = kPrefillStages * kStageBytes;
    static_assert(kSmemBytes >= kTileRows * kTokens * 4, "the stages become the buffer of the outputs");
};

// Bytes from the start of a block of x to 8 columns of a token: rows of 64 bytes, in which the four pieces change
// places so that the eight rows of an ldmatrix lie in all banks.
__device__ __forceinline__ int token_piece(int token, int piece) {
    return token * 64 + (piece ^ (token >> 1 & 3)) * 16;
}

// Copies a block's stages to shared memory. rows: the weight from the block's first tile on; x: [num_tokens, k] from
// its first token on; both from the block's first unit of k. What lies beyond the weight, the tokens or k becomes zero.
template <class T, class F, int kTokens>
struct StageLoader {
    using Shape = TileShape<F, kTokens>;
    const uint8_t* rows;
    const T* x;
    int64_t x_stride;
    int tiles, tokens, k, units;  // from here to the end
    int row_units;                // of a row of the weight
    int first_column;             // of k

    __device__ __forceinline__ void load(uint8_t* smem, int stage) const {
        if (stage * Shape::kUnits < units) {
            uint8_t* to = smem + stage % kPrefillStages * Shape::kStageBytes;
            constexpr int kTileBytes = Shape::kTileBytes;
#pragma unroll
            for (int at = 0; at < Shape::kWeightBytes; at += kPrefillThreads * 16) {
                const int i = at + static_cast<int>(threadIdx.x) * 16, tile = i / kTileBytes;
                if (Shape::kWeightBytes % (kPrefillThreads * 16) != 0 && i >= Shape::kWeightBytes) break;
                const bool valid = tile < tiles && stage * Shape::kUnits + i % kTileBytes / unit_bytes_of<F> < units;
                const uint8_t* from =
                    rows + static_cast<int64_t>(tile) * row_units * unit_bytes_of<F> + stage * int64_t{kTileBytes};
                cp_async_16(to + i, valid ? from + i % kTileBytes : rows, valid);
            }
            constexpr int kPieces = 4 * Shape::kTokenBlocks;  // of a token: 8 columns each
#pragma unroll
            for (int at = 0; at < kTokens * kPieces; at += kPrefillThreads) {
                const int i = at + static_cast<int>(threadIdx.x), token = i / kPieces, piece = i % kPieces;
                const int column = stage * Shape::kSteps * 16 + piece * 8;
                const bool valid = token < tokens && column < k;
                cp_async_16(to + Shape::kWeightBytes + piece / 4 * kTokens * 64 + token_piece(token, piece % 4),
                            valid ? x + token * x_stride + column : x, valid);
            }
            if constexpr (F::kBoxScales) load_scales(to + Shape::kWeightBytes + Shape::kTokenBytes, stage);
        }
        cp_async_commit();  // an empty group, too: the waits count groups
    }

private:
    // The scales of the tokens for the columns of a stage, one of each token.
    __device__ __forceinline__ void load_scales(uint8_t* to, int stage) const {
        const int token = static_cast<int>(threadIdx.x), column = stage * Shape::kSteps * 16;
        if (token >= kTokens) return;
        const bool valid = token < tokens && column < k;
        const float* scales = reinterpret_cast<const float*>(x + token * x_stride + k);
        cp_async_4(to + token * 4, valid ? scales + (first_column + column) / kBoxColumns : scales, valid);
    }
};

// What a warp multiplies in one turn: units as they lie, and columns of x.
template <class F, int kTokens>
struct TurnFragments {
    using Shape = TileShape<F, kTokens>;
    static constexpr int kSteps = F::kTurnSteps;
    Unit<F> a[Shape::kTiles];
    uint32_t b[kSteps][Shape::kColumns / 2][4];
    float2 token_scales[F::kBoxScales ? Shape::kColumns : 1];

    // stage: its bytes; turn: of the stage. tile, token: the warp's first in the block.
    __device__ __forceinline__ void load(const uint8_t* stage, int turn, int tile, int token) {
        const int lane = static_cast<int>(lane_id()), first = turn * kSteps;  // step of the stage
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i)
            a[i].load_shared(stage + (tile + i) * Shape::kTileBytes + first / F::kUnitSteps * unit_bytes_of<F>);
        if constexpr (F::kBoxScales)
#pragma unroll
            for (int j = 0; j < Shape::kColumns; ++j)
                token_scales[j] = *reinterpret_cast<const float2*>(stage + Shape::kWeightBytes + Shape::kTokenBytes +
                                                                   (token + 8 * j + lane % 4 * 2) * 4);
        const int row = token + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int block = (first + s) / 2, piece = (first + s) % 2 * 2 + lane / 8 % 2;
#pragma unroll
            for (int j = 0; j < Shape::kColumns / 2; ++j)
                ldmatrix_x4(b[s][j],
                            stage + Shape::kWeightBytes + block * kTokens * 64 + token_piece(row + 16 * j, piece));
        }
    }

    template <class T>
    __device__ __forceinline__ void multiply(float (&sums)[Shape::kTiles][Shape::kColumns][4], int turn) const {
        const int first = turn * kSteps % F::kUnitSteps;  // step of the unit
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i) {
            uint32_t rows[kSteps][4];
#pragma unroll
            for (int s = 0; s < kSteps; ++s) F::template fragment<T>(rows[s], a[i], first + s);
#pragma unroll
            for (int j = 0; j < Shape::kColumns; ++j) {
#pragma unroll
                for (int s = 0; s < kSteps; ++s) {
                    const uint32_t column[2] = {b[s][j / 2][j % 2 * 2], b[s][j / 2][j % 2 * 2 + 1]};
                    BoxScales scales{};
                    if constexpr (F::kBoxScales)
                        scales = {{bits_to_float(a[i].scales[0]), bits_to_float(a[i].scales[1])}, token_scales[j]};
                    multiply_step<T, F>(sums[i][j], rows[s], column, scales);
                }
            }
        }
    }
};

// Where `features` (8 neighbours, at a row of 8 of the tile) of a token lie in a buffer [tokens][kRows] of floats: the
// four tokens that a warp's lanes write at once get different banks.
template <int kRows>
__device__ __forceinline__ float* staged(float* buffer, int token, int features) {
    return buffer + token * kRows + (features ^ (token / 2 % 4)) * 8;
}

// From the buffer to out, 16 bytes at a time along the features, by kThreads threads. kPieces: groups of 8 neighbouring
// features that a token has in the buffer. tile, token: the first of the buffer.
template <class T, class Out, int kRows, int kTokens, int kPieces, int kThreads>
__device__ __forceinline__ void write_outputs(const LinearArgs& args, float* buffer, int tile, int token) {
    const PackedWeight& w = args.weight;
    const int thread = threadIdx.x % kThreads, piece = thread % kPieces;
    const bool gate_up = joins_gate_up(args);
    const int feature = gate_up ? 8 * (tile + piece) : feature_of_row(w, 16 * tile + 8 * piece);
    // Where gates and ups are apart, rows beyond the last tile would be other features.
    if (feature >= (gate_up ? w.n / 2 : w.n) || tile + piece / (gate_up ? 1 : 2) >= num_tiles(w)) return;
    const int tokens = min(kTokens, args.num_tokens - token);
    for (int t = thread / kPieces; t < tokens; t += kThreads / kPieces) {
        float y[8];
        load8(staged<kRows>(buffer, t, piece), y);
        const int64_t row = token + t;
        if constexpr (std::is_same_v<Out, T> && kPieces == kRows / 8) {
            if (args.gate_in_out) {
                const T* gates = static_cast<const T*>(args.out) + row * args.out_stride + feature;
                unpack8<T>(act_mul8<T>(args.activation, *reinterpret_cast<const uint4*>(gates), pack8<T>(y)), y);
            }
        }
        if (args.residual) {
            float r[8];
            load8(static_cast<const T*>(args.residual) + row * args.residual_stride + feature, r);
#pragma unroll
            for (int i = 0; i < 8; ++i) y[i] = rounded<T>(y[i]) + r[i];
        }
        store8(static_cast<Out*>(args.out) + row * args.out_stride + feature, y);
    }
}

// The end of a block of sums: scales of rows, bias, activation(gate) * up, residual, out. A group of kWarps warps holds
// 16 kTiles kWarps rows x 8 kColumns tokens; warp w of it tiles kTiles w .. of 16 rows, as mma_m16n8k16 leaves them.
// buffer: shared, one float for each sum, free when the group calls; `sync` is a barrier of the group. tile, token: the
// group's first.
template <class T, class F, int kWarps, int kTiles, int kColumns, class Sync>
__device__ __forceinline__ void store_sums(const LinearArgs& args, const float (&sums)[kTiles][kColumns][4],
                                           float* buffer, int tile, int token, Sync sync) {
    constexpr int kRows = 16 * kTiles * kWarps, kTokens = 8 * kColumns, kThreads = 32 * kWarps;
    const bool gate_up = joins_gate_up(args);
    const int group = lane_id() / 4, first = warp_id() % kWarps * kTiles;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const RowEnd<F> end(args, tile + first + i);
        auto stage = [&](auto finish) {  // finish(token, its sums in rows r and r + 8)
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int t = 8 * j + static_cast<int>(lane_id()) % 4 * 2 + c;
                    const float scale = input_scale<F>(args, min(token + t, args.num_tokens - 1));
                    finish(t, end(sums[i][j][c], 0, scale), end(sums[i][j][c + 2], 1, scale));
                }
        };
        if (gate_up) {
            stage([&](int t, float gate, float up) {
                staged<kRows>(buffer, t, first + i)[group] = act_mul<T>(args.activation, gate, up);
            });
        } else {
            stage([&](int t, float low, float high) {
                staged<kRows>(buffer, t, 2 * (first + i))[group] = low;
                staged<kRows>(buffer, t, 2 * (first + i) + 1)[group] = high;
            });
        }
    }
    sync();
    auto write = [&](auto pieces) {
        constexpr int kPieces = decltype(pieces)::value;
        if (args.out_float32)
            write_outputs<T, float, kRows, kTokens, kPieces, kThreads>(args, buffer, tile, token);
        else
            write_outputs<T, T, kRows, kTokens, kPieces, kThreads>(args, buffer, tile, token);
    };
    if (gate_up)
        write(std::integral_constant<int, kRows / 16>{});
    else
        write(std::integral_constant<int, kRows / 8>{});
}

// Tiles of tokens, and 2^split_bits blocks, neighbours, that share a tile: each has as many slices of k.
struct PrefillGrid {
    int token_blocks, split_bits;

    __device__ __forceinline__ int tile() const { return static_cast<int>(blockIdx.x) >> split_bits; }
    __device__ __forceinline__ int split() const { return static_cast<int>(blockIdx.x) & ((1 << split_bits) - 1); }
    __device__ __forceinline__ int slices() const { return kSlices >> split_bits; }  // of a block
    template <class F>
    __device__ __forceinline__ int first_unit(int units) const {
        return slice_begin<F>(split() * slices(), units);
    }
    template <class F>
    __device__ __forceinline__ int end_unit(int units) const {
        return slice_begin<F>((split() + 1) * slices(), units);
    }
    // How many blocks of the tile have come, and its part that holds a slice: see split_parts.
    __device__ __forceinline__ unsigned* arrived(const LinearArgs& args) const {
        return static_cast<unsigned*>(args.workspace) + tile();
    }
    __device__ __forceinline__ float4* part_of(const LinearArgs& args, int slice) const {
        const int part = tile() * split_parts(1 << split_bits) + max(slice - slices() + 1, 0);
        return reinterpret_cast<float4*>(static_cast<uint8_t*>(args.workspace) + split_counter_bytes +
                                         static_cast<int64_t>(part) * kSplitBytes);
    }
};

// Sums of the block to or from a part of the workspace, [sums / 4][kPrefillThreads] float4: where the same thread of
// another block finds them.
template <int kTiles, int kColumns>
__device__ __forceinline__ void store_part(float4* part, const float (&sums)[kTiles][kColumns][4]) {
#pragma unroll
    for (int i = 0; i < kTiles * kColumns; ++i) {
        const float (&s)[4] = sums[i / kColumns][i % kColumns];
        part[i * kPrefillThreads + threadIdx.x] = make_float4(s[0], s[1], s[2], s[3]);
    }
}

// The end of a block that shares its tile: leaves its sums in the workspace. The last block to arrive gets those of all
// slices, added in their order, and true. No kernel behind this one writes to the workspace before all of this one has
// ended, as it waits for that first.
template <int kTiles, int kColumns>
__device__ __forceinline__ bool join_parts(const LinearArgs& args, const PrefillGrid& grid, uint8_t* smem,
                                           float (&totals)[kTiles][kColumns][4]) {
    if (grid.split() == 0) store_part(grid.part_of(args, 0), totals);
    cp_async_wait<0>();
    __syncthreads();  // all sums of the block are written, and the stages are free
    bool* is_last = reinterpret_cast<bool*>(smem);
    if (threadIdx.x == 0) {
        unsigned* arrived = grid.arrived(args);
        *is_last = atomic_add_acq_rel(arrived, 1) + 1 == 1u << grid.split_bits;
        if (*is_last) *arrived = 0;  // ready for the next kernel
    }
    __syncthreads();
    if (!*is_last) return false;
    const float4* part = grid.part_of(args, 0);
#pragma unroll
    for (int i = 0; i < kTiles * kColumns; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) totals[i / kColumns][i % kColumns][c] = 0.0f;
#pragma unroll 1
    for (int count = split_parts(1 << grid.split_bits); count > 0; --count, part += kSplitBytes / 16) {
        float4 sums[kTiles * kColumns];
#pragma unroll
        for (int i = 0; i < kTiles * kColumns; ++i) sums[i] = part[i * kPrefillThreads + threadIdx.x];
#pragma unroll
        for (int i = 0; i < kTiles * kColumns; ++i) {
            float (&total)[4] = totals[i / kColumns][i % kColumns];
            total[0] += sums[i].x, total[1] += sums[i].y, total[2] += sums[i].z, total[3] += sums[i].w;
        }
    }
    return true;
}

// Blocks that an SM is to hold, by their registers. For sm_90 ptxas widens e4m3 to multiply it, which takes more
// registers than two blocks leave each other. Hopper does not run that code (linear_choice.h), and compute_90 is
// compiled for newer GPUs, which get its PTX where the build has no machine code for them.
template <class F, int kTokens>
constexpr int prefill_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    if (F::kRoundedInputs) return 1;
#endif
    return kTokens == 64 && F::kScales == 0 ? 2 : 1;
}

template <class T, class F, int kTokens>
__global__ void __launch_bounds__(kPrefillThreads, prefill_blocks<F, kTokens>())
    linear_prefill_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ PrefillGrid grid) {
    grid_dependency_wait();
    using Shape = TileShape<F, kTokens>;
    constexpr int kTiles = Shape::kTiles, kColumns = Shape::kColumns;
    constexpr int kUnitTurns = F::kUnitSteps / F::kTurnSteps, kUnitColumns = 16 * F::kUnitSteps;
    INFINILM_DYNAMIC_SHARED(smem);  // [kPrefillStages][kStageBytes], at the end the outputs
    const PackedWeight& w = args.weight;
    const TilePlace place = tile_place(grid.tile(), row_blocks(w), grid.token_blocks);
    const int tile = place.row_block * kRowTiles, token = place.token_block * kTokens;
    const int row_units = units_of<F>(w.k), first = grid.template first_unit<F>(row_units),
              first_column = first * kUnitColumns;
    const int units = grid.template end_unit<F>(row_units) - first, stages = ceil_div(units, Shape::kUnits);
    const StageLoader<T, F, kTokens> loader{
        static_cast<const uint8_t*>(w.data) + (static_cast<int64_t>(tile) * row_units + first) * unit_bytes_of<F>,
        static_cast<const T*>(args.x) + token * args.x_stride + first_column,
        args.x_stride,
        num_tiles(w) - tile,
        args.num_tokens - token,
        w.k - first_column,
        units,
        row_units,
        first_column};
    const int warp = static_cast<int>(warp_id());
    const int warp_tile = warp / Shape::kTokenWarps * kTiles, warp_token = warp % Shape::kTokenWarps * 8 * kColumns;
    auto bytes_of = [&](int stage) { return smem + stage % kPrefillStages * Shape::kStageBytes; };

    float sums[kTiles][kColumns][4] = {}, totals[kTiles][kColumns][4] = {};
    int end = slice_end<F>(first, row_units) - first;
    auto end_turn = [&](int turn) {  // of all of the block
        // The last stage may go beyond the block's units, where columns of x meet zeros.
        if (turn % kUnitTurns != kUnitTurns - 1 || turn / kUnitTurns + 1 != end || end > units) return;
        if constexpr (kTokens == kSplitTokens) {
            if (grid.split() > 0) store_part(grid.part_of(args, slice_of<F>(first + end - 1, row_units)), sums);
        }
        end = slice_end<F>(first + end, row_units) - first;
#pragma unroll
        for (int a = 0; a < kTiles; ++a)
#pragma unroll
            for (int b = 0; b < kColumns; ++b)
#pragma unroll
                for (int c = 0; c < 4; ++c) totals[a][b][c] += sums[a][b][c], sums[a][b][c] = 0.0f;
    };
    if constexpr (F::kTurnSteps == 1) {
        for (int stage = 0; stage < kPrefillStages; ++stage) loader.load(smem, stage);
        cp_async_wait<kPrefillStages - 1>();
        __syncthreads();
        TurnFragments<F, kTokens> fragments[kStageTurns];
        fragments[0].load(bytes_of(0), 0, warp_tile, warp_token);
        for (int stage = 0; stage < stages; ++stage) {
#pragma unroll
            for (int i = 0; i < kStageTurns; ++i) {
                const bool last = i == kStageTurns - 1;
                if (last) {  // the next stage is there for all, and all have the fragments of this one
                    cp_async_wait<kPrefillStages - 2>();
                    __syncthreads();
                    loader.load(smem, stage + kPrefillStages);
                }
                // Past the last stage these loads are dummies: no product uses them.
                fragments[last ? 0 : i + 1].load(bytes_of(stage + last), last ? 0 : i + 1, warp_tile, warp_token);
                fragments[i].template multiply<T>(sums, i);
                end_turn(stage * kStageTurns + i);
            }
        }
    } else {  // Not ahead: the registers are for widened weights.
        for (int stage = 0; stage < kPrefillStages - 1; ++stage) loader.load(smem, stage);
        for (int stage = 0; stage < stages; ++stage) {
            cp_async_wait<kPrefillStages - 2>();
            __syncthreads();  // this stage is there for all, and no thread reads the one before any more
            loader.load(smem, stage + kPrefillStages - 1);
#pragma unroll
            for (int i = 0; i < kStageTurns; ++i) {
                TurnFragments<F, kTokens> fragments;
                fragments.load(bytes_of(stage), i, warp_tile, warp_token);
                fragments.template multiply<T>(sums, i);
                end_turn(stage * kStageTurns + i);
            }
        }
    }
    if constexpr (kTokens == kSplitTokens) {
        if (grid.split_bits > 0 && !join_parts(args, grid, smem, totals)) return;
    }
    __syncthreads();  // the stages are free
    store_sums<T, F, 1>(args, totals, reinterpret_cast<float*>(smem) + warp * 16 * kTiles * 8 * kColumns,
                        tile + warp_tile, token + warp_token, [] { __syncwarp(); });
}

template <class T, class F, int kTokens>
cudaError_t launch_prefill(const LinearArgs& args, int splits, cudaStream_t stream) {
    static_assert(kTileRows == kSplitRows);
    PrefillGrid grid{ceil_div(args.num_tokens, kTokens), 0};
    while (1 << grid.split_bits < splits) ++grid.split_bits;
    const LaunchConfig config{dim3(static_cast<unsigned>(row_blocks(args.weight) * grid.token_blocks * splits)),
                              dim3(kPrefillThreads), TileShape<F, kTokens>::kSmemBytes, stream};
    return launch<linear_prefill_kernel<T, F, kTokens>>(config, args, grid);
}

// linear_prefill of a quantised weight, instantiated in a file for each format: tiles of 64 tokens alone. An SM holds
// two blocks of int8 and fp8, so that one widens weights while the other multiplies; int4 has registers for one.
template <class F>
cudaError_t linear_prefill_as(const LinearArgs& args, const PrefillPlan& plan, cudaStream_t stream) {
    return args.weight.type == Element::bf16 ? launch_prefill<bf16, F, 64>(args, plan.splits, stream)
                                             : launch_prefill<f16, F, 64>(args, plan.splits, stream);
}

}  // namespace infinilm::cuda
