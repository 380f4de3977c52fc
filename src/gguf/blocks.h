// One block of each type as numbers: the formulas of ggml's block formats, one struct each. `bytes` of the block come
// as they lie in the file, float16 and float32 little-endian and of any alignment; `block` numbers go out.
//
// A quantised one has an integer for each weight, and scales for each `group` of them, with or without minima: a weight
// is scale * value(integer) - minimum. integers() gives the integers, scales() the scales and minima.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "gguf/grids.h"

namespace infinilm::gguf::blocks {

template <class Number>
Number number(const uint8_t* p) {
    Number value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
inline float half(const uint8_t* p) {
    f16 value;
    std::memcpy(&value.bits, p, sizeof value.bits);
    return to_float(value);
}

// Pairs of 4 bits: byte j has element j in its low half and element j + n / 2 in its high one.
template <int n = 32>
inline void nibbles(const uint8_t* bytes, uint8_t* q) {
    for (int j = 0; j < n / 2; ++j) q[j] = bytes[j] & 15;
    for (int j = 0; j < n / 2; ++j) q[n / 2 + j] = bytes[j] >> 4;
}
// 2 bits each: of 32 bytes the lowest bits, then the next.
inline void crumbs(const uint8_t* bytes, uint8_t* q) {
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 32; ++j) q[32 * i + j] = bytes[j] >> (2 * i) & 3;
}

struct F32 {
    static constexpr int block = 1, bytes = 4;
    static void read(const uint8_t* b, float* out) { std::memcpy(out, b, 4); }
};
struct F16 {
    static constexpr int block = 1, bytes = 2;
    static void read(const uint8_t* b, float* out) { *out = half(b); }
};
struct BF16 {
    static constexpr int block = 1, bytes = 2;
    static void read(const uint8_t* b, float* out) {
        bf16 value;
        std::memcpy(&value.bits, b, sizeof value.bits);
        *out = to_float(value);
    }
};

template <int size, int num_bytes, int group_size, bool with_minima = false>
struct Quantised {
    static constexpr int block = size, bytes = num_bytes, group = group_size;
    static constexpr bool has_min = with_minima;
};
template <class B>
void read(const uint8_t* b, float* out) {
    uint8_t q[B::block];
    float scales[B::block / B::group], minima[B::block / B::group];
    B::integers(b, q);
    B::scales(b, scales, minima);
    for (int j = 0; j < B::block / B::group; ++j)
        for (int i = j * B::group; i < (j + 1) * B::group; ++i) {
            const float value = scales[j] * static_cast<float>(B::value(q[i]));
            out[i] = B::has_min ? value - minima[j] : value;
        }
}

struct Q8_0 : Quantised<32, 34, 32> {  // scale; 32 int8
    static void integers(const uint8_t* b, uint8_t* q) { std::memcpy(q, b + 2, 32); }
    static void scales(const uint8_t* b, float* scales, float*) { *scales = half(b); }
    static int value(uint8_t q) { return static_cast<int8_t>(q); }
};
struct Q4_0 : Quantised<32, 18, 32> {  // scale; nibbles, each plus 8
    static void integers(const uint8_t* b, uint8_t* q) { nibbles(b + 2, q); }
    static void scales(const uint8_t* b, float* scales, float*) { *scales = half(b); }
    static int value(uint8_t q) { return q - 8; }
};
struct Q4_1 : Quantised<32, 20, 32, true> {  // scale, what is added; nibbles
    static void integers(const uint8_t* b, uint8_t* q) { nibbles(b + 4, q); }
    static void scales(const uint8_t* b, float* scales, float* minima) { *scales = half(b), *minima = -half(b + 2); }
    static int value(uint8_t q) { return q; }
};
inline void fifth_bits(const uint8_t* bits, uint8_t* q) {
    for (int i = 0; i < 32; ++i) q[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
}
struct Q5_0 : Quantised<32, 22, 32> {  // scale; the fifth bit of each; nibbles; each plus 16
    static void integers(const uint8_t* b, uint8_t* q) { nibbles(b + 6, q), fifth_bits(b + 2, q); }
    static void scales(const uint8_t* b, float* scales, float*) { *scales = half(b); }
    static int value(uint8_t q) { return q - 16; }
};
struct Q5_1 : Quantised<32, 24, 32, true> {  // scale, what is added; the fifth bit of each; nibbles
    static void integers(const uint8_t* b, uint8_t* q) { nibbles(b + 8, q), fifth_bits(b + 4, q); }
    static void scales(const uint8_t* b, float* scales, float* minima) { *scales = half(b), *minima = -half(b + 2); }
    static int value(uint8_t q) { return q; }
};

struct Q2_K : Quantised<256, 84, 16, true> {  // 16 pairs of 4 bits (scale, minimum); 2 bits each; scales of both
    static void integers(const uint8_t* b, uint8_t* q) { crumbs(b + 16, q), crumbs(b + 48, q + 128); }
    static void scales(const uint8_t* b, float* scales, float* minima) {
        const float d = half(b + 80), dmin = half(b + 82);
        for (int j = 0; j < 16; ++j)
            scales[j] = d * static_cast<float>(b[j] & 15), minima[j] = dmin * static_cast<float>(b[j] >> 4);
    }
    static int value(uint8_t q) { return q; }
};
struct Q3_K : Quantised<256, 110, 16> {  // the third bit of each; 2 bits each; 16 scales of 6 bits; scale; each plus 4
    static void integers(const uint8_t* b, uint8_t* q) {
        crumbs(b + 32, q), crumbs(b + 64, q + 128);
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < 32; ++j) q[32 * i + j] |= (b[j] >> i & 1) << 2;
    }
    // Their scales, each plus 32, to numbers.
    static void scale_numbers(const uint8_t* b, int8_t* numbers) {
        const uint8_t* const packed = b + 96;
        for (int s = 0; s < 16; ++s) {
            const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
            numbers[s] = static_cast<int8_t>((low | (packed[8 + s % 4] >> (s / 4 * 2) & 3) << 4) - 32);
        }
    }
    static void scales(const uint8_t* b, float* scales, float*) {
        const float d = half(b + 108);
        int8_t numbers[16];
        scale_numbers(b, numbers);
        for (int s = 0; s < 16; ++s) scales[s] = d * static_cast<float>(numbers[s]);
    }
    static int value(uint8_t q) { return q - 4; }
};

// The scales of Q4_K and Q5_K: of both, then 8 pairs of 6 bits in 12 bytes, whose upper 2 bits, of the last four, are
// in the first eight.
inline void scales_and_minima(const uint8_t* b, float* scales, float* minima) {
    const float d = half(b), dmin = half(b + 2);
    const uint8_t* const s = b + 4;
    for (int j = 0; j < 8; ++j) {
        const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        const int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
        scales[j] = d * static_cast<float>(scale), minima[j] = dmin * static_cast<float>(min);
    }
}
struct Q4_K : Quantised<256, 144, 32, true> {  // scales; nibbles: low halves of 32 bytes, then high ones
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 4; ++i) nibbles<64>(b + 16 + 32 * i, q + 64 * i);
    }
    static void scales(const uint8_t* b, float* scales, float* minima) { scales_and_minima(b, scales, minima); }
    static int value(uint8_t q) { return q; }
};
struct Q5_K : Quantised<256, 176, 32, true> {  // scales; the fifth bit of each: bit j of byte l; nibbles as Q4_K
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 4; ++i) nibbles<64>(b + 48 + 32 * i, q + 64 * i);
        for (int j = 0; j < 8; ++j)
            for (int l = 0; l < 32; ++l) q[32 * j + l] |= (b[16 + l] >> j & 1) << 4;
    }
    static void scales(const uint8_t* b, float* scales, float* minima) { scales_and_minima(b, scales, minima); }
    static int value(uint8_t q) { return q; }
};
struct Q6_K : Quantised<256, 210, 16> {  // lower 4 bits; upper 2 bits; 16 int8 scales; scale; each plus 32
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 2; ++i) {
            uint8_t high[128];
            crumbs(b + 128 + 32 * i, high);
            nibbles<128>(b + 64 * i, q + 128 * i);
            for (int j = 0; j < 128; ++j) q[128 * i + j] |= high[j] << 4;
        }
    }
    static void scales(const uint8_t* b, float* scales, float*) {
        const float d = half(b + 208);
        for (int j = 0; j < 16; ++j) scales[j] = d * static_cast<float>(static_cast<int8_t>(b[192 + j]));
    }
    static int value(uint8_t q) { return q - 32; }
};

