// Alternating updates of several residual streams, and rows that are made as large as others.
// mix_streams. Mapping: a block of four warps per row, whose threads take its vectors of 8 in turn: first all add up
// the squares and the products with the rows of the router, then each coefficient is made by a thread, and then the
// streams are mixed. Bytes: predict reads the streams once and writes them and x, correct reads and writes all once; x
// is read a second time, mostly from L1, and the router comes out of L2. The floor is that over the memory bandwidth.
// match_rms. Mapping: one warp per row. Bytes: both rows are read once and one is written; x is read again from L1 or
// L2. 16-byte accesses (kernels.h, Alignment). Sums have a fixed order.
#include "args/stream_limits.h"
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/rows/kernels.h"

namespace infinilm::cuda {

constexpr int kMixWarps = 4, kMixThreads = 32 * kMixWarps;
constexpr int kMostStreams = most_streams;

// The numbers of a token that its coefficients are made of, in `modes` once all threads have met. x: its row.
template <class T>
__device__ __forceinline__ void make_modes(const MixStreamsArgs& args, const T* x, float* modes,
                                           float (*sums)[kMostStreams + 1]) {
    const int size = args.hidden_size, n = args.num_streams;
    float squares = 0.0f, dots[kMostStreams] = {};
    for (int i = static_cast<int>(threadIdx.x) * 8; i < size; i += kMixThreads * 8) {
        float values[8];
        load8(x + i, values);
        add_squares(squares, values);
#pragma unroll
        for (int k = 0; k < kMostStreams; ++k) {
            if (k >= n) continue;
            float weights[8];
            load8(args.router + static_cast<int64_t>(k) * size + i, weights);
#pragma unroll
            for (int j = 0; j < 8; ++j) dots[k] = __fmaf_rn(values[j], weights[j], dots[k]);
        }
    }
    squares = warp_sum(squares);
    if (lane_id() == 0) sums[warp_id()][kMostStreams] = squares;
#pragma unroll
    for (int k = 0; k < kMostStreams; ++k) {
        if (k >= n) continue;
        dots[k] = warp_sum(dots[k]);
        if (lane_id() == 0) sums[warp_id()][k] = dots[k];
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) {
        float dot = 0.0f, all = 0.0f;
        for (int warp = 0; warp < kMixWarps; ++warp) {
            dot = __fadd_rn(dot, sums[warp][threadIdx.x]);
            all = __fadd_rn(all, sums[warp][kMostStreams]);
        }
        modes[threadIdx.x] = tanhf(__fmul_rn(dot, rsqrtf(all / static_cast<float>(size) + args.eps)));
    }
    __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kMixThreads) mix_streams_kernel(MixStreamsArgs args) {
    begin_kernel();
    INFINILM_SHARED(float, modes, [kMostStreams]);
    INFINILM_SHARED(float, coefficients, [kMostStreams * kMostStreams]);
    INFINILM_SHARED(float, sums, [kMixWarps][kMostStreams + 1]);
    const int n = args.num_streams, size = args.hidden_size, thread = static_cast<int>(threadIdx.x);
    const int64_t row = blockIdx.x;
    T* const x = static_cast<T*>(args.x) + row * args.x_stride;                // [hidden_size]
    T* const streams = static_cast<T*>(args.streams) + row * args.row_stride;  // the row of the first stream
    make_modes(args, x, modes, sums);
    if (thread < (args.corrects ? n : n * n)) {
        float sum = 0.0f;
        for (int k = 0; k < n; ++k) sum = __fmaf_rn(args.coefficients[thread * n + k], modes[k], sum);
        coefficients[thread] = sum;
    }
    __syncthreads();
    for (int i = thread * 8; i < size; i += kMixThreads * 8) {
        Vector<T> own[kMostStreams];  // for a prediction of x and the others, for a correction of all
        own[0].load(args.corrects ? streams + i : x + i);
#pragma unroll
        for (int k = 1; k < kMostStreams; ++k)
            if (k < n) own[k].load(streams + k * args.stream_stride + i);
        float change[8];
        if (args.corrects) {
            float predicted[8];
            load8(x + i, change);
            own[0].unpack(predicted);
#pragma unroll
            for (int e = 0; e < 8; ++e) change[e] = __fadd_rn(change[e], -predicted[e]);
        }
        for (int j = n - 1; j >= 0; --j) {
            float sum[8];
#pragma unroll
            for (int k = 0; k < kMostStreams; ++k)
                if (k == j) own[k].unpack(sum);
            if (args.corrects) {
                const float c = __fadd_rn(1.0f, coefficients[j]);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum[e] = __fmaf_rn(c, change[e], sum[e]);
            } else {
#pragma unroll
                for (int k = 0; k < kMostStreams; ++k) {
                    if (k >= n) continue;
                    const float c = coefficients[j * n + k];
                    float values[8];
                    own[k].unpack(values);
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum[e] = __fmaf_rn(c, values[e], sum[e]);
                }
            }
            if (j > 0 || !args.corrects) store8(streams + j * args.stream_stride + i, sum);
            if (j > 0) continue;
            store8(x + i, sum);
            if (!args.scale) continue;
            float scale[8];
            load8(x + i, sum);  // as it is rounded
            load8(args.scale + i, scale);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] = __fmul_rn(sum[e], scale[e]);
            store8(static_cast<T*>(args.scaled) + row * args.scaled_stride + i, sum);
        }
    }
}

cudaError_t mix_streams(const MixStreamsArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config{dim3(static_cast<unsigned>(args.num_tokens)), dim3(kMixThreads), 0, stream};
    return visit(args.type, [&](auto t) { return launch<mix_streams_kernel<decltype(t)>>(config, args); });
}

template <class T>
__global__ void __launch_bounds__(32) match_rms_kernel(MatchRmsArgs args) {
    begin_kernel();
    const int64_t row = blockIdx.x;
    const int size = args.hidden_size, first = static_cast<int>(lane_id()) * 8;
    T* const x = static_cast<T*>(args.x) + row * args.x_stride;                       // [hidden_size]
    const T* const like = static_cast<const T*>(args.like) + row * args.like_stride;  // [hidden_size]
    const auto mean_square = [&](const T* of) {
        float sum = 0.0f;
        for (int i = first; i < size; i += 256) {
            float values[8];
            load8(of + i, values);
            add_squares(sum, values);
        }
        return warp_sum(sum) / static_cast<float>(size);
    };
    const float own = mean_square(x), scale = sqrtf(mean_square(like)) / sqrtf(own < args.least ? args.least : own);
    for (int i = first; i < size; i += 256) {
        float values[8];
        load8(x + i, values);
#pragma unroll
        for (int e = 0; e < 8; ++e) values[e] = __fmul_rn(values[e], scale);
        store8(x + i, values);
    }
}

cudaError_t match_rms(const MatchRmsArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config{dim3(static_cast<unsigned>(args.num_tokens)), dim3(32), 0, stream};
    return visit(args.type, [&](auto t) { return launch<match_rms_kernel<decltype(t)>>(config, args); });
}

}  // namespace infinilm::cuda
