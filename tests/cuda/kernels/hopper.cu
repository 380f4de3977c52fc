// Hopper's primitives in small kernels: wgmma in every operand layout, pipelines of bulk copies and tensor maps,
// clusters, dependent launches. Called by emulator_cases.py; compiled by nvcc for sm_90a only. kBug plants
// the mistakes that test_bugs.py expects to be found.
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx_sm90.cuh"

namespace infinilm::cuda {

enum Bug {
    kNone,
    kNoEmptyWait,
    kEarlyRelease,
    kWrongCount,
    kMissingInitBarrier,
    kNoDependencyWait,
    kReadTooEarly,
    kOneThreadWaits,
    kOtherOperand
};

// An operand in shared memory: the bytes as they shall lie there, and the descriptor that says how.
struct Operand {
    const uint8_t* image;
    int bytes, leading, stride, layout, step_bytes;  // step_bytes: from one 16 of k to the next
};

// d[64][N] as fragments, d[thread][N / 2]: `steps` times 16 of k. kRegisterA: a.image is [steps][128 threads][4] words.
template <int N, class T, bool kRegisterA, bool kMnB>
__global__ void __launch_bounds__(128) wgmma_kernel(Operand a, Operand b, float* d, int steps) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    uint8_t* tile_b = smem + (kRegisterA ? 0 : ceil_div(a.bytes, 1024) * 1024);
    if (!kRegisterA)
        for (int i = threadIdx.x * 16; i < a.bytes; i += 128 * 16)
            *reinterpret_cast<uint4*>(smem + i) = *reinterpret_cast<const uint4*>(a.image + i);
    for (int i = threadIdx.x * 16; i < b.bytes; i += 128 * 16)
        *reinterpret_cast<uint4*>(tile_b + i) = *reinterpret_cast<const uint4*>(b.image + i);
    fence_proxy_async();
    __syncthreads();
    float sums[N / 2];
    for (int step = 0; step < steps; ++step) {
        const uint64_t db =
            matrix_descriptor(tile_b + step * b.step_bytes, b.leading, b.stride, static_cast<Layout>(b.layout));
        if constexpr (kRegisterA) {
            uint32_t fragment[4];
            for (int i = 0; i < 4; ++i)
                fragment[i] = reinterpret_cast<const uint32_t*>(a.image)[(step * 128 + threadIdx.x) * 4 + i];
            wgmma_fence();  // the fragment has been written since
            Wgmma<N, T>::template multiply<kMnB>(sums, fragment, db, step > 0);
        } else {
            wgmma_fence();
            const uint64_t da =
                matrix_descriptor(smem + step * a.step_bytes, a.leading, a.stride, static_cast<Layout>(a.layout));
            Wgmma<N, T>::template multiply<kMnB>(sums, da, db, step > 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) d[threadIdx.x * (N / 2) + i] = sums[i];
}

constexpr int kStages = 3;

// C[M][N] = A[M][K] B[N][K]^T: tiles of 64x32x64 by tensor maps, a producer thread and one consumer warpgroup that
// keeps one wgmma in flight.
template <int kBug>
__global__ void __launch_bounds__(160)
    gemm_kernel(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* c, int m,
                int n, int k) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(uint64_t, full, [kStages]);
    INFINILM_SHARED(uint64_t, empty, [kStages]);
    constexpr int kBytesA = 64 * 64 * 2, kBytesB = 32 * 64 * 2, kStage = kBytesA + kBytesB;
    const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 32, steps = ceil_div(k, 64);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s)
            mbarrier_init(full + s, 1), mbarrier_init(empty + s, kBug == kWrongCount ? 2 : 1);
        mbarrier_init_fence();
    }
    if (kBug != kMissingInitBarrier) __syncthreads();
    if (warp_id() == 4) {
        if (lane_id() != 0) return;
        tensor_prefetch(map_a);
        tensor_prefetch(map_b);
        for (int step = 0; step < steps; ++step) {
            const int s = step % kStages;
            if (kBug != kNoEmptyWait) mbarrier_wait(empty + s, step / kStages % 2 ^ 1);
            mbarrier_arrive_expect_tx(full + s, kStage);
            tensor_load_2d(smem + s * kStage, map_a, step * 64, row0, full + s);
            tensor_load_2d(smem + s * kStage + kBytesA, map_b, step * 64, column0, full + s);
        }
        return;
    }
    float sums[16];
    wgmma_fence();
    for (int step = 0; step < steps; ++step) {
        const int s = step % kStages;
        mbarrier_wait(full + s, step / kStages % 2);
        const uint64_t da = matrix_descriptor_128(smem + s * kStage),
                       db = matrix_descriptor_128(smem + s * kStage + kBytesA);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)  // descriptors count in 16 bytes
            Wgmma<32, bf16>::multiply(sums, da + kk * 2, db + (kBug == kOtherOperand && warp_id() == 1 ? 0 : kk * 2),
                                      step + kk > 0);
        wgmma_commit();
        if (kBug == kEarlyRelease) {
            if (threadIdx.x == 0) mbarrier_arrive(empty + s);
            wgmma_wait<0>();
        } else {
            wgmma_wait<1>();
            if (step > 0 && threadIdx.x == 0) mbarrier_arrive(empty + (step - 1) % kStages);
        }
    }
    const float early = kBug == kReadTooEarly ? sums[0] : 0.0f;
    wgmma_wait<0>();
    if (kBug == kReadTooEarly) sums[0] = early;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int row = row0 + warp_id() * 16 + lane_id() / 4 + i / 2 % 2 * 8,
                  column = column0 + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
        if (row < m && column < n) c[static_cast<int64_t>(row) * n + column] = sums[i];
    }
}

