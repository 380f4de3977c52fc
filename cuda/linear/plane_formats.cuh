// Formats whose codes lie in planes of bits: K-quants, Q4_1 and Q5_1 of GGUF files. Part of weight_formats.cuh.
//
// A unit is 64 columns. A code of b bits is cut into a plane of 4, one of 2 and one of 1 bits, as b in binary says,
// from the lowest bits of the code on; a lane has four words of the first plane, two of the second and one of the
// third. Number `second` (0, 1) of register i of step s belongs to row r + 8 h of the tile, h = i % 2, and to the t-th
// of four places of a word, t = (2 s + i / 2) % 4. Its bits are, with g = s / 2,
//   4 bits  in word 2 g + h, from bit 4 t + 16 second on
//   2 bits  in word h, from bit 4 t + 2 g + 16 second on
//   1 bit   bit 16 h + 4 t + g + 2 second of the word
// so that one shift brings a plane of four numbers to where the others have theirs. Put under the exponent of a large
// float, the bits are a number less one subtraction (weight_formats.cuh).
//
// A weight is scale * (code - offset) - minimum in float32, as gguf/blocks.h has it, and is then rounded to what is
// multiplied: the sums are those of the plainly dequantised model, bit for bit. Scales are kept as files have them, and
// no product of two of their parts is rounded in float32.
#pragma once

#include "cuda/core/ptx.cuh"
#include "cuda/linear/packed_weight.h"

namespace infinilm::cuda {

// One of the two 16-bit floats of a word, as a float.
template <class T>
__device__ __forceinline__ float half_of(uint32_t both, int i) {
    return i == 0 ? unpack_low<T>(both) : unpack_high<T>(both);
}

// fragment() of a format that computes its weights in float32.
template <class F>
struct FromValues {
    template <class T, class Unit>
    static __device__ __forceinline__ void fragment(uint32_t (&a)[4], const Unit& unit, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = F::values(unit, step, i);
            a[i] = pack2<T>(pair.x, pair.y);
        }
    }
};

// How scales lie in a unit: words [8 r][kScales], for rows r and r + 8 of the tile. scale(unit, step, h) is that of row
// r + 8 h for the columns of a step, minimum() what is subtracted.

__device__ __forceinline__ float byte_of(uint32_t word, int i) { return static_cast<float>(word >> 8 * i & 255); }
__device__ __forceinline__ float signed_byte_of(uint32_t word, int i) {
    return static_cast<float>(static_cast<int8_t>(word >> 8 * i & 255));
}

// Words h: bytes of the scales of both groups of 32 columns, then of their minima. Words 2 + h: the float16 numbers
// that multiply scales and minima.
struct ByteMinima32 {
    static constexpr int kScales = 4;
    static constexpr bool kMinima = true;
    template <class Unit>
    static __device__ __forceinline__ float scale(const Unit& unit, int step, int h) {
        return __fmul_rn(unpack_low<f16>(unit.scales[2 + h]), byte_of(unit.scales[h], step / 2));
    }
    template <class Unit>
    static __device__ __forceinline__ float minimum(const Unit& unit, int step, int h) {
        return __fmul_rn(unpack_high<f16>(unit.scales[2 + h]), byte_of(unit.scales[h], 2 + step / 2));
    }
};
// Words h: bytes of four groups of 16 columns, the scale in the lower 4 bits and the minimum in the upper ones. Words
// 2 + h as in ByteMinima32.
struct FourBitMinima16 {
    static constexpr int kScales = 4;
    static constexpr bool kMinima = true;
    static __device__ __forceinline__ float four_bits(uint32_t word, int i) {
        return static_cast<float>(word >> 4 * i & 15);
    }
    template <class Unit>
    static __device__ __forceinline__ float scale(const Unit& unit, int step, int h) {
        return __fmul_rn(unpack_low<f16>(unit.scales[2 + h]), four_bits(unit.scales[h], 2 * step));
    }
    template <class Unit>
    static __device__ __forceinline__ float minimum(const Unit& unit, int step, int h) {
        return __fmul_rn(unpack_high<f16>(unit.scales[2 + h]), four_bits(unit.scales[h], 2 * step + 1));
    }
};
// Words 2 h + g: the float16 scale of group g of 32 columns, and what is added.
struct HalfMinima32 {
    static constexpr int kScales = 4;
    static constexpr bool kMinima = true;
    template <class Unit>
    static __device__ __forceinline__ float scale(const Unit& unit, int step, int h) {
        return unpack_low<f16>(unit.scales[2 * h + step / 2]);
    }
    template <class Unit>
    static __device__ __forceinline__ float minimum(const Unit& unit, int step, int h) {
        return -unpack_high<f16>(unit.scales[2 * h + step / 2]);
    }
};
// Words h: signed bytes, the scales of four groups of 16 columns. Word 2: the float16 numbers that multiply them, of
// both rows.
struct SignedBytes16 {
    static constexpr int kScales = 3;
    static constexpr bool kMinima = false;
    template <class Unit>
    static __device__ __forceinline__ float scale(const Unit& unit, int step, int h) {
        return __fmul_rn(half_of<f16>(unit.scales[2], h), signed_byte_of(unit.scales[h], step));
    }
};

