// The blocks of GGUF files whose formats are planes of bits (plane_formats.cuh), as pack_blocks reads them: the code of
// a column of a block, and the scales of the 64 columns of a unit. Where they lie is what src/gguf/blocks.h has, for
// every type by itself.
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
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, uint32_t* words, int h) {
        store_six_bits(b, unit, words, h);
    }
};
struct StoredQ5_K {
    using Format = Q5_K;
    static __device__ __forceinline__ uint32_t code(const uint8_t* b, int column) {
        const uint32_t low = b[48 + column / 64 * 32 + column % 32] >> column / 32 % 2 * 4 & 15;
        return low | (b[16 + column % 32] >> column / 32 & 1) << 4;
    }
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, uint32_t* words, int h) {
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
    static __device__ __forceinline__ void store_scales(const uint8_t* b, int unit, uint32_t* words, int h) {
        const uint8_t* s = b + 192 + 4 * unit;
        words[h] = two_bytes(s) | two_bytes(s + 2) << 16;
        reinterpret_cast<uint16_t*>(words + 2)[h] = static_cast<uint16_t>(two_bytes(b + 208));
    }
};

// f(how the blocks of a format lie in files); false: they are no planes.
template <class Visit>
bool visit_stored_planes(WeightFormat format, Visit f) {
    switch (format) {
        case WeightFormat::q4_k: f(StoredQ4_K{}); return true;
        case WeightFormat::q5_k: f(StoredQ5_K{}); return true;
        case WeightFormat::q6_k: f(StoredQ6_K{}); return true;
        default: return false;
    }
}

}  // namespace infinilm::cuda