// What 4 bits stand for in IQ4_NL and IQ4_XS.
inline constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
struct IQ4_NL : Quantised<32, 18, 32> {  // scale; nibbles
    static void integers(const uint8_t* b, uint8_t* q) { nibbles(b + 2, q); }
    static void scales(const uint8_t* b, float* scales, float*) { *scales = half(b); }
    static int value(uint8_t q) { return iq4_values[q]; }
};
struct IQ4_XS : Quantised<256, 136, 32> {  // scale; upper 2 bits of 8 scales; lower 4 bits of them; nibbles
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int j = 0; j < 8; ++j) nibbles(b + 8 + 16 * j, q + 32 * j);
    }
    static void scale_numbers(const uint8_t* b, int8_t* numbers) {
        const int high = b[2] | b[3] << 8;
        for (int j = 0; j < 8; ++j) {
            const int scale = (b[4 + j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4;
            numbers[j] = static_cast<int8_t>(scale - 32);
        }
    }
    static void scales(const uint8_t* b, float* scales, float*) {
        const float d = half(b);
        int8_t numbers[8];
        scale_numbers(b, numbers);
        for (int j = 0; j < 8; ++j) scales[j] = d * static_cast<float>(numbers[j]);
    }
    static int value(uint8_t q) { return iq4_values[q]; }
};

// IQ1, IQ2 and IQ3: groups of 8 or 4 weights are entries of a grid (grids.h). A scale is an odd multiple of the block's
// factor, whose float16 bits are factor(); numbers() has 4 bits for each group of scales().
template <class Block>
void odd_scales(const uint8_t* b, float* scales, float unit) {
    uint8_t numbers[Block::block / Block::group];
    Block::numbers(b, numbers);
    const float factor = to_float(f16{Block::factor(b)}) * unit;
    for (const uint8_t n : numbers) *scales++ = factor * static_cast<float>(2 * n + 1);
}
inline void low_and_high(const uint8_t* bytes, int count, uint8_t* numbers) {
    for (int i = 0; i < count; ++i) *numbers++ = bytes[i] & 15, *numbers++ = bytes[i] >> 4;
}

// Entries of IQ2 and IQ3 are magnitudes; a bit of `signs` for each, set where it is negative, becomes the highest one.
template <int bits, int size>
void with_signs(uint16_t entry, int signs, uint8_t* q) {
    for (int i = 0; i < size; ++i)
        q[i] = static_cast<uint8_t>((entry >> (bits * i) & ((1 << bits) - 1)) | (signs >> i & 1) << bits);
}
// The eighth sign, which XXS and XS leave out, makes the number of negative ones even.
inline int eight_signs(uint32_t seven) {
    seven &= 127;
    return static_cast<int>(seven | static_cast<uint32_t>(std::popcount(seven) & 1) << 7);
}

inline constexpr int8_t iq2_values[16] = {8, 25, 43, 0, -8, -25, -43, 0};
struct IQ2_XXS : Quantised<256, 66, 32> {  // factor; of each 32: 4 entries; 4 times 7 signs, and the number
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 32; ++i) {
            const uint8_t* const of_group = b + 2 + 8 * (i / 4);
            const uint32_t signs = number<uint32_t>(of_group + 4) >> (7 * (i % 4));
            with_signs<2, 8>(grids::iq2_xxs[of_group[i % 4]], eight_signs(signs), q + 8 * i);
        }
    }
    static uint16_t factor(const uint8_t* b) { return number<uint16_t>(b); }
    static void numbers(const uint8_t* b, uint8_t* n) {
        for (int i = 0; i < 8; ++i) n[i] = b[9 + 8 * i] >> 4;
    }
    static void scales(const uint8_t* b, float* scales, float*) { odd_scales<IQ2_XXS>(b, scales, 0.125f); }
    static int value(uint8_t q) { return iq2_values[q]; }
};
struct IQ2_XS : Quantised<256, 74, 16> {  // factor; 32 times 9 bits of an entry and 7 signs; numbers
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 32; ++i) {
            const int code = number<uint16_t>(b + 2 + 2 * i);
            with_signs<2, 8>(grids::iq2_xs[code & 511], eight_signs(code >> 9), q + 8 * i);
        }
    }
    static uint16_t factor(const uint8_t* b) { return number<uint16_t>(b); }
    static void numbers(const uint8_t* b, uint8_t* n) { low_and_high(b + 66, 8, n); }
    static void scales(const uint8_t* b, float* scales, float*) { odd_scales<IQ2_XS>(b, scales, 0.125f); }
    static int value(uint8_t q) { return iq2_values[q]; }
};
struct IQ2_S : Quantised<256, 82, 16> {  // factor; lower 8 bits of 32 entries; signs; upper 2 bits of them; numbers
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 32; ++i) {
            const int high = b[66 + i / 4] >> (2 * (i % 4)) & 3;
            with_signs<2, 8>(grids::iq2_s[b[2 + i] | high << 8], b[34 + i], q + 8 * i);
        }
    }
    static uint16_t factor(const uint8_t* b) { return number<uint16_t>(b); }
    static void numbers(const uint8_t* b, uint8_t* n) { low_and_high(b + 74, 8, n); }
    static void scales(const uint8_t* b, float* scales, float*) { odd_scales<IQ2_S>(b, scales, 0.125f); }
    static int value(uint8_t q) { return iq2_values[q]; }
};

