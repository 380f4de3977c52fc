// What linear_prefill, linear_sm90 and linear_split_sm90 share: tiles of 128 packed rows, their order, where a slice of
// k ends, and the scales and biases of outputs.
#pragma once

#include "cuda/linear/linear.cuh"

namespace infinilm::cuda {

constexpr int kTileRows = 128, kRowTiles = kTileRows / 16;  // packed rows of a tile, and tiles of 16 rows in it

__host__ __device__ inline int row_blocks(const PackedWeight& w) { return ceil_div(num_tiles(w), kRowTiles); }

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

// The slice (linear.cuh) that holds a unit, and its end. Empty ones, of k less than 8 boxes, would add zero: skipped.
template <class F>
__device__ __forceinline__ int slice_of(int unit, int units) {
    return (kSlices * (unit / kBoxUnits<F> + 1) - 1) / ceil_div(units, kBoxUnits<F>);
}
template <class F>
__device__ __forceinline__ int slice_end(int unit, int units) {
    return slice_begin<F>(slice_of<F>(unit, units) + 1, units);
}

// Slices [first, last) of k, in boxes of 64 columns; what the last box has beyond k is zero.
struct SliceRange {
    int all_boxes;  // of k
    int first, last;

    __device__ __forceinline__ int begin() const { return first_box(first, all_boxes); }  // counted from k = 0
    __device__ __forceinline__ int end(int slice) const { return first_box(slice + 1, all_boxes) - begin(); }
    __device__ __forceinline__ int boxes() const { return end(last - 1); }
};

// What a lane's sums in rows r and r + 8 of a tile of 16 rows (half 0 and 1) are multiplied by and what is added.
template <class F>
struct RowEnd {
    float bias[2] = {0.0f, 0.0f}, scale[2];

    __device__ __forceinline__ RowEnd(const LinearArgs& args, int tile) {
        const PackedWeight& w = args.weight;
        const int row = static_cast<int>(lane_id()) / 4;
        if constexpr (F::kRowScales) {
            const float* scales = row_scales<F>(w) + 16 * min(tile, num_tiles(w) - 1) + row;
            scale[0] = scales[0], scale[1] = scales[8];
        }
        if (w.bias)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int feature = feature_of_row(w, 16 * tile + 8 * half + row);
                if (feature < w.n) bias[half] = w.bias[feature];
            }
    }
    // input_scale: of the row of x.
    __device__ __forceinline__ float operator()(float sum, int half, float input_scale = 1.0f) const {
        if constexpr (F::kRoundedInputs && !F::kBoxScales) sum = __fmul_rn(sum, input_scale);
        if constexpr (F::kRowScales) sum = __fmul_rn(sum, scale[half]);
        return sum + bias[half];
    }
};

}  // namespace infinilm::cuda
