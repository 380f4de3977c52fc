// The matrix tiles of AMX: eight registers of 16 rows of 64 bytes, and an instruction that adds to a float32 tile C the
// product of two bf16 tiles, A . B. Tiles 0 to 3 are C, 4 and 5 are A, 6 and 7 are B here:
//   A  [16 tokens][32 k]
//   B  [16 pairs of k][16 outputs][2 of k]   as a panel has them (pack.h)
//   C  [16 tokens][16 outputs]               float32
// Tiles in memory are contiguous. The emulation gives the same bits, subnormals apart, which the instruction takes and
// leaves as zero. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int tile_rows = 16;
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
    Tiles() {
        struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config{};
        config.palette = 1;
        for (int t = 0; t < 8; ++t) config.row_bytes[t] = tile_row_bytes, config.rows[t] = tile_rows;
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int t>
    static INFINILM_MEMBER void clear() {
        asm volatile("tilezero %%tmm%c0" : : "i"(t));
    }
    template <int t>
    static INFINILM_MEMBER void load(const void* p) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"((int64_t)tile_row_bytes), "i"(t) : "memory");
    }
    template <int t>
    static INFINILM_MEMBER void store(void* p) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"((int64_t)tile_row_bytes), "i"(t) : "memory");
    }
    template <int c, int a, int b>
    static INFINILM_MEMBER void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

#else

static thread_local uvec emulated_tiles[8][tile_rows];  // 16 lanes of 4 bytes are a row

class Tiles {
public:
    Tiles() {}
    ~Tiles() {}

    template <int t>
    static INFINILM_MEMBER void clear() {
        for (uvec& row : emulated_tiles[t]) row = uvec{};
    }
    template <int t>
    static INFINILM_MEMBER void load(const void* p) {
        memcpy(emulated_tiles[t], p, tile_bytes);
    }
    template <int t>
    static INFINILM_MEMBER void store(void* p) {
        memcpy(p, emulated_tiles[t], tile_bytes);
    }
    // The products of even and of odd k are added up apart, each from zero, then together, then to C.
    template <int c, int a, int b>
    static INFINILM_MEMBER void multiply_add() {
        for (int r = 0; r < tile_rows; ++r) {
            vec even{}, odd{};
            for (int pair = 0; pair < tile_rows; ++pair) {
                const uvec x = set1_uint(emulated_tiles[a][r][pair]), w = emulated_tiles[b][pair];
                even += as_float(x << 16) * as_float(w << 16);
                odd += as_float(x & 0xffff0000u) * as_float(w & 0xffff0000u);
            }
            emulated_tiles[c][r] = as_uint(as_float(emulated_tiles[c][r]) + (even + odd));
        }
    }
};

#endif

}  // namespace infinilm::cpu::INFINILM_ISA