inline constexpr int8_t iq3_xxs_values[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
struct IQ3_XXS : Quantised<256, 98, 32> {  // factor; 64 entries; of each 32: 4 times 7 signs, and the number
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 64; ++i) {
            const uint32_t signs = number<uint32_t>(b + 66 + 4 * (i / 8)) >> (7 * (i % 8 / 2));
            with_signs<3, 4>(grids::iq3_xxs[b[2 + i]], eight_signs(signs) >> (4 * (i % 2)), q + 4 * i);
        }
    }
    static uint16_t factor(const uint8_t* b) { return number<uint16_t>(b); }
    static void numbers(const uint8_t* b, uint8_t* n) {
        for (int i = 0; i < 8; ++i) n[i] = b[69 + 4 * i] >> 4;
    }
    static void scales(const uint8_t* b, float* scales, float*) { odd_scales<IQ3_XXS>(b, scales, 0.25f); }
    static int value(uint8_t q) { return iq3_xxs_values[q]; }
};
inline constexpr int8_t iq3_s_values[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
struct IQ3_S : Quantised<256, 110, 32> {  // factor; lower 8 bits of 64 entries; the ninth of each; signs; numbers
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 64; ++i) {
            const int high = b[66 + i / 8] >> (i % 8) & 1;
            with_signs<3, 4>(grids::iq3_s[b[2 + i] | high << 8], b[74 + i / 2] >> (4 * (i % 2)), q + 4 * i);
        }
    }
    static uint16_t factor(const uint8_t* b) { return number<uint16_t>(b); }
    static void numbers(const uint8_t* b, uint8_t* n) { low_and_high(b + 106, 4, n); }
    static void scales(const uint8_t* b, float* scales, float*) { odd_scales<IQ3_S>(b, scales, 1.0f); }
    static int value(uint8_t q) { return iq3_s_values[q]; }
};

