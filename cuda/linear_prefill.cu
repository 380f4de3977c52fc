// linear for many tokens on every GPU from sm_80 on: out[t, f] = epilogue(x[t] . weight[f]), without norm and rope.
// Mapping: a block of 8 warps computes 128 packed rows x 128 tokens (or 64: choose_tile_tokens), a warp 64 x 32 (32 x
// 32); which tile, tile_place() says. k comes in stages of two steps of 16 through four buffers of shared memory, by
// cp.async: the weight as the contiguous fragments it is packed in, one 16-byte read of a lane each; x row by row, its
// 16-byte pieces swizzled for ldmatrix. Fragments are read one step ahead of their mma.
// A slice of k is a chain of its own, added to the total at its end (linear.cuh): twice the accumulators, 128 registers
// of a thread, and one block per SM, is the price of rows whose bits do not depend on num_tokens.
// Bytes: the weight once for each 1024 tokens, x once from memory, then both from L2. Floor: 2 n k num_tokens / peak of
// mma.sync. Shared memory comes next: a warp reads 3 KB for 16 mma, 96 of the 128 bytes a cycle of an A100.
// Alignment as in kernels.h. Ideas: IST-DASLab/marlin (weights stored as fragments), CUTLASS's multistage mainloop.
#include "launch.cuh"
#include "linear_tile.cuh"

namespace infinilm::cuda {

constexpr int kPrefillThreads = 256, kPrefillStages = 4, kStageSteps = 2, kStageColumns = 16 * kStageSteps;

// How kTokens x 128 are cut among 8 warps, and what a stage holds.
template <int kTokens>
struct TileShape {
    static constexpr int kColumns = 4, kTiles = kTokens / 32;  // of a warp: 8 tokens each; 16 rows each
    static constexpr int kTokenWarps = kTokens / (8 * kColumns);
    static constexpr int kWeightBytes = kRowTiles * kStageSteps * 512, kTokenBytes = kTokens * kStageColumns * 2;
    static constexpr int kStageBytes = kWeightBytes + kTokenBytes, kSmemBytes = kPrefillStages * kStageBytes;
    static_assert(kSmemBytes >= kTileRows * kTokens * 4, "the stages become the buffer of the outputs");
};

// Bytes from the start of x in a stage to 8 columns of a token: rows of 64 bytes, in which the four pieces change
// places so that the eight rows of an ldmatrix lie in all banks.
__device__ __forceinline__ int token_piece(int token, int piece) {
    return token * kStageColumns * 2 + (piece ^ (token >> 1 & 3)) * 16;
}

// Copies a block's stages to shared memory. rows: the weight from the block's first tile on; x: [num_tokens, k] from
// its first token on. What lies beyond the weight, the tokens or k becomes zero.
template <class T, int kTokens>
struct StageLoader {
    using Shape = TileShape<kTokens>;
    const uint8_t* rows;
    const T* x;
    int64_t x_stride;
    int tiles, tokens, k, steps;  // tiles and tokens from here to the end

    __device__ __forceinline__ void load(uint8_t* smem, int stage) const {
        if (stage * kStageSteps < steps) {
            uint8_t* to = smem + stage % kPrefillStages * Shape::kStageBytes;
            constexpr int kTileBytes = kStageSteps * 512;
#pragma unroll
            for (int at = 0; at < Shape::kWeightBytes; at += kPrefillThreads * 16) {
                const int i = at + static_cast<int>(threadIdx.x) * 16, tile = i / kTileBytes;
                const bool valid = tile < tiles && stage * kStageSteps + i % kTileBytes / 512 < steps;
                const uint8_t* from = rows + static_cast<int64_t>(tile) * steps * 512 + stage * int64_t{kTileBytes};
                cp_async_16(to + i, valid ? from + i % kTileBytes : rows, valid);
            }
#pragma unroll
            for (int at = 0; at < kTokens * 4; at += kPrefillThreads) {
                const int i = at + static_cast<int>(threadIdx.x), token = i / 4;
                const int column = stage * kStageColumns + i % 4 * 8;
                const bool valid = token < tokens && column < k;
                cp_async_16(to + Shape::kWeightBytes + token_piece(token, i % 4),
                            valid ? x + token * x_stride + column : x, valid);
            }
        }
        cp_async_commit();  // an empty group, too: the waits count groups
    }
};

// What a warp multiplies in one step.
template <int kTokens>
struct StepFragments {
    using Shape = TileShape<kTokens>;
    uint32_t a[Shape::kTiles][4], b[Shape::kColumns / 2][4];

    // stage: its bytes. tile, token: the warp's first in the block.
    __device__ __forceinline__ void load(const uint8_t* stage, int step, int tile, int token) {
        const int lane = static_cast<int>(lane_id());
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i)
            load_fragment(a[i], stage + ((tile + i) * kStageSteps + step) * 512 + lane * 16);
        const int row = token + lane / 16 * 8 + lane % 8, piece = step * 2 + lane / 8 % 2;
#pragma unroll
        for (int j = 0; j < Shape::kColumns / 2; ++j)
            ldmatrix_x4(b[j], stage + Shape::kWeightBytes + token_piece(row + 16 * j, piece));
    }

