// How a lane reads a packed weight (kernels.h): what a unit holds, and how its words become A fragments of
// mma_m16n8k16. Weights of fewer bits are made bf16 or f16 here, in registers, and every such number is exact: what the
// format rounded away is all that is lost. Scales meet float32 sums, in an order that all linears share (linear.cuh).
//
// A format has
//   kUnitSteps   steps of 16 columns in a unit
//   kTurnSteps   steps that are multiplied at a time: a slice of k holds whole units, a group of scales whole turns
//   kScales      words of scales that a lane reads with a unit, each of its rows r and r + 8 of the tile; or 0
//   kRowScales   whether rows have a scale, for the end of an output
//   fragment<T>  a step's registers from a unit's words
//
// Where a number lies in the words [4] of a lane, with registers a[0], a[1] of rows r, r + 8 and a[2], a[3] of the same
// rows 8 columns on: int8 and fp8 have a[h] of step s in bytes 0 and 2 of word 2 s + h, a[h + 2] in bytes 1 and 3. int4
// has rows 8 h + r of steps 2 g and 2 g + 1 in word 2 g + h, register i of these four in half-bytes i and i + 4,
// plus 8.
//
// The way from integers to floats is that of Kim et al., "Who Says Elephants Can't Run" (2022), and of Frantar et al.,
// IST-DASLab/marlin: bits put under the exponent of a number so large that they count its units, and that number
// subtracted. The bits of e4m3 moved to their places in bf16 and f16: vLLM's gptq_marlin/dequant.h.
#pragma once

#include "ptx.cuh"

namespace infinilm::cuda {

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

struct AsType {
    static constexpr int kUnitSteps = 1, kTurnSteps = 1, kScales = 0;
    static constexpr bool kRowScales = false;
    template <class T>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const uint32_t (&words)[4], int) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = words[i];
    }
};

// Two integers of 8 bits, in bytes 0 and 2.
template <class T>
__device__ __forceinline__ uint32_t widen_int8(uint32_t bytes) {
    // 128 + the low 7 bits, less 128 + the sign's 128: bf16 has room for 7 bits under its exponent.
    if constexpr (is_bf16<T>)
        return fma2<T>(and_or(bytes, 0x00800080u, 0x43004300u), 0xbf80bf80u, and_or(bytes, 0x007f007fu, 0x43004300u));
    // 1024 + 128 + the integer, whose sign is flipped for that
    return fma2<T>(and_xor(bytes, 0x00ff00ffu, 0x64806480u), 0x3c003c00u, 0xe480e480u);
}

// Two integers of 4 bits plus 8, in half-bytes 0 and 4.
template <class T>
__device__ __forceinline__ uint32_t widen_int4(uint32_t halves) {
    if constexpr (is_bf16<T>) return fma2<T>(and_or(halves, 0x000f000fu, 0x43004300u), 0x3f803f80u, 0xc308c308u);
    return fma2<T>(and_or(halves, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe408e408u);
}

// Two e4m3 numbers, in bytes 0 and 2. In bf16 the same bits are 2^-120 of the value, subnormal or not.
template <class T>
__device__ __forceinline__ uint32_t widen_fp8(uint32_t bytes) {
    if constexpr (is_bf16<T>)
        return fma2<T>(and_or(bytes << 8, 0x80008000u, bytes << 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
    return e4m3_to_f16(bytes);
}

struct Bytes {
    static constexpr int kUnitSteps = 2, kTurnSteps = 2, kScales = 0;
    static constexpr bool kRowScales = true;
};
struct Int8 : Bytes {
    template <class T>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const uint32_t (&words)[4], int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_int8<T>(words[2 * step + i % 2] >> i / 2 * 8);
    }
};
struct Fp8 : Bytes {
    template <class T>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const uint32_t (&words)[4], int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_fp8<T>(words[2 * step + i % 2] >> i / 2 * 8);
    }
};
// kGroup: columns that share a scale, 32, or a multiple of 64, whose scale each of its units has.
template <int kGroup>
struct Int4 {
    static_assert(kGroup == 32 || kGroup % 64 == 0, "a unit has 64 columns");
    static constexpr int kUnitSteps = 4, kTurnSteps = 2, kScales = kGroup == 32 ? 2 : 1;
    static constexpr bool kRowScales = false;
    template <class T>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const uint32_t (&words)[4], int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_int4<T>(words[step / 2 * 2 + i % 2] >> (step % 2 * 2 + i / 2) * 4);
    }
};

template <class F>
constexpr int unit_bytes_of = 512 + 32 * F::kScales;
template <class F>
__host__ __device__ constexpr int units_of(int k) {
    return (k + 16 * F::kUnitSteps - 1) / (16 * F::kUnitSteps);
}

// What a lane holds of a unit. Scales are bfloat16, of row r in the low half and of row r + 8 in the high one.
template <class F>
struct Unit {
    static constexpr int kScaleWords = F::kScales > 0 ? F::kScales : 1;
    uint32_t words[4], scales[kScaleWords];

    // unit: in global memory.
    __device__ __forceinline__ void load_streamed_from(const uint8_t* unit) {
        const int lane = static_cast<int>(lane_id());
        const uint4 v = load_streamed_16(unit + lane * 16);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        if constexpr (F::kScales > 0) load_streamed(scales, unit + 512 + lane / 4 * 4 * F::kScales);
    }
    // unit: in shared memory.
    __device__ __forceinline__ void load_shared(const uint8_t* unit) {
        const int lane = static_cast<int>(lane_id());
        const uint4 v = *reinterpret_cast<const uint4*>(unit + lane * 16);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        if constexpr (F::kScales > 0) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(unit + 512) + lane / 4 * F::kScales;
#pragma unroll
            for (int i = 0; i < F::kScales; ++i) scales[i] = from[i];
        }
    }
    __device__ __forceinline__ uint32_t scales_of(int turn) const { return scales[turn % kScaleWords]; }
};

// sums += scale * d, for sums of one group of columns as mma_m16n8k16 leaves them.
__device__ __forceinline__ void add_scaled(float (&sums)[4], const float (&d)[4], uint32_t scales) {
    const float low = unpack_low<bf16>(scales), high = unpack_high<bf16>(scales);
    sums[0] = __fmaf_rn(low, d[0], sums[0]), sums[1] = __fmaf_rn(low, d[1], sums[1]);
    sums[2] = __fmaf_rn(high, d[2], sums[2]), sums[3] = __fmaf_rn(high, d[3], sums[3]);
}

}  // namespace infinilm::cuda