// Entries of IQ1 are -1, 0 or 1, each plus 1, and all weights of a group are an eighth of the scale larger or smaller:
// smaller where the fourth bit of the number is set, so that the minimum is 9/8 and not 7/8 of the scale.
template <class Block>
void odd_scales_and_minima(const uint8_t* b, float* scales, float* minima) {
    uint8_t numbers[Block::block / Block::group];
    Block::numbers(b, numbers);
    const float factor = to_float(f16{Block::factor(b)});
    for (const uint8_t n : numbers) {
        *scales = factor * static_cast<float>(2 * (n & 7) + 1);
        *minima++ = *scales++ * (n & 8 ? 1.125f : 0.875f);
    }
}
inline void crumbs_of(uint16_t entry, uint8_t* q) {
    for (int i = 0; i < 8; ++i) q[i] = entry >> (2 * i) & 3;
}
struct IQ1_S : Quantised<256, 50, 32, true> {  // factor; lower 8 bits of entries; of each 32: 4 times 3 more; number
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 32; ++i) {
            const int high = number<uint16_t>(b + 34 + 2 * (i / 4)) >> (3 * (i % 4)) & 7;
            crumbs_of(grids::iq1[b[2 + i] | high << 8], q + 8 * i);
        }
    }
    static uint16_t factor(const uint8_t* b) { return number<uint16_t>(b); }
    static void numbers(const uint8_t* b, uint8_t* n) {
        for (int i = 0; i < 8; ++i) n[i] = b[35 + 2 * i] >> 4;
    }
    static void scales(const uint8_t* b, float* s, float* m) { odd_scales_and_minima<IQ1_S>(b, s, m); }
    static int value(uint8_t q) { return q; }
};
// Lower 8 bits of 32 entries; 3 more of each, and whether its weights are smaller; 4 times 4 scales of 3 bits, each of
// 16 weights, and 4 bits of the factor.
struct IQ1_M : Quantised<256, 56, 8, true> {
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 32; ++i) crumbs_of(grids::iq1[b[i] | (nibble(b, i) & 7) << 8], q + 8 * i);
    }
    static uint16_t factor(const uint8_t* b) {
        int bits = 0;
        for (int i = 0; i < 4; ++i) bits |= b[49 + 2 * i] >> 4 << (4 * i);
        return static_cast<uint16_t>(bits);
    }
    static void numbers(const uint8_t* b, uint8_t* n) {
        for (int i = 0; i < 32; ++i) {
            const int scale = number<uint16_t>(b + 48 + 2 * (i / 8)) >> (3 * (i / 2 % 4)) & 7;
            n[i] = static_cast<uint8_t>(scale | (nibble(b, i) & 8));
        }
    }
    static void scales(const uint8_t* b, float* s, float* m) { odd_scales_and_minima<IQ1_M>(b, s, m); }
    static int value(uint8_t q) { return q; }

