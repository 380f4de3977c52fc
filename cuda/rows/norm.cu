// RMSNorm and LayerNorm of rows, with and without the addition of a residual in front.
// Mapping: one warp per row. Few rows get blocks of one warp, so that they spread over the SMs; many, of four.
// Bytes: a row is read once and written once (with a residual both twice): 2 or 4 * hidden_size * sizeof(T) a row, and
// the weight out of L2; the floor is that over the memory bandwidth. A row of at most 4096 columns of 16 bits (2048 of
// 32) stays in registers, a longer one is read again from L1 or L2. 16-byte accesses (kernels.h, Alignment).
// The order of sums is that of norm.cuh. Idea: rows in registers and the fused addition, as in vLLM
// csrc/layernorm_kernels.cu and flashinfer include/flashinfer/norm.cuh.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/rows/kernels.h"

namespace infinilm::cuda {

constexpr int kNormWarps = 4;
constexpr int kFewRows = 1024;  // about the warps that the SMs hold at once with one warp a block

// v = scale * (what lies at `residual` + multiplier * v), rounded to T.
template <class T>
__device__ __forceinline__ void add(Vector<T>& v, const T* residual, const NormArgs& args) {
    float a[8], b[8];
    v.unpack(a);
    load8(residual, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = __fmul_rn(__fadd_rn(b[i], __fmul_rn(a[i], args.multiplier)), args.scale);
    v.pack(a);
}

template <class T>
__device__ __forceinline__ void put(const Vector<T>& v, float scale, const float* weight, T* out) {
    float x[8];
    v.unpack(x);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 w = load_readonly_16(weight + 4 * half);  // may run ahead of the stores to `out`
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[4 * half + i] = normed(x[4 * half + i], scale, __uint_as_float(words[i]));
    }
    store8(out, x);
}

template <class T, bool kResidual>
__global__ void __launch_bounds__(32 * kNormWarps) rms_norm_kernel(NormArgs args) {
    begin_kernel();
    constexpr int kHeld = 32 / sizeof(T), kChunk = 256 * kHeld;  // vectors of a lane: 64 registers; columns
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp_id();
    if (row >= args.num_tokens) return;
    // each [hidden_size]
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* residual = kResidual ? static_cast<T*>(args.residual) + row * args.residual_stride : nullptr;
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    const int size = args.hidden_size;

    // A chunk is loaded as a whole before any of it is stored: the compiler cannot know that the rows do not overlap,
    // and would wait for one vector after the other.
    Vector<T> held[kHeld];
    auto for_vectors = [&](int begin, auto f) {
#pragma unroll
        for (int h = 0; h < kHeld; ++h)
            if (const int i = begin + static_cast<int>(lane_id()) * 8 + 256 * h; i < size) f(held[h], i);
    };
    float sum = 0.0f;
    for (int begin = 0; begin < size; begin += kChunk) {
        for_vectors(begin, [&](Vector<T>& v, int i) { v.load(x + i); });
        if constexpr (kResidual) {
            for_vectors(begin, [&](Vector<T>& v, int i) { add(v, residual + i, args); });
            for_vectors(begin, [&](Vector<T>& v, int i) { v.store(residual + i); });
        }
        for_vectors(begin, [&](Vector<T>& v, int) {
            float values[8];
            v.unpack(values);
            add_squares(sum, values);
        });
    }
    if (!args.weight) {
        const float mean = warp_sum(sum) / static_cast<float>(size);
        if (args.mean_square && lane_id() == 0) args.mean_square[row] = __fmul_rn(mean, args.multiplier);
        return;
    }
    const float scale = args.mean_square ? rsqrtf(args.mean_square[row] + args.eps) : inverse_rms(sum, size, args.eps);
    for (int begin = 0; begin < size; begin += kChunk) {
        if (size > kChunk) for_vectors(begin, [&](Vector<T>& v, int i) { v.load((kResidual ? residual : x) + i); });
        for_vectors(begin,
                    [&](Vector<T>& v, int i) { put(v, scale, static_cast<const float*>(args.weight) + i, out + i); });
    }
}

// LayerNorm (Ba et al. 2016), a warp to each row as above, or to each group of one: mean, squares of what is left of
// it, then the result. A row is read three times, but for the first from L1 or L2.
template <class T, bool kResidual>
__global__ void __launch_bounds__(32 * kNormWarps) layer_norm_kernel(NormArgs args) {
    begin_kernel();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp_id();
    if (row >= args.num_tokens) return;
    const int size = args.hidden_size, first = static_cast<int>(lane_id()) * 8;
    const int group = kResidual ? 0 : static_cast<int>(blockIdx.y) * size;  // of several, where nothing is added
    // each [hidden_size]
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride + group;
    T* residual = kResidual ? static_cast<T*>(args.residual) + row * args.residual_stride : nullptr;  // of one group
    T* out = static_cast<T*>(args.out) + row * args.out_stride + group;
    const float* weights = static_cast<const float*>(args.weight) + group;
    const float* biases = static_cast<const float*>(args.bias) + group;
    const T* normed_row = kResidual ? residual : x;

    float sum = 0.0f;
    for (int i = first; i < size; i += 256) {
        Vector<T> v;
        v.load(x + i);
        if constexpr (kResidual) {
            add(v, residual + i, args);
            v.store(residual + i);
        }
        float values[8];
        v.unpack(values);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = __fadd_rn(sum, values[j]);
    }
    const float mean = warp_sum(sum) / static_cast<float>(size);
    float squares = 0.0f;
    auto centred = [&](int i, float (&values)[8]) {  // what this lane has stored itself
        load8(normed_row + i, values);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = __fadd_rn(values[j], -mean);
    };
    for (int i = first; i < size; i += 256) {
        float values[8];
        centred(i, values);
        add_squares(squares, values);
    }
    const float scale = inverse_rms(squares, size, args.eps);
    for (int i = first; i < size; i += 256) {
        float values[8], weight[8], bias[8];
        centred(i, values);
        load8(weights + i, weight);
        load8(biases + i, bias);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = __fadd_rn(normed(values[j], scale, weight[j]), bias[j]);
        store8(out + i, values);
    }
}

cudaError_t rms_norm(const NormArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const int warps = args.num_tokens < kFewRows ? 1 : kNormWarps;
    const LaunchConfig config{
        dim3(static_cast<unsigned>(ceil_div(args.num_tokens, warps)), static_cast<unsigned>(args.num_groups)),
        dim3(32 * warps), 0, stream};
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        if (args.bias)
            return args.residual ? launch<layer_norm_kernel<T, true>>(config, args)
                                 : launch<layer_norm_kernel<T, false>>(config, args);
        return args.residual ? launch<rms_norm_kernel<T, true>>(config, args)
                             : launch<rms_norm_kernel<T, false>>(config, args);
    });
}

}  // namespace infinilm::cuda
