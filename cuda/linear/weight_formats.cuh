// How a lane reads a packed weight (kernels.h): what a unit holds, and how its words become A fragments of
// mma_m16n8k16. Weights of fewer bits are made bf16 or f16 here, in registers: a weight is its number times the scale
// of its group, less a minimum if the format has one, rounded once. So the sums are those of a model whose weights were
// made numbers of 16 bits before, bit for bit, and only scales of rows meet float32 sums (linear.cuh).
//
// A format has
//   Shaped       the shape of its units
//   kScales      words of scales that a lane reads with a unit; or 0
//   fragment<T>  a step's registers from a unit
//   values       of all but AsType: the same of one register, as two floats that are not rounded yet
//   scale_place  of kScales: where a lane's words lie behind the codes
//
// Where a number lies in the words of a lane, with registers a[0], a[1] of rows r, r + 8 and a[2], a[3] of the same
// rows 8 columns on: int8 and fp8 have a[h] of step s in bytes 0 and 2 of word 2 s + h, a[h + 2] in bytes 1 and 3. int4
// has rows 8 h + r of steps 2 g and 2 g + 1 in word 2 g + h, register i of these four in half-bytes i and i + 4,
// plus 8, or plus its zero point. Other formats: plane_formats.cuh.
//
// Scales of groups are float16, in one word of rows r and r + 8: of int4 a word for each 32 columns; of int4_zeros one
// for 64, and one with what is subtracted from the floats that hold the integers, in the Element of the engine. fp4 and
// nvfp4 have their numbers where int4 has, which is a plane of 4 bits, too. Scales of fp4 are bfloat16; those of nvfp4
// e4m3 without a sign, a word of each row; those of fp8_blocks float32, of the eight rows from 0 and of those from 8.
//
// The way from integers to floats is that of Kim et al., "Who Says Elephants Can't Run" (2022), and of Frantar et al.,
// IST-DASLab/marlin: bits put under the exponent of a number so large that they count its units, and that number
// subtracted, here with the zero point. The bits of e4m3 moved to their places in bf16 and f16: vLLM's
// gptq_marlin/dequant.h. Scales that multiply weights, not sums: Marlin, too.
#pragma once

#include "cuda/core/ptx_e4m3.cuh"
#include "cuda/linear/kernels.h"
#include "cuda/linear/plane_formats.cuh"

