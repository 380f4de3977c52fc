// How a lane reads a packed weight (kernels.h): what a unit holds, and how its words become A fragments of
// mma_m16n8k16. Weights of fewer bits are made bf16 or f16 here, in registers, and every such number is exact: what the
// format rounded away is all that is lost. Scales meet float32 sums, in an order that all linears share (linear.cuh).
//
// A format has
//   kUnitSteps   steps of 16 columns in a unit
//   kTurnSteps   steps that are multiplied at a time: a slice of k holds whole units, a group of scales whole turns
//   kScales      words of scales that a lane reads with a unit; or 0
//   kScaleBytes  bytes of scales behind the 512 of a unit
//   kRowScales   whether rows have a scale, for the end of an output
//   fragment<T>  a step's registers from a unit
//   scale_place  of kScales: where a lane's words lie behind those 512 bytes
//   scales_of    of kScales: what add_scaled takes of a unit in a turn, a Scales
//
// Where a number lies in the words [4] of a lane, with registers a[0], a[1] of rows r, r + 8 and a[2], a[3] of the same
// rows 8 columns on: int8 and fp8 have a[h] of step s in bytes 0 and 2 of word 2 s + h, a[h + 2] in bytes 1 and 3. int4
// has rows 8 h + r of steps 2 g and 2 g + 1 in word 2 g + h, register i of these four in half-bytes i and i + 4,
// plus 8, or plus its zero point.
//
// Scales of groups are float16, in one word of rows r and r + 8: of int4 a word for each 32 columns; of int4_zeros one
// for 64, and one with what is subtracted from the floats that hold the integers, in the Element of the engine. fp4 has
// its numbers where int4 has, and bfloat16 scales. Those of fp8_blocks are float32, of the eight rows from 0 and of
// those from 8.
//
// The way from integers to floats is that of Kim et al., "Who Says Elephants Can't Run" (2022), and of Frantar et al.,
// IST-DASLab/marlin: bits put under the exponent of a number so large that they count its units, and that number
// subtracted, here with the zero point. The bits of e4m3 moved to their places in bf16 and f16: vLLM's
// gptq_marlin/dequant.h.
#pragma once

#include "cuda/core/ptx.cuh"
#include "cuda/linear/kernels.h"

namespace infinilm::cuda {

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

struct AsType {
    static constexpr int kUnitSteps = 1, kTurnSteps = 1, kScales = 0, kScaleBytes = 0;
    static constexpr bool kRowScales = false;
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = unit.words[i];
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

// Minus what 4 bits count from in T, minus a zero point of 0 to 15: in T, which has room for the sum.
template <class T>
__host__ __device__ constexpr uint32_t int4_offset(int zero) {
    return is_bf16<T> ? 0xc300u + zero : 0xe400u + zero;
}
// Two integers of 4 bits, in half-bytes 0 and 4. offsets: two of the above.
template <class T>
__device__ __forceinline__ uint32_t widen_int4(uint32_t halves, uint32_t offsets) {
    if constexpr (is_bf16<T>) return fma2<T>(and_or(halves, 0x000f000fu, 0x43004300u), 0x3f803f80u, offsets);
    return fma2<T>(and_or(halves, 0x000f000fu, 0x64006400u), 0x3c003c00u, offsets);
}

// Two e2m1 numbers, in half-bytes 0 and 4. The same bits are 2^-126 of the value in bf16 and 2^-14 in f16, subnormal or
// not.
template <class T>
__device__ __forceinline__ uint32_t widen_fp4(uint32_t halves) {
    const uint32_t sign = halves << 12;
    if constexpr (is_bf16<T>)
        return fma2<T>(and_or(sign, 0x80008000u, halves << 6 & 0x01c001c0u), 0x7e807e80u, 0x80008000u);
    return fma2<T>(and_or(sign, 0x80008000u, halves << 9 & 0x0e000e00u), 0x74007400u, 0x80008000u);
}

// Two e4m3 numbers, in bytes 0 and 2. In bf16 the same bits are 2^-120 of the value, subnormal or not.
template <class T>
__device__ __forceinline__ uint32_t widen_fp8(uint32_t bytes) {
    if constexpr (is_bf16<T>)
        return fma2<T>(and_or(bytes << 8, 0x80008000u, bytes << 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
    return e4m3_to_f16(bytes);
}

struct Bytes {
    static constexpr int kUnitSteps = 2, kTurnSteps = 2, kScales = 0, kScaleBytes = 0;
    static constexpr bool kRowScales = true;
    using Scales = uint32_t;
};
struct Int8 : Bytes {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_int8<T>(unit.words[2 * step + i % 2] >> i / 2 * 8);
    }
};
struct Fp8 : Bytes {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_fp8<T>(unit.words[2 * step + i % 2] >> i / 2 * 8);
    }
};
struct Int8Groups : Int8 {
    static constexpr int kScales = 1, kScaleBytes = 32;
    static __device__ __forceinline__ int scale_place(int lane) { return lane / 4 * 4; }
    template <class Unit>
    static __device__ __forceinline__ Scales scales_of(const Unit& unit, int) {
        return unit.scales[0];
    }
};
struct Fp8Blocks : Fp8 {
    static constexpr int kScales = 2, kScaleBytes = 16;
    using Scales = float2;
    static __device__ __forceinline__ int scale_place(int) { return 0; }
    template <class Unit>
    static __device__ __forceinline__ Scales scales_of(const Unit& unit, int) {
        return make_float2(bits_to_float(unit.scales[0]), bits_to_float(unit.scales[1]));
    }
};
struct FourBits {
    static constexpr int kUnitSteps = 4, kTurnSteps = 2, kScales = 2, kScaleBytes = 64;
    static constexpr bool kRowScales = true;
    using Scales = uint32_t;
    static __device__ __forceinline__ int scale_place(int lane) { return lane / 4 * 8; }
    // The bits of register i of a step, in half-bytes 0 and 4.
    template <class Unit>
    static __device__ __forceinline__ uint32_t halves(const Unit& unit, int step, int i) {
        return unit.words[step / 2 * 2 + i % 2] >> (step % 2 * 2 + i / 2) * 4;
    }
};
struct Int4 : FourBits {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_int4<T>(halves(unit, step, i), int4_offset<T>(8) * 0x10001u);
    }
    template <class Unit>
    static __device__ __forceinline__ Scales scales_of(const Unit& unit, int turn) {
        return unit.scales[turn % 2];
    }
};
struct Int4Zeros : FourBits {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
        const uint32_t both = unit.scales[1];  // rows r, r + 8
        const uint32_t offsets[2] = {(both & 0xffffu) | both << 16, both >> 16 | (both & 0xffff0000u)};
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_int4<T>(halves(unit, step, i), offsets[i % 2]);
    }
    template <class Unit>
    static __device__ __forceinline__ Scales scales_of(const Unit& unit, int) {
        return unit.scales[0];
    }
};
struct Fp4 : FourBits {
    using Scales = float2;
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = widen_fp4<T>(halves(unit, step, i));
    }
    template <class Unit>
    static __device__ __forceinline__ Scales scales_of(const Unit& unit, int turn) {
        const uint32_t both = unit.scales[turn % 2];
        return make_float2(unpack_low<bf16>(both), unpack_high<bf16>(both));
    }
};
// Every format but AsType, each of which a file instantiates the linears for.
#define INFINILM_FOR_FORMATS(DO) DO(Int8) DO(Int4) DO(Fp8) DO(Int4Zeros) DO(Int8Groups) DO(Fp8Blocks) DO(Fp4)

