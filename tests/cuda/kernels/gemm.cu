// C[M][N] = A[M][K] B[N][K]^T with a cp.async pipeline of three stages, ldmatrix and mma.sync: small, for the tests of
// the emulator, not for speed. Tile 32x32x32, 64 threads, warp w has rows 16 w .. of the tile. Any M, N; K a multiple
// of 8 (16-byte pieces). kBug plants the mistakes that test_bugs.py expects to be found.
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"

namespace infinilm::cuda {

enum Bug { kNone, kMissingBarrier, kWrongWait, kNoWaitAtTheEnd, kMissingWait };

constexpr int kTile = 32, kStages = 3;

// Rows of 64 bytes; the four 16-byte pieces change places so that the eight rows of an ldmatrix lie in all banks.
__device__ __forceinline__ int piece(int row, int column) { return row * kTile + (column ^ (row >> 1 & 3)) * 8; }

template <class T, int kBug>
__global__ void __launch_bounds__(64) gemm_kernel(const T* a, const T* b, float* c, int m, int n, int k) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    T* tile_a = reinterpret_cast<T*>(smem);        // [kStages][kTile][kTile]
    T* tile_b = tile_a + kStages * kTile * kTile;  // the same
    const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile, steps = ceil_div(k, kTile);
    auto load = [&](int step) {
        if (step < steps) {
#pragma unroll
            for (int i = threadIdx.x; i < kTile * 4; i += 64) {
                const int row = i / 4, column = i % 4, at = step * kTile + column * 8;
                const int place = step % kStages * kTile * kTile + piece(row, column);
                const bool in_a = row0 + row < m && at < k, in_b = column0 + row < n && at < k;
                cp_async_16(tile_a + place, in_a ? a + static_cast<int64_t>(row0 + row) * k + at : a, in_a);
                cp_async_16(tile_b + place, in_b ? b + static_cast<int64_t>(column0 + row) * k + at : b, in_b);
            }
        }
        if (kBug != kNoWaitAtTheEnd || step < steps) cp_async_commit();
    };
    for (int step = 0; step < kStages - 1; ++step) load(step);
    float sums[4][4] = {};
    const int lane = lane_id(), warp = warp_id();
    for (int step = 0; step < steps; ++step) {
        if (kBug != kMissingWait) cp_async_wait<kBug == kWrongWait ? kStages - 1 : kStages - 2>();
        if (kBug != kMissingBarrier) __syncthreads();
        load(step + kStages - 1);
        const T *now_a = tile_a + step % kStages * kTile * kTile, *now_b = tile_b + step % kStages * kTile * kTile;
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
            uint32_t fa[4], fb[2][4];
            ldmatrix_x4(fa, now_a + piece(warp * 16 + lane % 16, kk * 2 + lane / 16));
#pragma unroll
            for (int j = 0; j < 2; ++j)
                ldmatrix_x4(fb[j], now_b + piece(j * 16 + lane / 16 * 8 + lane % 8, kk * 2 + lane / 8 % 2));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t column[2] = {fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]};
                mma_m16n8k16<T>(sums[j], fa, column);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = row0 + warp * 16 + lane / 4 + i / 2 * 8, column = column0 + j * 8 + lane % 4 * 2 + i % 2;
            if (row < m && column < n) c[static_cast<int64_t>(row) * n + column] = sums[j][i];
        }
}

template <class T, int kBug>
int run(const void* a, const void* b, float* c, int m, int n, int k) {
    const LaunchConfig config{dim3(ceil_div(n, kTile), ceil_div(m, kTile)), dim3(64),
                              2 * kStages * kTile * kTile * sizeof(T)};
    return launch<gemm_kernel<T, kBug>>(config, static_cast<const T*>(a), static_cast<const T*>(b), c, m, n, k);
}

}  // namespace infinilm::cuda

using namespace infinilm::cuda;

extern "C" {
int gemm_bf16(const void* a, const void* b, float* c, int m, int n, int k, int bug) {
    switch (bug) {
        case kMissingBarrier: return run<bf16, kMissingBarrier>(a, b, c, m, n, k);
        case kWrongWait: return run<bf16, kWrongWait>(a, b, c, m, n, k);
        case kNoWaitAtTheEnd: return run<bf16, kNoWaitAtTheEnd>(a, b, c, m, n, k);
        case kMissingWait: return run<bf16, kMissingWait>(a, b, c, m, n, k);
        default: return run<bf16, kNone>(a, b, c, m, n, k);
    }
}
int gemm_f16(const void* a, const void* b, float* c, int m, int n, int k) { return run<f16, kNone>(a, b, c, m, n, k); }
}
