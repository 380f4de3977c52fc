// Inputs of linears as rows of e4m3 (kernels.h). Mapping: a block to each row, so that few rows are as fast as memory
// is far; a thread has 16 neighbouring columns at a time. A row of up to most_columns_in_place stays in registers, a
// longer one is read again from L2. Bytes: 2 k read and k written for each row, which the linear behind reads in place
// of 2 k.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/linear/kernels.h"
#include "numerics/quantise.h"

namespace infinilm::cuda {

constexpr int kRoundWarps = 8, kRoundThreads = 32 * kRoundWarps, kHeldGroups = 4;

// To e4m3 by the scale of the largest magnitude, whose bits are given: NaN if that is infinite or NaN.
struct Rounding {
    float scale, inverse;

    __device__ __forceinline__ explicit Rounding(uint32_t largest) {
        const float most = bits_to_float(largest);
        inverse = most > 0x1p-119f ? quantise::fp8_largest / most : 0.0f;  // less than that is nothing
        scale = __fadd_rn(most / quantise::fp8_largest, __fmul_rn(most, 0.0f));
    }
    // Columns 2 t, 2 t + 8, 2 t + 1, 2 t + 9 of 16.
    __device__ __forceinline__ uint32_t word(const float (&low)[8], const float (&high)[8], int t) const {
        return number(low[2 * t]) | number(high[2 * t]) << 8 | number(low[2 * t + 1]) << 16 |
               number(high[2 * t + 1]) << 24;
    }

private:
    __device__ __forceinline__ uint32_t number(float x) const {
        return to_e4m3(fminf(fmaxf(__fmul_rn(x, inverse), -quantise::fp8_largest), quantise::fp8_largest));
    }
};

// kBoxScales: for each 128 columns, which eight neighbouring threads have.
template <class T, bool kBoxScales>
__global__ void __launch_bounds__(kRoundThreads) round_inputs_kernel(RoundInputsArgs args) {
    begin_kernel();
    INFINILM_SHARED(uint32_t, largest_of_warps, [kRoundWarps]);
    const T* x = static_cast<const T*>(args.x) + blockIdx.x * args.x_stride;
    uint16_t* out = static_cast<uint16_t*>(args.out) + blockIdx.x * args.out_stride;
    constexpr int kChunk = kHeldGroups * kRoundThreads;
    static_assert(16 * kChunk == most_columns_in_place);
    const int groups = ceil_div(args.k, 32) * 2;  // of 16 columns
    float* scales = reinterpret_cast<float*>(out + 8 * groups);
    Vector<T> held[kHeldGroups][2];
    uint32_t largest[kHeldGroups] = {};  // bits of magnitudes, which as integers are in the order of the numbers
    auto for_groups = [&](int begin, auto f) {
#pragma unroll
        for (int h = 0; h < kHeldGroups; ++h) f(h, begin + static_cast<int>(threadIdx.x) + h * kRoundThreads);
    };
    auto load = [&](int h, int group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = 16 * group + 8 * half;
            held[h][half].words = make_uint4(0, 0, 0, 0);
            if (column < args.k) held[h][half].load(x + column);
        }
    };
    auto see = [&](int h, int) {
        if constexpr (kBoxScales) largest[h] = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float values[8];
            held[h][half].unpack(values);
#pragma unroll
            for (int i = 0; i < 8; ++i) largest[h] = max(largest[h], float_to_bits(values[i]) & 0x7fffffffu);
        }
    };
    auto store = [&](int h, int group, const Rounding& rounding) {
        if (group >= groups) return;
        float low[8], high[8];
        held[h][0].unpack(low), held[h][1].unpack(high);
        *reinterpret_cast<uint4*>(out + 8 * group) =
            make_uint4(rounding.word(low, high, 0), rounding.word(low, high, 1), rounding.word(low, high, 2),
                       rounding.word(low, high, 3));
    };
    if constexpr (kBoxScales) {
        for (int begin = 0; begin < groups; begin += kChunk) {
            for_groups(begin, load);
            for_groups(begin, see);
            __syncthreads();  // all have read the row, where it is short
            for_groups(begin, [&](int h, int group) {
#pragma unroll
                for (int offset = 4; offset > 0; offset /= 2)
                    largest[h] = max(largest[h], __shfl_xor_sync(~0u, largest[h], offset));
                const Rounding rounding(largest[h]);
                store(h, group, rounding);
                if (group % 8 == 0 && group < groups) scales[group / 8] = rounding.scale;
            });
        }
    } else {
        for (int begin = 0; begin < groups; begin += kChunk) {
            for_groups(begin, load);
            for_groups(begin, see);
        }
#pragma unroll
        for (int h = 1; h < kHeldGroups; ++h) largest[0] = max(largest[0], largest[h]);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            largest[0] = max(largest[0], __shfl_xor_sync(~0u, largest[0], offset));
        if (lane_id() == 0) largest_of_warps[warp_id()] = largest[0];
        __syncthreads();  // all have read the row, where it is short
#pragma unroll
        for (int i = 0; i < kRoundWarps; ++i) largest[0] = max(largest[0], largest_of_warps[i]);
        const Rounding rounding(largest[0]);
        for (int begin = 0; begin < groups; begin += kChunk) {
            if (groups > kChunk) for_groups(begin, load);
            for_groups(begin, [&](int h, int group) { store(h, group, rounding); });
        }
        if (threadIdx.x == 0) *scales = rounding.scale;
    }
}

cudaError_t round_inputs(const RoundInputsArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    if (args.type == Element::f32 || (args.out == args.x && args.k > most_columns_in_place))
        return cudaErrorInvalidValue;
    const LaunchConfig config{dim3(static_cast<unsigned>(args.num_rows)), dim3(kRoundThreads), 0, stream};
    auto run = [&](auto t) {
        using T = decltype(t);
        return args.box_scales ? launch<round_inputs_kernel<T, true>>(config, args)
                               : launch<round_inputs_kernel<T, false>>(config, args);
    };
    return args.type == Element::bf16 ? run(bf16{}) : run(f16{});
}

}  // namespace infinilm::cuda