    template <class T>
    __device__ __forceinline__ void multiply(float (&sums)[Shape::kTiles][Shape::kColumns][4]) const {
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
            for (int j = 0; j < Shape::kColumns; ++j) {
                const uint32_t column[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                mma_m16n8k16<T>(sums[i][j], a[i], column);
            }
    }
};

template <class T, int kTokens>
__global__ void __launch_bounds__(kPrefillThreads, kTokens == 64 ? 2 : 1)
    linear_prefill_kernel(const __grid_constant__ LinearArgs args, int token_blocks) {
    using Shape = TileShape<kTokens>;
    constexpr int kTiles = Shape::kTiles, kColumns = Shape::kColumns;
    INFINILM_DYNAMIC_SHARED(smem);  // [kPrefillStages][kStageBytes], at the end the outputs
    const PackedWeight& w = args.weight;
    const int steps = num_steps(w.k), stages = ceil_div(steps, kStageSteps);
    const TilePlace place = tile_place(static_cast<int>(blockIdx.x), row_blocks(w), token_blocks);
    const int tile = place.row_block * kRowTiles, token = place.token_block * kTokens;
    const StageLoader<T, kTokens> loader{static_cast<const uint8_t*>(w.data) + static_cast<int64_t>(tile) * steps * 512,
                                         static_cast<const T*>(args.x) + token * args.x_stride,
                                         args.x_stride,
                                         num_tiles(w) - tile,
                                         args.num_tokens - token,
                                         w.k,
                                         steps};
    const int warp = static_cast<int>(warp_id());
    const int warp_tile = warp / Shape::kTokenWarps * kTiles, warp_token = warp % Shape::kTokenWarps * 8 * kColumns;
    auto bytes_of = [&](int stage) { return smem + stage % kPrefillStages * Shape::kStageBytes; };

    float sums[kTiles][kColumns][4] = {}, totals[kTiles][kColumns][4] = {};
    for (int stage = 0; stage < kPrefillStages; ++stage) loader.load(smem, stage);
    cp_async_wait<kPrefillStages - 1>();
    __syncthreads();
    StepFragments<kTokens> fragments[kStageSteps];
    fragments[0].load(bytes_of(0), 0, warp_tile, warp_token);
    int end = slice_end(0, steps);
    for (int stage = 0; stage < stages; ++stage) {
#pragma unroll
        for (int i = 0; i < kStageSteps; ++i) {
            const bool last = i == kStageSteps - 1;
            if (last) {  // the next stage is there for all, and all have the fragments of this one
                cp_async_wait<kPrefillStages - 2>();
                __syncthreads();
                loader.load(smem, stage + kPrefillStages);
            }
            // After the last stage: fragments of whatever is there, for nobody.
            fragments[last ? 0 : i + 1].load(bytes_of(stage + last), last ? 0 : i + 1, warp_tile, warp_token);
            fragments[i].template multiply<T>(sums);
            const int step = stage * kStageSteps + i;
            if (step + 1 != end) continue;
            end = slice_end(end, steps);
#pragma unroll
            for (int a = 0; a < kTiles; ++a)
#pragma unroll
                for (int b = 0; b < kColumns; ++b)
#pragma unroll
                    for (int c = 0; c < 4; ++c) totals[a][b][c] += sums[a][b][c], sums[a][b][c] = 0.0f;
        }
    }
    __syncthreads();  // the stages are free
    store_sums<T, 1>(args, totals, reinterpret_cast<float*>(smem) + warp * 16 * kTiles * 8 * kColumns, tile + warp_tile,
                     token + warp_token, [] { __syncwarp(); });
}

template <class T, int kTokens>
static cudaError_t launch_prefill(const LinearArgs& args, cudaStream_t stream) {
    const int token_blocks = ceil_div(args.num_tokens, kTokens);
    const LaunchConfig config{dim3(static_cast<unsigned>(row_blocks(args.weight) * token_blocks)),
                              dim3(kPrefillThreads), TileShape<kTokens>::kSmemBytes, stream};
    return launch<linear_prefill_kernel<T, kTokens>>(config, args, token_blocks);
}

cudaError_t linear_prefill(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    int device = 0, num_sms = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)) return error;
    const bool small = choose_tile_tokens(args, num_sms) == 64, is_bf16 = args.weight.type == Type::bf16;
    if (is_bf16) return small ? launch_prefill<bf16, 64>(args, stream) : launch_prefill<bf16, 128>(args, stream);
    return small ? launch_prefill<f16, 64>(args, stream) : launch_prefill<f16, 128>(args, stream);
}

}  // namespace infinilm::cuda