namespace infinilm::cuda {

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

struct AsType : Shaped<WeightFormat::as_type> {
    static constexpr int kScales = 0;
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

// The same of e4m3 without a sign, 0x7f being 480.
template <class T>
__device__ __forceinline__ uint32_t widen_unsigned_fp8(uint32_t bytes) {
    if constexpr (is_bf16<T>) return fma2<T>(bytes << 4, 0x7b807b80u, 0x80008000u);
    return fma2<T>(bytes << 7, 0x5c005c00u, 0x80008000u);
}

// The two numbers of a register as floats, times a scale.
template <class T>
__device__ __forceinline__ float2 scaled(uint32_t pair, float scale) {
    return make_float2(__fmul_rn(unpack_low<T>(pair), scale), __fmul_rn(unpack_high<T>(pair), scale));
}

// Two integers of up to 4 bits and a sign times a float16 scale, rounded once. bf16 has room for 8 of the scale's 11
// bits: the product with the other three is exact, and added before what it belongs to is rounded.
template <class T>
struct SmallScale {
    uint32_t high, low;
    __device__ __forceinline__ explicit SmallScale(f16 scale) {
        if constexpr (is_bf16<T>) {
            const float all = to_float(scale);
            high = pack2<T>(all, all);
            const float rest = all - unpack_low<T>(high);
            low = pack2<T>(rest, rest);
        } else {
            high = scale.bits * 0x10001u, low = 0;
        }
    }
    __device__ __forceinline__ uint32_t operator()(uint32_t pair) const {
        return fma2<T>(pair, high, is_bf16<T> ? fma2<T>(pair, low, 0) : 0);
    }
};

// fragment() and values() of a format whose numbers are exact in bf16 and in f16: pair() has both of a register.
template <class F>
struct FromPairs {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = F::template pair<T>(unit, step, i);
    }
    template <class Unit>
    static __device__ __forceinline__ float2 values(const Unit& unit, int step, int i) {
        return scaled<f16>(F::template pair<f16>(unit, step, i), 1.0f);
    }
};

struct Int8 : Shaped<WeightFormat::int8>, FromPairs<Int8> {
    static constexpr int kScales = 0;
    template <class T, class Unit>
    static __device__ __forceinline__ uint32_t pair(const Unit& unit, int step, int i) {
        return widen_int8<T>(unit.words[2 * step + i % 2] >> i / 2 * 8);
    }
};
struct Fp8 : Shaped<WeightFormat::fp8>, FromPairs<Fp8> {
    static constexpr int kScales = 0;
    template <class T, class Unit>
    static __device__ __forceinline__ uint32_t pair(const Unit& unit, int step, int i) {
        return widen_fp8<T>(unit.words[2 * step + i % 2] >> i / 2 * 8);
    }
};
// e4m3 beside inputs of e4m3: what a lane of Fp8 holds is its fragment of mma_m16n8k32_e4m3, with k in another order
// (rounded_inputs.h), so that a step of 32 columns is a step of 16 pairs.
struct Fp8Pairs : Shaped<WeightFormat::fp8_pairs> {
    static constexpr int kScales = 0;
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int) {
        AsType::fragment<T>(a, unit, 0);
    }
};
struct Fp8BlockPairs : Shaped<WeightFormat::fp8_block_pairs> {
    static constexpr int kScales = 2;
    static __device__ __forceinline__ int scale_place(int) { return 0; }
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int) {
        Fp8Pairs::fragment<T>(a, unit, 0);
    }
};
struct Int8Groups : Shaped<WeightFormat::int8_groups>, FromValues<Int8Groups> {
    static constexpr int kScales = 1;
    static __device__ __forceinline__ int scale_place(int lane) { return lane / 4 * 4; }
    template <class Unit>
    static __device__ __forceinline__ float2 values(const Unit& unit, int step, int i) {
        return scaled<f16>(Int8::pair<f16>(unit, step, i), half_of<f16>(unit.scales[0], i % 2));
    }
};
struct Fp8Blocks : Shaped<WeightFormat::fp8_blocks>, FromValues<Fp8Blocks> {
    static constexpr int kScales = 2;
    static __device__ __forceinline__ int scale_place(int) { return 0; }
    template <class Unit>
    static __device__ __forceinline__ float2 values(const Unit& unit, int step, int i) {
        return scaled<f16>(Fp8::pair<f16>(unit, step, i), bits_to_float(unit.scales[i % 2]));
    }
};
template <WeightFormat kFormat>
struct FourBits : Shaped<kFormat> {
    static constexpr int kScales = 2;
    static __device__ __forceinline__ int scale_place(int lane) { return lane / 4 * 8; }
    // The bits of register i of a step, in half-bytes 0 and 4.
    template <class Unit>
    static __device__ __forceinline__ uint32_t halves(const Unit& unit, int step, int i) {
        return unit.words[step / 2 * 2 + i % 2] >> (step % 2 * 2 + i / 2) * 4;
    }
};
struct Int4 : FourBits<WeightFormat::int4> {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
        const uint32_t both = unit.scales[step / 2];  // of rows r, r + 8
        const SmallScale<T> scales[2] = {SmallScale<T>(f16{static_cast<uint16_t>(both)}),
                                         SmallScale<T>(f16{static_cast<uint16_t>(both >> 16)})};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = scales[i % 2](widen_int4<T>(halves(unit, step, i), int4_offset<T>(8) * 0x10001u));
    }
    template <class Unit>
    static __device__ __forceinline__ float2 values(const Unit& unit, int step, int i) {
        return scaled<f16>(widen_int4<f16>(halves(unit, step, i), int4_offset<f16>(8) * 0x10001u),
                           half_of<f16>(unit.scales[step / 2], i % 2));
    }
};
struct Int4Zeros : FourBits<WeightFormat::int4_zeros> {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
        const uint32_t both = unit.scales[0], zeros = unit.scales[1];  // of rows r, r + 8
        const SmallScale<T> scales[2] = {SmallScale<T>(f16{static_cast<uint16_t>(both)}),
                                         SmallScale<T>(f16{static_cast<uint16_t>(both >> 16)})};
        const uint32_t offsets[2] = {(zeros & 0xffffu) | zeros << 16, zeros >> 16 | (zeros & 0xffff0000u)};
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = scales[i % 2](widen_int4<T>(halves(unit, step, i), offsets[i % 2]));
    }
    template <class Unit>
    static __device__ __forceinline__ float2 values(const Unit& unit, int step, int i) {
        const uint32_t zero = unit.scales[1] >> i % 2 * 16 & 15;  // of the number that int4_offset gives
        return scaled<f16>(widen_int4<f16>(halves(unit, step, i), (int4_offset<f16>(0) + zero) * 0x10001u),
                           half_of<f16>(unit.scales[0], i % 2));
    }
};
struct Fp4 : FourBits<WeightFormat::fp4> {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
        const uint32_t both = unit.scales[step / 2];  // bfloat16, of rows r, r + 8
        const uint32_t scales[2] = {(both & 0xffffu) | both << 16, both >> 16 | (both & 0xffff0000u)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (is_bf16<T>) {
                a[i] = fma2<T>(widen_fp4<T>(halves(unit, step, i)), scales[i % 2], 0x80008000u);
            } else {
                const float2 pair = values(unit, step, i);
                a[i] = pack2<T>(pair.x, pair.y);
            }
        }
    }
    template <class Unit>
    static __device__ __forceinline__ float2 values(const Unit& unit, int step, int i) {
        return scaled<f16>(widen_fp4<f16>(halves(unit, step, i)), half_of<bf16>(unit.scales[step / 2], i % 2));
    }
};
// Words h of scales: a byte for each step. An e2m1 number times an e4m3 scale has 6 bits, which both types hold.
struct Nvfp4 : FourBits<WeightFormat::nvfp4>, FromPairs<Nvfp4> {
    static constexpr int kBits = 4;
    template <class T, class Unit>
    static __device__ __forceinline__ uint32_t pair(const Unit& unit, int step, int i) {
        const uint32_t scale = (unit.scales[i % 2] >> 8 * step & 255) * 0x10001u;
        return fma2<T>(widen_fp4<T>(halves(unit, step, i)), widen_unsigned_fp8<T>(scale), 0x80008000u);
    }
};
struct Q4_K : Planes<Q4_K, WeightFormat::q4_k, 4, 0, ByteMinima32> {};
struct Q5_K : Planes<Q5_K, WeightFormat::q5_k, 5, 0, ByteMinima32> {};
struct Q6_K : Planes<Q6_K, WeightFormat::q6_k, 6, 32, SignedBytes16> {};
struct Q2_K : Planes<Q2_K, WeightFormat::q2_k, 2, 0, FourBitMinima16> {};
struct Q3_K : Planes<Q3_K, WeightFormat::q3_k, 3, 4, SignedBytes16> {};
struct Q4_1 : Planes<Q4_1, WeightFormat::q4_1, 4, 0, HalfMinima32> {};
struct Q5_1 : Planes<Q5_1, WeightFormat::q5_1, 5, 0, HalfMinima32> {};

