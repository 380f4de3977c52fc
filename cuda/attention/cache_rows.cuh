// Rows of keys and values in 8 bits: int8 or fp8 (e4m3) numbers and a float32 scale, that of the row's largest element.
// How they are rounded, and what is read of them: a number times its scale, in float32, rounded once to T. So attention
// over such a cache has the bits of attention over a cache in T that holds these values, by every kernel.
#pragma once

#include "cuda/core/norm.cuh"
#include "cuda/core/types.h"
#include "numerics/quantise.h"

namespace infinilm::cuda {

// ---- writing, by a warp ------------------------------------------------------------------------------------------

// As src/cpu/kernels/round_int8.h rounds to int8: the same bytes.
class RowRounding {
public:
    // First all elements of the row, by all lanes.
    __device__ __forceinline__ void see(const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest_ = max(largest_, float_to_bits(x[i]) & 0x7fffffffu);
    }
    // Then the scale, NaN if an element was infinite or NaN, and with it round().
    __device__ __forceinline__ float find_scale(Element type) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            largest_ = max(largest_, __shfl_xor_sync(0xffffffffu, largest_, offset));
        is_fp8_ = type == Element::fp8;
        const float most = bits_to_float(largest_), number = is_fp8_ ? quantise::fp8_largest : 127.0f;
        inverse_ = most > 0x1p-119f ? number / most : 0.0f;  // less than that is nothing: its inverse is infinite
        return __fadd_rn(most / number, __fmul_rn(most, 0.0f));
    }
    // 8 neighbouring numbers.
    __device__ __forceinline__ uint2 round(const float (&x)[8]) const {
        uint32_t words[2] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i / 4] |= number(__fmul_rn(x[i], inverse_)) << i % 4 * 8;
        return make_uint2(words[0], words[1]);
    }

private:
    __device__ __forceinline__ uint32_t number(float x) const {
        if (is_fp8_) return to_e4m3(fminf(fmaxf(x, -quantise::fp8_largest), quantise::fp8_largest));
        return float_to_bits(__fadd_rn(x, 0x1.8p23f)) & 0xff;  // the sum rounds to an integer, in the low bits
    }
    // Bits of the magnitudes, which as integers are in the order of the numbers, infinity and NaN last.
    uint32_t largest_ = 0;
    float inverse_ = 0.0f;
    bool is_fp8_ = false;
};

// ---- reading -----------------------------------------------------------------------------------------------------

// 8 neighbouring numbers times the scale of their row; not rounded yet.
__device__ __forceinline__ void widen8(uint2 numbers, float scale, bool is_fp8, float (&x)[8]) {
    const uint32_t words[2] = {numbers.x, numbers.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float* const to = x + 4 * i;
        if (is_fp8) {
            const uint32_t even = e4m3_to_f16(words[i] & 0x00ff00ffu), odd = e4m3_to_f16(words[i] >> 8 & 0x00ff00ffu);
            to[0] = unpack_low<f16>(even), to[2] = unpack_high<f16>(even);
            to[1] = unpack_low<f16>(odd), to[3] = unpack_high<f16>(odd);
        } else {
            // 2^23 + 128 + the number is a float32 whose low byte is that of the number, with the sign turned over.
            const uint32_t turned = words[i] ^ 0x80808080u;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                to[j] = __fadd_rn(bits_to_float(__byte_perm(turned, 0x4b000000u, 0x7650u + j)), -0x1.0001p23f);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], scale);
}

// Row `row` of a cache whose elements E are T, or uint8_t where they have 8 bits.
template <class T, class E>
struct CacheRow {
    const E* elements;  // [head_dim]
    __device__ __forceinline__ CacheRow(const void* cache, const float*, Element, int64_t row, int head_dim)
        : elements(static_cast<const E*>(cache) + row * head_dim) {}
    // Elements column .. column + 7; `column` is a multiple of 8.
    __device__ __forceinline__ void load8(int column, float (&x)[8]) const { cuda::load8(elements + column, x); }
    __device__ __forceinline__ float at(int column) const { return to_float(elements[column]); }
};
template <class T>
struct CacheRow<T, uint8_t> {
    const uint8_t* numbers;  // [head_dim]
    float scale;
    bool is_fp8;

    __device__ __forceinline__ CacheRow(const void* cache, const float* scales, Element type, int64_t row, int head_dim)
        : numbers(static_cast<const uint8_t*>(cache) + row * head_dim),
          scale(scales[row]),
          is_fp8(type == Element::fp8) {}
    __device__ __forceinline__ void load8(int column, float (&x)[8]) const {
        widen8(*reinterpret_cast<const uint2*>(numbers + column), scale, is_fp8, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = rounded<T>(x[i]);
    }
    __device__ __forceinline__ float at(int column) const {
        const float x = is_fp8 ? unpack_low<f16>(e4m3_to_f16(numbers[column]))
                               : static_cast<float>(static_cast<int8_t>(numbers[column]));
        return rounded<T>(__fmul_rn(x, scale));
    }
};

// Calls f(E{}) with the element that a cache has which `scales` are of, if any.
template <class T, class F>
cudaError_t visit_cache(const float* scales, F f) {
    return scales ? f(uint8_t{}) : f(T{});
}

}  // namespace infinilm::cuda