// f(the type of one of these).
template <class Visit>
cudaError_t visit_quantised(WeightFormat format, Visit f) {
    switch (format) {
        case WeightFormat::as_type: break;
        case WeightFormat::int8: return f(Int8{});
        case WeightFormat::int4: return f(Int4{});
        case WeightFormat::fp8: return f(Fp8{});
        case WeightFormat::int4_zeros: return f(Int4Zeros{});
        case WeightFormat::int8_groups: return f(Int8Groups{});
        case WeightFormat::fp8_blocks: return f(Fp8Blocks{});
        case WeightFormat::fp4: return f(Fp4{});
    }
    return cudaErrorInvalidValue;
}

template <class F>
constexpr int unit_bytes_of = 512 + F::kScaleBytes;
template <class F>
__host__ __device__ constexpr int units_of(int k) {
    return (k + 16 * F::kUnitSteps - 1) / (16 * F::kUnitSteps);
}

// What a lane holds of a unit.
template <class F>
struct Unit {
    uint32_t words[4], scales[F::kScales > 0 ? F::kScales : 1];

    // unit: in global memory.
    __device__ __forceinline__ void load_streamed_from(const uint8_t* unit) {
        const int lane = static_cast<int>(lane_id());
        const uint4 v = load_streamed_16(unit + lane * 16);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        if constexpr (F::kScales > 0) load_streamed(scales, unit + 512 + F::scale_place(lane));
    }
    // unit: in shared memory.
    __device__ __forceinline__ void load_shared(const uint8_t* unit) {
        const int lane = static_cast<int>(lane_id());
        const uint4 v = *reinterpret_cast<const uint4*>(unit + lane * 16);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        if constexpr (F::kScales > 0) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(unit + 512 + F::scale_place(lane));
#pragma unroll
            for (int i = 0; i < F::kScales; ++i) scales[i] = from[i];
        }
    }
};

// sums += scale * d, for sums of one group of columns as mma_m16n8k16 leaves them. scales: of rows r and r + 8.
__device__ __forceinline__ void add_scaled(float (&sums)[4], const float (&d)[4], float2 scales) {
    sums[0] = __fmaf_rn(scales.x, d[0], sums[0]), sums[1] = __fmaf_rn(scales.x, d[1], sums[1]);
    sums[2] = __fmaf_rn(scales.y, d[2], sums[2]), sums[3] = __fmaf_rn(scales.y, d[3], sums[3]);
}
__device__ __forceinline__ void add_scaled(float (&sums)[4], const float (&d)[4], uint32_t scales) {
    add_scaled(sums, d, make_float2(unpack_low<f16>(scales), unpack_high<f16>(scales)));
}

}  // namespace infinilm::cuda