// Each block of a cluster of two brings 8 rows of x [.., 64] to both, arrives on a barrier of both, and stores the
// first 32 columns of the first 8 rows transposed. out: [blocks][16][64], transposed: [blocks][32][8].
__global__ void __launch_bounds__(32)
    cluster_kernel(const __grid_constant__ TensorMap map, uint16_t* out, uint16_t* transposed) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(uint64_t, full, [1]);
    INFINILM_SHARED(uint64_t, seen, [2]);
    uint16_t *rows = reinterpret_cast<uint16_t*>(smem), *columns = rows + 16 * 64;
    const int rank = static_cast<int>(cluster_rank()), lane = static_cast<int>(threadIdx.x);
    if (lane == 0) {
        mbarrier_init(full, 1), mbarrier_init(seen + 1, 2);
        mbarrier_init_fence();
    }
    cluster_sync();
    if (lane == 0) {
        mbarrier_arrive_expect_tx(full, 16 * 64 * 2);
        const int row = static_cast<int>(blockIdx.x) / 2 * 16 + 8 * rank;
        tensor_load_2d_multicast(rows + 8 * rank * 64, map, 0, row, full, 3);
    }
    mbarrier_wait(full, 0);
    for (int i = lane; i < 16 * 64; i += 32) out[blockIdx.x * 16 * 64 + i] = rows[i];
    uint32_t r[4];
    for (int j = 0; j < 4; ++j) r[j] = *reinterpret_cast<const uint32_t*>(rows + lane / 4 * 64 + 8 * j + lane % 4 * 2);
    stmatrix_x4_trans(columns + lane * 8, r);
    __syncwarp();
    for (int i = lane; i < 32 * 8; i += 32) transposed[blockIdx.x * 32 * 8 + i] = columns[i];
    if (lane < 2) mbarrier_arrive_cluster(cluster_barriers(seen, static_cast<uint32_t>(lane)), 1);
    mbarrier_wait(seen + 1, 0);
    cluster_sync();  // no block leaves before the other has arrived
}

// y = x + y; launched after itself as a dependent kernel.
template <int kBug>
__global__ void add_kernel(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float mine = i < n ? x[i] : 0.0f;  // no kernel writes x, so it may be read before the wait
    const bool waits = kBug == kNoDependencyWait ? i == 0 : kBug != kOneThreadWaits || threadIdx.x == 0;
    if (waits) grid_dependency_wait();
    grid_launch_dependents();
    if (i < n) y[n - 1 - i] += mine;
}

template <int N, class T, bool kRegisterA, bool kMnB>
int run_wgmma(const Operand& a, const Operand& b, float* d, int steps) {
    LaunchConfig config{dim3(1), dim3(128)};
    config.smem_bytes =
        static_cast<size_t>(kRegisterA ? 0 : ceil_div(a.bytes, 1024) * 1024) + static_cast<size_t>(b.bytes);
    return launch<wgmma_kernel<N, T, kRegisterA, kMnB>>(config, a, b, d, steps);
}

