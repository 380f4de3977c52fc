// One block of each type as numbers: the formulas of ggml's block formats, one struct each. `bytes` of the block come
// as they lie in the file, float16 and float32 little-endian and of any alignment; `block` float32 go out.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace infinilm::gguf::blocks {

inline float half(const uint8_t* p) {
    f16 value;
    std::memcpy(&value.bits, p, sizeof value.bits);
    return to_float(value);
}

// Pairs of 4 bits: byte j has element j in its low half and element j + 16 in its high one. f(element, 4 bits)
template <class F>
inline void for_nibbles(const uint8_t* q, F f) {
    for (int j = 0; j < 16; ++j) f(j, q[j] & 15), f(j + 16, q[j] >> 4);
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

struct Q8_0 {  // scale; 32 int8
    static constexpr int block = 32, bytes = 34;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(b[2 + i]));
    }
};
struct Q4_0 {  // scale; nibbles, each plus 8
    static constexpr int block = 32, bytes = 18;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b);
        for_nibbles(b + 2, [&](int i, int q) { out[i] = d * static_cast<float>(q - 8); });
    }
};
struct Q4_1 {  // scale, minimum; nibbles
    static constexpr int block = 32, bytes = 20;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b), m = half(b + 2);
        for_nibbles(b + 4, [&](int i, int q) { out[i] = d * static_cast<float>(q) + m; });
    }
};
inline int fifth_bit(const uint8_t* bits, int i) { return (bits[i / 8] >> (i % 8) & 1) << 4; }
struct Q5_0 {  // scale; the fifth bit of each; nibbles; each plus 16
    static constexpr int block = 32, bytes = 22;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b);
        for_nibbles(b + 6, [&](int i, int q) { out[i] = d * static_cast<float>((q | fifth_bit(b + 2, i)) - 16); });
    }
};
struct Q5_1 {  // scale, minimum; the fifth bit of each; nibbles
    static constexpr int block = 32, bytes = 24;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b), m = half(b + 2);
        for_nibbles(b + 8, [&](int i, int q) { out[i] = d * static_cast<float>(q | fifth_bit(b + 4, i)) + m; });
    }
};

struct Q2_K {  // 16 pairs of 4 bits (scale, minimum); 2 bits each; scales of both
    static constexpr int block = 256, bytes = 84;
    static void read(const uint8_t* b, float* out) {
        const uint8_t *scales = b, *q = b + 16;
        const float d = half(b + 80), dmin = half(b + 82);
        for (int i = 0; i < 256; ++i) {
            const int bits = q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            const uint8_t scale = scales[i / 16];
            out[i] =
                d * static_cast<float>(scale & 15) * static_cast<float>(bits) - dmin * static_cast<float>(scale >> 4);
        }
    }
};
struct Q3_K {  // the third bit of each, as "not minus 4"; 2 bits each; 16 scales of 6 bits; scale
    static constexpr int block = 256, bytes = 110;
    static void read(const uint8_t* b, float* out) {
        const uint8_t *high = b, *q = b + 32, *packed = b + 96;
        const float d = half(b + 108);
        float scales[16];
        for (int s = 0; s < 16; ++s) {
            const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
            scales[s] = d * static_cast<float>((low | (packed[8 + s % 4] >> (s / 4 * 2) & 3) << 4) - 32);
        }
        for (int i = 0; i < 256; ++i) {
            const int bits = q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            const int minus = high[i % 32] >> (i / 32) & 1 ? 0 : 4;
            out[i] = scales[i / 16] * static_cast<float>(bits - minus);
        }
    }
};