// What the sums of a step are multiplied by where F::kBoxScales: the scales of rows r and r + 8, and those of the two
// tokens that a lane has.
struct BoxScales {
    float rows[2];
    float2 tokens;

    // sum i of a lane (mma_m16n8k16), added to one of float32.
    __device__ __forceinline__ float add(float sum, float of_box, int i) const {
        return __fmaf_rn(of_box, __fmul_rn(rows[i / 2], i % 2 == 0 ? tokens.x : tokens.y), sum);
    }
};

// sums += a . b of a step, by the tensor cores. Those of e4m3 keep 14 bits or so of a sum, so that each step has one of
// its own, which is added in float32.
template <class T, class F>
__device__ __forceinline__ void multiply_step(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                              const BoxScales& scales) {
    if constexpr (F::kRoundedInputs) {
        float step[4] = {};
        mma_m16n8k32_e4m3(step, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[i] = F::kBoxScales ? scales.add(sums[i], step[i], i) : __fadd_rn(sums[i], step[i]);
    } else {
        mma_m16n8k16<T>(sums, a, b);
    }
}

// Every format of what is stored but AsType, each of which a file instantiates the linears for.
#define INFINILM_FOR_FORMATS(DO) \
    DO(Int8)                     \
    DO(Int4)                     \
    DO(Fp8)                      \
    DO(Int4Zeros)                \
    DO(Int8Groups)               \
    DO(Fp8Blocks)                \
    DO(Fp4)                      \
    DO(Nvfp4)                    \
    DO(Q4_1)                     \
    DO(Q5_1)                     \
    DO(Q2_K)                     \
    DO(Q3_K)                     \
    DO(Q4_K)                     \
    DO(Q5_K)                     \
    DO(Q6_K)

// f(the type of one of these); of others nothing.
template <class Visit>
__host__ __device__ __forceinline__ void visit_format(WeightFormat format, Visit f) {
    switch (format) {
        case WeightFormat::as_type:
        case WeightFormat::fp8_pairs:
        case WeightFormat::fp8_block_pairs: break;
        case WeightFormat::int8: f(Int8{}); break;
        case WeightFormat::int4: f(Int4{}); break;
        case WeightFormat::fp8: f(Fp8{}); break;
        case WeightFormat::int4_zeros: f(Int4Zeros{}); break;
        case WeightFormat::int8_groups: f(Int8Groups{}); break;
        case WeightFormat::fp8_blocks: f(Fp8Blocks{}); break;
        case WeightFormat::fp4: f(Fp4{}); break;
        case WeightFormat::q4_k: f(Q4_K{}); break;
        case WeightFormat::q5_k: f(Q5_K{}); break;
        case WeightFormat::q6_k: f(Q6_K{}); break;
        case WeightFormat::q2_k: f(Q2_K{}); break;
        case WeightFormat::q4_1: f(Q4_1{}); break;
        case WeightFormat::q5_1: f(Q5_1{}); break;
        case WeightFormat::nvfp4: f(Nvfp4{}); break;
        case WeightFormat::q3_k: f(Q3_K{}); break;
    }
}
template <class Visit>
cudaError_t visit_quantised(WeightFormat format, Visit f) {
    cudaError_t error = cudaErrorInvalidValue;
    visit_format(format, [&](auto of) { error = f(of); });
    return error;
}

// The same with those that inputs are rounded beside.
#define INFINILM_FOR_ROUNDED(DO) DO(Fp8Pairs) DO(Fp8BlockPairs)
template <class Visit>
cudaError_t visit_multiplied(WeightFormat format, Visit f) {
    if (format == WeightFormat::fp8_pairs) return f(Fp8Pairs{});
    if (format == WeightFormat::fp8_block_pairs) return f(Fp8BlockPairs{});
    return visit_quantised(format, f);
}

template <class F>
constexpr int unit_bytes_of = F::kCodeBytes + F::kScaleBytes;
template <class F>
__host__ __device__ constexpr int units_of(int k) {
    return (k + 16 * F::kUnitSteps - 1) / (16 * F::kUnitSteps);
}

// Words of a lane, from shared memory, or from global memory that nothing writes. Three may be aligned to 4 bytes only.
template <bool kShared, int kWords>
__device__ __forceinline__ void load_words(uint32_t* to, const uint8_t* from) {
    if constexpr (kWords == 4) {
        const uint4 v = kShared ? *reinterpret_cast<const uint4*>(from) : load_streamed_16(from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (kWords == 2) {
        uint32_t v[2];
        if constexpr (kShared) {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            v[0] = both.x, v[1] = both.y;
        } else {
            load_streamed(v, from);
        }
        to[0] = v[0], to[1] = v[1];
    } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            uint32_t v[1];
            if constexpr (kShared)
                v[0] = reinterpret_cast<const uint32_t*>(from)[i];
            else
                load_streamed(v, from + 4 * i);
            to[i] = v[0];
        }
    }
}

// What a lane holds of a unit. Its words lie in planes of 16, 8 and 4 bytes of each lane, of which a format has some.
template <class F>
struct Unit {
    static constexpr int kWide = F::kCodeBytes / 512 * 4, kMiddle = F::kCodeBytes / 256 % 2 * 2,
                         kHigh = F::kCodeBytes / 128 % 2;
    uint32_t words[kWide + kMiddle + kHigh], scales[F::kScales > 0 ? F::kScales : 1];

    // unit: in global memory.
    __device__ __forceinline__ void load_streamed_from(const uint8_t* unit) { load<false>(unit); }
    // unit: in shared memory.
    __device__ __forceinline__ void load_shared(const uint8_t* unit) { load<true>(unit); }

private:
    template <bool kShared>
    __device__ __forceinline__ void load(const uint8_t* unit) {
        const int lane = static_cast<int>(lane_id());
        load_words<kShared, kWide>(words, unit + lane * 16);
        load_words<kShared, kMiddle>(words + kWide, unit + kWide * 128 + lane * 8);
        load_words<kShared, kHigh>(words + kWide + kMiddle, unit + (kWide + kMiddle) * 128 + lane * 4);
        if constexpr (F::kScales > 0)
            load_words<kShared, F::kScales>(scales, unit + F::kCodeBytes + F::scale_place(lane));
    }
};

// The words of one lane where they lie, for readers of a few numbers (stored_row.cuh).
template <class F>
struct StoredUnit {
    struct Words {
        const uint8_t* unit;
        int lane;
        __device__ __forceinline__ uint32_t operator[](int i) const {
            constexpr int kWide = Unit<F>::kWide, kWider = kWide + Unit<F>::kMiddle;
            const int place = i < kWide    ? lane * 16 + i * 4
                              : i < kWider ? kWide * 128 + lane * 8 + (i - kWide) * 4
                                           : kWider * 128 + lane * 4;
            return *reinterpret_cast<const uint32_t*>(unit + place);
        }
    } words;
    const uint32_t* scales;

    __device__ __forceinline__ StoredUnit(const uint8_t* unit, int lane) : words{unit, lane}, scales(nullptr) {
        if constexpr (F::kScales > 0)
            scales = reinterpret_cast<const uint32_t*>(unit + F::kCodeBytes + F::scale_place(lane));
    }
};

}  // namespace infinilm::cuda
