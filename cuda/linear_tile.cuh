// What linear_prefill and linear_sm90 share: tiles of 128 packed rows x 64 or 128 tokens, which block computes which,
// where a slice of k ends, and how a tile's sums become outputs.
#pragma once

#include <type_traits>

#include "linear.cuh"
#include "norm.cuh"

namespace infinilm::cuda {

constexpr int kTileRows = 128, kRowTiles = kTileRows / 16;  // packed rows of a tile, and tiles of 16 rows in it

__host__ __device__ inline int row_blocks(const PackedWeight& w) { return ceil_div(num_tiles(w), kRowTiles); }

// Tokens of a tile. Fewer tokens give more blocks, so that a small product fills the GPU, but each byte that a block
// brings into shared memory is then used less: 64 tokens are taken to cost 9/16 of 128 (an estimate).
inline int choose_tile_tokens(const LinearArgs& a, int num_sms) {
    auto waves = [&](int tokens) {
        return ceil_div<int64_t>(int64_t{row_blocks(a.weight)} * ceil_div(a.num_tokens, tokens), num_sms);
    };
    return 9 * waves(64) < 16 * waves(128) ? 64 : 128;
}

// Order of tiles: within a group of 8 token blocks, token blocks fastest. The blocks that run at one time (about as
// many as SMs, 108 to 170) then cover 8 token blocks x 13 to 21 row blocks, nearly a square, which reads the fewest
// different bytes; x of a group stays in L2, so that the weights come from memory once for each 1024 tokens.
struct TilePlace {
    int row_block, token_block;
};
__device__ __forceinline__ TilePlace tile_place(int index, int row_blocks, int token_blocks) {
    constexpr int kGroup = 8;
    const int first = index / (kGroup * row_blocks) * kGroup, width = min(kGroup, token_blocks - first);
    const int rest = index - first * row_blocks;
    return {rest / width, first + rest % width};
}

// The end of the slice (linear.cuh) that holds a unit. Empty slices, of k less than 8 units, would add zero: skipped.
__device__ __forceinline__ int slice_end(int unit, int units) {
    return slice_begin((kSlices * (unit + 1) - 1) / units + 1, units);
}

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
    // Of gates and ups apart, rows beyond the last tile would be other features.
    if (feature >= (gate_up ? w.n / 2 : w.n) || tile + piece / (gate_up ? 1 : 2) >= num_tiles(w)) return;
    const int tokens = min(kTokens, args.num_tokens - token);
    for (int t = thread / kPieces; t < tokens; t += kThreads / kPieces) {
        float y[8];
        load8(staged<kRows>(buffer, t, piece), y);
        const int64_t row = token + t;
        if (args.residual) {
            float r[8];
            load8(static_cast<const T*>(args.residual) + row * args.residual_stride + feature, r);
#pragma unroll
            for (int i = 0; i < 8; ++i) y[i] = rounded<T>(y[i]) + r[i];
        }
        store8(static_cast<Out*>(args.out) + row * args.out_stride + feature, y);
    }
}

// What a lane's sums in rows r and r + 8 of a tile of 16 rows (half 0 and 1) are multiplied by and what is added.
template <class F>
struct RowEnd {
    float bias[2] = {0.0f, 0.0f}, scale[2];

    __device__ __forceinline__ RowEnd(const LinearArgs& args, int tile) {
        const PackedWeight& w = args.weight;
        const int row = static_cast<int>(lane_id()) / 4;
        if constexpr (F::kRowScales) {
            const float* scales = row_scales(w) + 16 * min(tile, num_tiles(w) - 1) + row;
            scale[0] = scales[0], scale[1] = scales[8];
        }
        if (w.bias)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int feature = feature_of_row(w, 16 * tile + 8 * half + row);
                if (feature < w.n) bias[half] = w.bias[feature];
            }
    }
    __device__ __forceinline__ float operator()(float sum, int half) const {
        if constexpr (F::kRowScales) sum = __fmul_rn(sum, scale[half]);
        return sum + bias[half];
    }
};

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
                for (int c = 0; c < 2; ++c)
                    finish(8 * j + static_cast<int>(lane_id()) % 4 * 2 + c, end(sums[i][j][c], 0),
                           end(sums[i][j][c + 2], 1));
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

}  // namespace infinilm::cuda
