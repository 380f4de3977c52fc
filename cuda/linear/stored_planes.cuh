// The blocks of GGUF files whose codes become planes of bits (plane_formats.cuh), as pack_blocks reads them: the code
// of a column of a block, and the scales of the 64 columns of a unit. Where they lie is what src/gguf/blocks.h has, for
// every type by itself. A unit has two blocks of 32 columns, or at the end of a row one; `groups` counts 32 columns.
#pragma once

#include "cuda/linear/weight_formats.cuh"

namespace infinilm::cuda {

__device__ __forceinline__ uint32_t two_bytes(const uint8_t* b) { return b[0] | b[1] << 8; }

// Scales and minima of 6 bits: of the last four of eight the upper 2 bits are those of the first eight bytes.
__device__ __forceinline__ uint32_t six_bit_scale(const uint8_t* s, int j) {
    return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
}
__device__ __forceinline__ uint32_t six_bit_minimum(const uint8_t* s, int j) {
    return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
}
// The words of a row as ByteMinima32 has them. b: float16 scale of scales and of minima, then 12 bytes of both.
__device__ __forceinline__ void store_six_bits(const uint8_t* b, int unit, uint32_t* words, int h) {
    const uint8_t* s = b + 4;
    const int j = 2 * unit;
    words[h] = six_bit_scale(s, j) | six_bit_scale(s, j + 1) << 8 | six_bit_minimum(s, j) << 16 |
               six_bit_minimum(s, j + 1) << 24;
    words[2 + h] = two_bytes(b) | two_bytes(b + 2) << 16;
}

struct StoredQ4_K {
    using Format = Q4_K;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        return b[16 + column / 64 * 32 + column % 32] >> column / 32 % 2 * 4 & 15;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, int, uint32_t* words, int h) {
        store_six_bits(b, unit, words, h);
    }
};
struct StoredQ5_K {
    using Format = Q5_K;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        const uint32_t low = b[48 + column / 64 * 32 + column % 32] >> column / 32 % 2 * 4 & 15;
        return low | (b[16 + column % 32] >> column / 32 & 1) << 4;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, int, uint32_t* words, int h) {
        store_six_bits(b, unit, words, h);
    }
};
struct StoredQ6_K {
    using Format = Q6_K;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        const int half = column / 128, at = column % 128;
        const uint32_t low = b[64 * half + at % 64] >> at / 64 * 4 & 15;
        return low | (b[128 + 32 * half + at % 32] >> at / 32 * 2 & 3) << 4;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, int, uint32_t* words, int h) {
        const uint8_t* s = b + 192 + 4 * unit;
        words[h] = two_bytes(s) | two_bytes(s + 2) << 16;
        reinterpret_cast<uint16_t*>(words + 2)[h] = static_cast<uint16_t>(two_bytes(b + 208));
    }
};

struct StoredQ2_K {
    using Format = Q2_K;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        return b[16 + column / 128 * 32 + column % 32] >> column % 128 / 32 * 2 & 3;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, int, uint32_t* words, int h) {
        const uint8_t* s = b + 4 * unit;
        words[h] = two_bytes(s) | two_bytes(s + 2) << 16;
        words[2 + h] = two_bytes(b + 80) | two_bytes(b + 82) << 16;
    }
};
struct StoredQ3_K {
    using Format = Q3_K;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        const uint32_t low = b[32 + column / 128 * 32 + column % 32] >> column % 128 / 32 * 2 & 3;
        return low | (b[column % 32] >> column / 32 & 1) << 2;
    }
    // The lower 4 bits of 16 scales lie two in a byte, behind them the upper 2, four in a byte; scales count from 32.
    static __device__ __forceinline__ uint32_t scale(const uint8_t* b, int j) {
        const uint32_t low = b[96 + j % 8] >> j / 8 * 4 & 15, high = b[104 + j % 4] >> j / 4 * 2 & 3;
        return (low | high << 4) - 32 & 255;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, int, uint32_t* words, int h) {
        words[h] = 0;
        for (int i = 0; i < 4; ++i) words[h] |= scale(b, 4 * unit + i) << 8 * i;
        reinterpret_cast<uint16_t*>(words + 2)[h] = static_cast<uint16_t>(two_bytes(b + 108));
    }
};
// Blocks of 32 columns: a float16 scale, what is added, the fifth bits if there are some, and 4 bits of columns j and
// j + 16 in byte j.
template <class F>
struct StoredHalves {
    using Format = F;
    static constexpr int kHighBytes = F::kBits == 5 ? 4 : 0, kBytes = 20 + kHighBytes;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        const uint8_t* of_block = b + column / 32 * kBytes;
        const uint32_t low = of_block[4 + kHighBytes + column % 16] >> column % 32 / 16 * 4 & 15;
        return kHighBytes == 0 ? low : low | (of_block[4 + column % 32 / 8] >> column % 8 & 1) << 4;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int, int groups, uint32_t* words, int h) {
        for (int g = 0; g < groups; ++g, b += kBytes) words[2 * h + g] = two_bytes(b) | two_bytes(b + 2) << 16;
    }
};
// Whether the last unit of a row may have one group of 32 columns.
template <class Stored>
constexpr bool may_end_in_half = false;
template <class F>
constexpr bool may_end_in_half<StoredHalves<F>> = true;

struct StoredNvfp4 {
    using Format = Nvfp4;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        return b[4 + column / 16 * 8 + column % 8] >> column % 16 / 8 * 4 & 15;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int, int, uint32_t* words, int h) {
        words[h] = 0;
        for (int i = 0; i < 4; ++i) words[h] |= (b[i] == 0x7f ? 0u : b[i] & 0x7fu) << 8 * i;  // as NVFP4 of blocks.h
    }
    static __device__ __forceinline__ float row_scale(const uint8_t*) { return 1.0f; }
};
// The same lies behind a float32 scale here, with codes as Q4_0 has them.
struct StoredNvfp4Row {
    using Format = Nvfp4;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        return b[8 + column / 32 * 16 + column % 16] >> column % 32 / 16 * 4 & 15;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int, int, uint32_t* words, int h) {
        StoredNvfp4::store_scales(b + 4, 0, 2, words, h);
    }
    static __device__ __forceinline__ float row_scale(const uint8_t* b) {
        return bits_to_float(two_bytes(b) | two_bytes(b + 2) << 16);
    }
};

// f(how the blocks of a type lie in files); false: they are no planes.
template <class Visit>
bool visit_stored_planes(const BlockType& type, Visit f) {
    if (type.scale == BlockScale::f32_e4m3) {
        f(StoredNvfp4Row{});
        return true;
    }
    switch (type.format) {
        case WeightFormat::q4_k: f(StoredQ4_K{}); return true;
        case WeightFormat::q5_k: f(StoredQ5_K{}); return true;
        case WeightFormat::q6_k: f(StoredQ6_K{}); return true;
        case WeightFormat::q2_k: f(StoredQ2_K{}); return true;
        case WeightFormat::q3_k: f(StoredQ3_K{}); return true;
        case WeightFormat::q4_1: f(StoredHalves<Q4_1>{}); return true;
        case WeightFormat::q5_1: f(StoredHalves<Q5_1>{}); return true;
        case WeightFormat::nvfp4: f(StoredNvfp4{}); return true;
        default: return false;
    }
}

}  // namespace infinilm::cuda