// kOffset: what codes count from.
template <class F, WeightFormat kFormat, int kCodeBits, int kOffset, class Grouping>
struct Planes : Shaped<kFormat>, Grouping, FromValues<F> {
    using Shape = Shaped<kFormat>;
    static constexpr int kBits = kCodeBits;
    static_assert(Shape::kCodeBytes == 128 * kBits && Shape::kScaleBytes == 32 * Grouping::kScales);

    static __device__ __forceinline__ int scale_place(int lane) { return lane / 4 * (4 * Grouping::kScales); }

    // The bits of `word` from bit `from` on, of each of four places, from bit `to` on.
    static __device__ __forceinline__ uint32_t moved(uint32_t word, int from, int to) {
        return from > to ? word >> (from - to) : word << (to - from);
    }
    template <class Unit>
    static __device__ __forceinline__ float number(const Unit& unit, int step, int i, int second) {
        const int g = step / 2, h = i % 2, place = (2 * step + i / 2) % 4 * 4;
        constexpr int kLow = kBits & 4, kMiddle = kBits & 2, kMiddleWord = kLow, kHighWord = kLow + kMiddle;
        uint32_t bits = static_cast<uint32_t>(150 - place) << 23;  // 2^(23 - place)
        const float offset = bits_to_float(bits) + static_cast<float>(kOffset);
        if constexpr (kLow) bits = and_or(moved(unit.words[2 * g + h], 16 * second, 0), 15u << place, bits);
        if constexpr (kMiddle)
            bits = and_or(moved(unit.words[kMiddleWord + h], 2 * g + 16 * second, kLow), 3u << kLow << place, bits);
        if constexpr (kBits & 1)
            bits = and_or(moved(unit.words[kHighWord], 16 * h + g + 2 * second, kLow + kMiddle),
                          1u << (kLow + kMiddle) << place, bits);
        return bits_to_float(bits) - offset;
    }
    // Both numbers of a register as float32 weights.
    template <class Unit>
    static __device__ __forceinline__ float2 values(const Unit& unit, int step, int i) {
        const float scale = Grouping::scale(unit, step, i % 2);
        const float first = number(unit, step, i, 0), second = number(unit, step, i, 1);
        if constexpr (Grouping::kMinima) {
            const float minimum = Grouping::minimum(unit, step, i % 2);
            return make_float2(__fmaf_rn(scale, first, -minimum), __fmaf_rn(scale, second, -minimum));
        } else {
            return make_float2(__fmul_rn(scale, first), __fmul_rn(scale, second));
        }
    }
};

}  // namespace infinilm::cuda