private:
    static int nibble(const uint8_t* b, int i) { return b[32 + i / 2] >> (4 * (i % 2)); }
};

struct TQ1_0 : Quantised<256, 54, 256> {  // 5 digits a byte in 32 and 16 bytes, 4 in 4 bytes; scale; each plus 1
    // Digits of base 3: the byte is a fraction of 256, and each digit comes out on top when it is multiplied by 3.
    static void integers(const uint8_t* b, uint8_t* q) {
        const auto digits = [&](const uint8_t* bytes, int size, int count) {
            for (int n = 0, power = 1; n < count; ++n, power *= 3)
                for (int j = 0; j < size; ++j) *q++ = static_cast<uint8_t>(bytes[j] * power) * 3 >> 8;
        };
        digits(b, 32, 5);
        digits(b + 32, 16, 5);
        digits(b + 48, 4, 4);
    }
    static void scales(const uint8_t* b, float* scales, float*) { *scales = half(b + 52); }
    static int value(uint8_t q) { return q - 1; }
};
struct TQ2_0 : Quantised<256, 66, 256> {  // 2 bits each, plus 1; scale
    static void integers(const uint8_t* b, uint8_t* q) { crumbs(b, q), crumbs(b + 32, q + 128); }
    static void scales(const uint8_t* b, float* scales, float*) { *scales = half(b + 64); }
    static int value(uint8_t q) { return q - 1; }
};

