// Mean and variance of rows, and rows of which only the largest elements are left.
// Mapping: one warp per row; of sparsify one thread per 8 elements. Bytes: row_moment reads a row once, sparsify reads
// and writes it once; the floor is that over the memory bandwidth. 16-byte accesses (kernels.h, Alignment). Sums have a
// fixed order.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/rows/kernels.h"

namespace infinilm::cuda {

constexpr int kSparsifyThreads = 128;

template <class T>
__global__ void __launch_bounds__(32) row_moment_kernel(RowMomentArgs args) {
    begin_kernel();
    const int64_t row = blockIdx.x;
    const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;  // [size]
    const float centre = args.centre ? args.centre[row] : 0.0f;
    float sum = 0.0f;
    for (int i = static_cast<int>(lane_id()) * 8; i < args.size; i += 256) {
        float values[8];
        load8(x + i, values);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float away = __fadd_rn(values[j], -centre);
            sum = args.centre ? __fmaf_rn(away, away, sum) : __fadd_rn(sum, values[j]);
        }
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) args.out[row] = __fmul_rn(sum / static_cast<float>(args.size), args.multiplier);
}

cudaError_t row_moment(const RowMomentArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config{dim3(static_cast<unsigned>(args.num_tokens)), dim3(32), 0, stream};
    return visit(args.type, [&](auto t) { return launch<row_moment_kernel<decltype(t)>>(config, args); });
}

template <class T>
__global__ void __launch_bounds__(kSparsifyThreads) sparsify_kernel(SparsifyArgs args) {
    begin_kernel();
    const int64_t row = blockIdx.x;
    const int i = static_cast<int>(blockIdx.y * kSparsifyThreads + threadIdx.x) * 8;
    if (i >= args.size) return;
    T* const x = static_cast<T*>(args.x) + row * args.x_stride + i;  // [8]
    const float least = __fmaf_rn(args.deviations, sqrtf(args.variance[row]), args.mean[row]);
    float values[8];
    load8(x, values);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float above = __fadd_rn(values[j], -least);
        values[j] = above < 0.0f ? 0.0f : above;  // a NaN stays one
    }
    store8(x, values);
}

cudaError_t sparsify(const SparsifyArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(args.num_tokens),
                    static_cast<unsigned>(ceil_div(args.size / 8, kSparsifyThreads)));
    return visit(args.type, [&](auto t) {
        return launch<sparsify_kernel<decltype(t)>>({grid, dim3(kSparsifyThreads), 0, stream}, args);
    });
}

}  // namespace infinilm::cuda
