// The matrix tiles of AMX: eight registers of 16 rows of 64 bytes, and an instruction that adds to a float32 tile C the
// product of two bf16 tiles, A . B. Tiles 0 to 3 are C, 4 and 5 are A, 6 and 7 are B here:
//   A  [16 rows][32 k]                   a row-major matrix as it lies in memory
//   B  [16 pairs of k][columns][2 of k]  pair layout
//   C  [16 rows][columns]                float32
// `columns`, 1 to 16, is chosen for a whole share of work. The emulation gives the same bits, subnormals apart, which
// the instruction takes and leaves as zero. Source: Intel 64 and IA-32 Architectures Software Developer's Manual,
// TDPBF16PS.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int tile_rows = 16;  // also the most columns, and the pairs of k that one multiplication takes
constexpr int tile_row_bytes = 64;
constexpr int tile_bytes = tile_rows * tile_row_bytes;
constexpr int tile_step = 32;  // elements of k that one multiplication takes
constexpr int first_a = 4, first_b = 6;

// The tile registers of this thread, from construction to destruction: outside, the system has none to save when it
// switches threads. The statements have a memory clobber, which the intrinsics of gcc 12 lack: with those, the compiler
// may leave out the stores to memory that only a tile reads.
#if !INFINILM_EMULATED

class Tiles {
public:
    explicit Tiles(int columns) {
        struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config{};
        config.palette = 1;
        for (int t = 0; t < 8; ++t) {
            config.row_bytes[t] = (uint16_t)(t == first_a || t == first_a + 1 ? tile_row_bytes : 4 * columns);
            config.rows[t] = tile_rows;
        }
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int t>
    INFINILM_MEMBER void clear() {
        asm volatile("tilezero %%tmm%c0" : : "i"(t));
    }
    // stride: bytes from row to row
    template <int t>
    INFINILM_MEMBER void load(const void* p, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    INFINILM_MEMBER void store(void* p, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int c, int a, int b>
    INFINILM_MEMBER void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

#else

class Tiles {
public:
    explicit Tiles(int columns) : columns_(columns) {}

    template <int t>
    INFINILM_MEMBER void clear() {
        for (uvec& row : tiles_[t]) row = uvec{};
    }
    template <int t>
    INFINILM_MEMBER void load(const void* p, int64_t stride) {
        clear<t>();
        for (int r = 0; r < tile_rows; ++r) memcpy(&tiles_[t][r], (const char*)p + r * stride, row_bytes(t));
    }
    template <int t>
    INFINILM_MEMBER void store(void* p, int64_t stride) {
        for (int r = 0; r < tile_rows; ++r) memcpy((char*)p + r * stride, &tiles_[t][r], row_bytes(t));
    }
    // The products of even and of odd k are added up apart, each from zero, then together, then to C.
    template <int c, int a, int b>
    INFINILM_MEMBER void multiply_add() {
        for (int r = 0; r < tile_rows; ++r) {
            vec even{}, odd{};
            for (int pair = 0; pair < tile_rows; ++pair) {
                const uvec w = set1_uint(tiles_[a][r][pair]), x = tiles_[b][pair];
                even += as_float(w << 16) * as_float(x << 16);
                odd += as_float(w & 0xffff0000u) * as_float(x & 0xffff0000u);
            }
            tiles_[c][r] = as_uint(as_float(tiles_[c][r]) + (even + odd));
        }
    }

private:
    size_t row_bytes(int t) const { return t == first_a || t == first_a + 1 ? tile_row_bytes : 4 * (size_t)columns_; }
    uvec tiles_[8][tile_rows] = {};  // 16 lanes of 4 bytes are a row
    int columns_;
};

#endif

// ---- 16 x 16 elements of 4 bytes, one row per vector: rows become columns ----

// Exchanges the bit `bit` of the row's number with that of the column's.
template <int bit, int... lane>
INFINILM_INLINE void exchange(vec (&m)[tile_rows]) {
#pragma GCC unroll 16
    for (int row = 0; row < tile_rows; ++row) {
        if (row & bit) continue;
        const vec a = m[row], b = m[row + bit];
        m[row] = __builtin_shufflevector(a, b, (lane & bit ? 16 + lane - bit : lane)...);
        m[row + bit] = __builtin_shufflevector(a, b, (lane & bit ? 16 + lane : lane + bit)...);
    }
}
INFINILM_INLINE void transpose(vec (&m)[tile_rows]) {
    const auto exchange_bit = [&]<int bit>() __attribute__((always_inline)) {
        exchange<bit, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>(m);
    };
    exchange_bit.template operator()<8>();
    exchange_bit.template operator()<4>();
    exchange_bit.template operator()<2>();
    exchange_bit.template operator()<1>();
}

}  // namespace infinilm::cpu::INFINILM_ISA
