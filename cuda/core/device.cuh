// The vocabulary every kernel starts from: 16-bit float types, shared memory, reductions in a fixed order, random
// numbers. The same file is compiled by nvcc and, with INFINILM_CUDA_EMULATOR, by the host compiler, where each thread
// is a fiber (docs/cuda-emulator.md). C++17 on the device. Kernels live in namespace infinilm::cuda, not in an
// anonymous one: reports name them by symbol. `bf16` and `f16` have the layout and meaning of those of
// src/core/dtype.h and are types of their own, as that header is C++20.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef INFINILM_CUDA_EMULATOR
#include "cuda/emulator/builtins.h"
#else
// INFINILM_SHARED(float, partial, [32][4]): a __shared__ array of the block, here named `partial`.
#define INFINILM_SHARED(type, name, dims) __shared__ type name dims
// INFINILM_DYNAMIC_SHARED(smem): the LaunchConfig::smem_bytes of dynamic shared memory, uint8_t*, 1024-byte aligned
// (what 128-byte swizzled tiles need).
#define INFINILM_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) uint8_t name[]
#endif

namespace infinilm::cuda {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// ---- conversions, round to nearest even; every NaN becomes 0x7fff as on the device -------------------------------

__host__ __device__ inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
__host__ __device__ inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

__host__ __device__ inline float to_float(float v) { return v; }
__host__ __device__ inline float to_float(bf16 v) { return bits_to_float(uint32_t{v.bits} << 16); }
__host__ __device__ inline float to_float(f16 v) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(v.bits));
    return value;
#else
    const uint32_t sign = (v.bits & 0x8000u) << 16, magnitude = v.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude < 0x0400u)  // zero or subnormal: magnitude * 2^-24 is exact
        return bits_to_float(sign | float_to_bits(static_cast<float>(magnitude) * 0x1p-24f));
    return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
#endif
}

template <class T>
__host__ __device__ T from_float(float v);
template <>
__host__ __device__ inline float from_float<float>(float v) {
    return v;
}
template <>
__host__ __device__ inline bf16 from_float<bf16>(float v) {
#ifdef __CUDA_ARCH__
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(v));
    return result;
#else
    const uint32_t u = float_to_bits(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
#endif
}
template <>
__host__ __device__ inline f16 from_float<f16>(float v) {
#ifdef __CUDA_ARCH__
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(v));
    return result;
#else
    const uint32_t u = float_to_bits(v), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {0x7fff};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
        const float shifted = bits_to_float(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u))};
    }
    return {static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13)};
#endif
}

// The e4m3 number next to v, ties to even; |v| <= 448.
__device__ __forceinline__ uint32_t to_e4m3(float v) {
    const uint32_t bits = float_to_bits(v), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x3c800000u)  // below 2^-6: multiples of 2^-9
        return sign | static_cast<uint32_t>(rintf(bits_to_float(magnitude) * 512.0f));
    return sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
}

// What a float32 value is once it has been stored as T.
template <class T>
__host__ __device__ inline float rounded(float v) {
    return to_float(from_float<T>(v));
}

// Two values in one register, `low` in the low half: the element order of memory and of mma fragments.
template <class T>
__host__ __device__ uint32_t pack2(float low, float high);
template <>
__host__ __device__ inline uint32_t pack2<bf16>(float low, float high) {
#ifdef __CUDA_ARCH__
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return from_float<bf16>(low).bits | uint32_t{from_float<bf16>(high).bits} << 16;
#endif
}
template <>
__host__ __device__ inline uint32_t pack2<f16>(float low, float high) {
#ifdef __CUDA_ARCH__
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return from_float<f16>(low).bits | uint32_t{from_float<f16>(high).bits} << 16;
#endif
}
template <class T>
__host__ __device__ inline float unpack_low(uint32_t packed) {
    return to_float(T{static_cast<uint16_t>(packed)});
}
template <class T>
__host__ __device__ inline float unpack_high(uint32_t packed) {
    return to_float(T{static_cast<uint16_t>(packed >> 16)});
}

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// ---- where a thread is (blocks are one-dimensional) --------------------------------------------------------------

__device__ __forceinline__ unsigned lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ unsigned warp_id() { return threadIdx.x / 32; }

// A number that all lanes have. The compiler then knows so, and may keep it in a register of the warp.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// ---- reductions. A butterfly adds the same pairs in every lane, so every lane gets the same bits. ----------------

#ifdef INFINILM_CUDA_EMULATOR
// The same pairs, but the lanes meet once and not five times: meeting is most of the time of emulated kernels.
inline float warp_sum(float value) {
    return emulator::butterfly(value, "warp_sum", [](float a, float b) { return a + b; });
}
inline float warp_max(float value) {
    return emulator::butterfly(value, "warp_max", [](float a, float b) { return fmaxf(a, b); });
}
#else
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}
#endif

// ---- Philox4x32-10 (Salmon et al., SC 2011): the numbers of src/core/random.h ------------------------------------

__host__ __device__ inline void philox4x32(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
        counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0;
        counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1;
        counter[1] = static_cast<uint32_t>(b);
        counter[3] = static_cast<uint32_t>(a);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// In [0, 1), a multiple of 2^-24; depends on (seed, position) alone.
__host__ __device__ inline float uniform(uint64_t seed, uint64_t position) {
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return static_cast<float>(counter[0] >> 8) * 0x1p-24f;
}

}  // namespace infinilm::cuda