// The scales of Q4_K and Q5_K, 8 pairs of 6 bits in 12 bytes: the upper 2 bits of the last four are in the first eight.
struct ScaleAndMin {
    int scale, min;
};
inline ScaleAndMin scale_and_min(const uint8_t* s, int j) {
    if (j < 4) return {s[j] & 63, s[j + 4] & 63};
    return {(s[j + 4] & 15) | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4};
}
struct Q4_K {  // scales of both; 8 pairs (scale, minimum) of 6 bits; nibbles: low halves of 32 bytes, then high ones
    static constexpr int block = 256, bytes = 144;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b), dmin = half(b + 2);
        for (int j = 0; j < 8; ++j) {
            const auto [scale, min] = scale_and_min(b + 4, j);
            const float factor = d * static_cast<float>(scale), least = dmin * static_cast<float>(min);
            const uint8_t* q = b + 16 + j / 2 * 32;
            for (int l = 0; l < 32; ++l)
                out[j * 32 + l] = factor * static_cast<float>(q[l] >> (j % 2 * 4) & 15) - least;
        }
    }
};
struct Q5_K {  // as Q4_K, with the fifth bit of each before the nibbles: bit j of byte l
    static constexpr int block = 256, bytes = 176;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b), dmin = half(b + 2);
        for (int j = 0; j < 8; ++j) {
            const auto [scale, min] = scale_and_min(b + 4, j);
            const float factor = d * static_cast<float>(scale), least = dmin * static_cast<float>(min);
            const uint8_t *high = b + 16, *q = b + 48 + j / 2 * 32;
            for (int l = 0; l < 32; ++l)
                out[j * 32 + l] =
                    factor * static_cast<float>((q[l] >> (j % 2 * 4) & 15) | (high[l] >> j & 1) << 4) - least;
        }
    }
};
struct Q6_K {  // lower 4 bits of each; upper 2 bits of each; 16 int8 scales; scale; each plus 32
    static constexpr int block = 256, bytes = 210;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b + 208);
        for (int k = 0; k < 8; ++k) {  // 32 elements
            const uint8_t *low = b + k / 4 * 64 + k % 2 * 32, *high = b + 128 + k / 4 * 32;
            for (int l = 0; l < 32; ++l) {
                const int q = (low[l] >> (k % 4 / 2 * 4) & 15) | (high[l] >> (k % 4 * 2) & 3) << 4;
                const auto scale = static_cast<int8_t>(b[192 + k * 2 + l / 16]);
                out[k * 32 + l] = d * static_cast<float>(scale) * static_cast<float>(q - 32);
            }
        }
    }
};

// What 4 bits stand for in IQ4_NL and IQ4_XS.
inline constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
struct IQ4_NL {  // scale; nibbles
    static constexpr int block = 32, bytes = 18;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b);
        for_nibbles(b + 2, [&](int i, int q) { out[i] = d * static_cast<float>(iq4_values[q]); });
    }
};
struct IQ4_XS {  // scale; upper 2 bits of 8 scales; lower 4 bits of them; nibbles
    static constexpr int block = 256, bytes = 136;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b);
        const int high = b[2] | b[3] << 8;
        for (int j = 0; j < 8; ++j) {
            const int scale = (b[4 + j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4;
            const float factor = d * static_cast<float>(scale - 32);
            for_nibbles(b + 8 + 16 * j,
                        [&](int i, int q) { out[32 * j + i] = factor * static_cast<float>(iq4_values[q]); });
        }
    }
};

// Digits of base 3, minus 1: the byte is a fraction of 256, and each digit comes out on top when it is multiplied by 3.
inline int ternary(uint8_t byte, int power) { return (static_cast<uint8_t>(byte * power) * 3 >> 8) - 1; }
struct TQ1_0 {  // 5 digits a byte in 32 and 16 bytes, 4 in 4 bytes; scale
    static constexpr int block = 256, bytes = 54;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b + 52);
        const auto digits = [&](const uint8_t* q, int size, int count) {
            for (int n = 0, power = 1; n < count; ++n, power *= 3)
                for (int j = 0; j < size; ++j) *out++ = d * static_cast<float>(ternary(q[j], power));
        };
        digits(b, 32, 5);
        digits(b + 32, 16, 5);
        digits(b + 48, 4, 4);
    }
};
struct TQ2_0 {  // 2 bits each, plus 1; scale
    static constexpr int block = 256, bytes = 66;
    static void read(const uint8_t* b, float* out) {
        const float d = half(b + 64);
        for (int i = 0; i < 256; ++i)
            out[i] = d * static_cast<float>((b[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) - 1);
    }
};

struct MXFP4 {  // exponent of 2, plus 127; 4-bit floats (E2M1), here twice as large
    static constexpr int block = 32, bytes = 17;
    static void read(const uint8_t* b, float* out) {
        static constexpr int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        const uint32_t e = b[0];  // 2 ** (e - 128), of which the two smallest are subnormal
        const float scale = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        for_nibbles(b + 1, [&](int i, int q) { out[i] = scale * static_cast<float>(values[q]); });
    }
};

}  // namespace infinilm::gguf::blocks