// 4 bits with zero points, as AWQ and GPTQ have them: scale, float16; zero point, int8; nibbles of each 32. ggml has no
// such type.
template <int size>
struct Z4 : Quantised<size, size / 2 + 3, size, true> {
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < size / 32; ++i) nibbles(b + 3 + 16 * i, q + 32 * i);
    }
    static void scales(const uint8_t* b, float* scales, float* minima) {
        *scales = half(b), *minima = *scales * static_cast<float>(static_cast<int8_t>(b[2]));
    }
    static int value(uint8_t q) { return q; }
};
using Z4_32 = Z4<32>;
using Z4_64 = Z4<64>;
using Z4_128 = Z4<128>;

// e4m3 behind a scale, float32, as quantised safetensors have it. ggml has no such type.
template <int size>
struct F8 : Quantised<size, size + 4, size> {
    static void integers(const uint8_t* b, uint8_t* q) { std::memcpy(q, b + 4, size); }
    static void scales(const uint8_t* b, float* scales, float*) { std::memcpy(scales, b, 4); }
    static bool is_nan(uint8_t q) { return (q & 0x7f) == 0x7f; }
    static float value(uint8_t q) {
        if (is_nan(q)) return std::numeric_limits<float>::quiet_NaN();
        return std::bit_cast<float>((q & 0x80u) << 24 | (q & 0x7fu) << 20) * 0x1p120f;
    }
};
using F8_ROW = F8<32>;  // all of a row have the same scale
using F8_32 = F8<32>;
using F8_128 = F8<128>;

inline constexpr int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
struct MXFP4 : Quantised<32, 17, 32> {  // exponent of 2, plus 127; 4-bit floats (E2M1), here twice as large
    static void integers(const uint8_t* b, uint8_t* q) { nibbles(b + 1, q); }
    static void scales(const uint8_t* b, float* scales, float*) {
        const uint32_t e = b[0];  // 2 ** (e - 128), of which the two smallest are subnormal
        *scales = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
    static int value(uint8_t q) { return mxfp4_values[q]; }
};
struct NVFP4 : Quantised<64, 36, 16> {  // 4 scales, e4m3 without sign; nibbles of each 16: E2M1 as in MXFP4
    static void integers(const uint8_t* b, uint8_t* q) {
        for (int i = 0; i < 4; ++i) nibbles<16>(b + 4 + 8 * i, q + 16 * i);
    }
    static uint8_t scale_code(uint8_t code) { return code == 0x7f ? 0 : code; }  // as ggml has it: NaN is zero
    static void scales(const uint8_t* b, float* scales, float*) {
        for (int i = 0; i < 4; ++i)
            scales[i] = std::bit_cast<float>((scale_code(b[i]) & 0x7fu) << 20) * 0x1p119f;  // half of it
    }
    static int value(uint8_t q) { return mxfp4_values[q]; }
};
struct NVFP4_ROW : Quantised<64, 40, 16> {  // float32 scale, the same in all of a row; 4 scales as NVFP4's; nibbles
    static void integers(const uint8_t* b, uint8_t* q) { nibbles(b + 8, q), nibbles(b + 24, q + 32); }
    static void scales(const uint8_t* b, float* scales, float*) {
        NVFP4::scales(b + 4, scales, nullptr);
        for (int i = 0; i < 4; ++i) scales[i] *= number<float>(b);
    }
    static int value(uint8_t q) { return mxfp4_values[q]; }
};

}  // namespace infinilm::gguf::blocks