template <int kBug>
int run_gemm(const void* a, const void* b, float* c, int m, int n, int k) {
    TensorMap map_a, map_b;
    const uint64_t columns = static_cast<uint64_t>(k);
    if (int error = make_tensor_map(&map_a, {a, columns, static_cast<uint64_t>(m), columns * 2, 64, 64})) return error;
    if (int error = make_tensor_map(&map_b, {b, columns, static_cast<uint64_t>(n), columns * 2, 64, 32})) return error;
    const LaunchConfig config{dim3(ceil_div(n, 32), ceil_div(m, 64)), dim3(160), kStages * (64 + 32) * 64 * 2};
    return launch<gemm_kernel<kBug>>(config, map_a, map_b, c, m, n, k);
}

template <int kBug>
int run_add(const float* x, float* y, int n, int times) {
    cudaStream_t stream;
    if (int error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return error;
    const LaunchConfig config{dim3(ceil_div(n, 32)), dim3(32), 0, stream};
    for (int i = 0; i < times; ++i)
        if (int error = launch<add_kernel<kBug>>(config, x, y, n)) return error;
    if (int error = cudaStreamSynchronize(stream)) return error;
    return cudaStreamDestroy(stream);
}

}  // namespace infinilm::cuda

using namespace infinilm::cuda;

extern "C" {

// variant: 0 both operands in shared memory, 1 A in registers, + 2: B MN-major
int wgmma(int columns, int half, int variant, const Operand* a, const Operand* b, float* d, int steps) {
    if (columns == 64 && !half) {
        switch (variant) {
            case 0: return run_wgmma<64, bf16, false, false>(*a, *b, d, steps);
            case 1: return run_wgmma<64, bf16, true, false>(*a, *b, d, steps);
            case 2: return run_wgmma<64, bf16, false, true>(*a, *b, d, steps);
            case 3: return run_wgmma<64, bf16, true, true>(*a, *b, d, steps);
        }
    }
    if (columns == 32 && half && variant == 1) return run_wgmma<32, f16, true, false>(*a, *b, d, steps);
    if (columns == 72 && !half && variant == 1) return run_wgmma<72, bf16, true, false>(*a, *b, d, steps);
    if (columns == 176 && half && variant == 0) return run_wgmma<176, f16, false, false>(*a, *b, d, steps);
    if (columns == 192 && !half && variant == 0) return run_wgmma<192, bf16, false, false>(*a, *b, d, steps);
    return cudaErrorInvalidValue;
}
int gemm(const void* a, const void* b, float* c, int m, int n, int k, int bug) {
    switch (bug) {
        case kNoEmptyWait: return run_gemm<kNoEmptyWait>(a, b, c, m, n, k);
        case kEarlyRelease: return run_gemm<kEarlyRelease>(a, b, c, m, n, k);
        case kWrongCount: return run_gemm<kWrongCount>(a, b, c, m, n, k);
        case kMissingInitBarrier: return run_gemm<kMissingInitBarrier>(a, b, c, m, n, k);
        case kReadTooEarly: return run_gemm<kReadTooEarly>(a, b, c, m, n, k);
        case kOtherOperand: return run_gemm<kOtherOperand>(a, b, c, m, n, k);
        default: return run_gemm<kNone>(a, b, c, m, n, k);
    }
}
int cluster(const uint16_t* x, int rows, uint16_t* out, uint16_t* transposed, int clusters) {
    TensorMap map;  // in elements of 8 bytes
    if (int error = make_tensor_map(&map, {x, 16, static_cast<uint64_t>(rows), 128, 16, 8, Swizzle::none, 8}))
        return error;
    LaunchConfig config{dim3(2 * clusters), dim3(32), (16 * 64 + 32 * 8) * 2};
    config.cluster = 2;
    return launch<cluster_kernel>(config, map, out, transposed);
}
int add_dependent(const float* x, float* y, int n, int times, int bug) {
    switch (bug) {
        case kNoDependencyWait: return run_add<kNoDependencyWait>(x, y, n, times);
        case kOneThreadWaits: return run_add<kOneThreadWaits>(x, y, n, times);
        default: return run_add<kNone>(x, y, n, times);
    }
}
}
