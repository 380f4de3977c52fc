// The matrix tiles of AMX: eight registers of up to 16 rows of 64 bytes, and instructions that add to a tile C the
// product of two others, A . B:
//               bf16, 32 k                                int8, 64 k, or half of them
//   A           [16 tokens][32 k]                         [16 tokens][64 k]
//   B           [16 pairs of k][16 outputs][2 of k]       [16 quads of k][16 outputs][4 of k]
//   C           [16 tokens][16 outputs] float32           the same in int32
// So B is what a panel has (pack.h). In memory the rows of B and C follow each other; those of A are `stride` apart.
// The emulation gives the same bits, subnormals apart, which the bf16 instruction takes and leaves as zero. Source:
// Intel 64 and IA-32 Architectures Software Developer's Manual, LDTILECFG, TDPBF16PS and TDPBSSD.
#pragma once

#include "cpu/kernels/int_dot.h"
#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int tile_rows = 16;
constexpr int tile_row_bytes = 64;
constexpr int tile_bytes = tile_rows * tile_row_bytes;
constexpr int tile_step = 32;  // bf16 k that one multiplication takes

// How many rows each tile has, and of how many bytes.
struct TileShapes {
    uint8_t rows[8];
    uint16_t row_bytes[8];
};
constexpr int first_a = 4, first_b = 6;  // bf16: four C, two A, two B
constexpr TileShapes bf16_shapes = {{16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}};
constexpr int int8_a = 4, int8_b = 5, half_a = 6, half_b = 7;  // int8: four C, A and B of 64 k, A and B of 32
constexpr TileShapes int8_shapes = {{16, 16, 16, 16, 16, 16, 16, 8}, {64, 64, 64, 64, 64, 64, 32, 64}};

// The tile registers of this thread, from construction to destruction: outside, the system has none to save when it
// switches threads. The statements have a memory clobber, which the intrinsics of gcc 12 lack: with those, the compiler
// may leave out the stores to memory that only a tile reads.
#if !INFINILM_EMULATED

class Tiles {
public:
    explicit Tiles(const TileShapes& shapes) {
        struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config{};
        config.palette = 1;
        for (int t = 0; t < 8; ++t) config.row_bytes[t] = shapes.row_bytes[t], config.rows[t] = shapes.rows[t];
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
    static INFINILM_MEMBER void load(const void* p, int64_t stride = tile_row_bytes) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    static INFINILM_MEMBER void store(void* p) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"((int64_t)tile_row_bytes), "i"(t) : "memory");
    }
    template <int c, int a, int b>
    static INFINILM_MEMBER void multiply_add_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
    template <int c, int a, int b>
    static INFINILM_MEMBER void multiply_add_int8() {  // both signed
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

#else

struct EmulatedTiles {
    TileShapes shapes;
    uvec rows[8][tile_rows];  // 16 lanes of 4 bytes are a row
};
inline thread_local EmulatedTiles emulated_tiles;  // one for all sources, whose copies of a function the linker merges

class Tiles {
public:
    explicit Tiles(const TileShapes& shapes) { emulated_tiles = {shapes, {}}; }
    ~Tiles() { emulated_tiles.shapes = {}; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int t>
    static INFINILM_MEMBER void clear() {
        for (uvec& row : emulated_tiles.rows[t]) row = uvec{};
    }
    template <int t>
    static INFINILM_MEMBER void load(const void* p, int64_t stride = tile_row_bytes) {
        clear<t>();
        for (int r = 0; r < emulated_tiles.shapes.rows[t]; ++r)
            memcpy(&emulated_tiles.rows[t][r], (const char*)p + r * stride, emulated_tiles.shapes.row_bytes[t]);
    }
    template <int t>
    static INFINILM_MEMBER void store(void* p) {
        memcpy(p, emulated_tiles.rows[t], tile_bytes);
    }
    // The products of even and of odd k are added up apart, each from zero, then together, then to C.
    template <int c, int a, int b>
    static INFINILM_MEMBER void multiply_add_bf16() {
        check<c, a, b>();
        for (int r = 0; r < tile_rows; ++r) {
            vec even{}, odd{};
            for (int pair = 0; pair < tile_rows; ++pair) {
                const uvec x = set1_uint(emulated_tiles.rows[a][r][pair]), w = emulated_tiles.rows[b][pair];
                even += as_float(x << 16) * as_float(w << 16);
                odd += as_float(x & 0xffff0000u) * as_float(w & 0xffff0000u);
            }
            uvec& sum = emulated_tiles.rows[c][r];
            sum = as_uint(as_float(sum) + (even + odd));
        }
    }
    template <int c, int a, int b>
    static INFINILM_MEMBER void multiply_add_int8() {
        check<c, a, b>();
        for (int r = 0; r < tile_rows; ++r)
            for (int quad = 0; quad < emulated_tiles.shapes.rows[b]; ++quad) {
                const ivec x = set1_int((int32_t)emulated_tiles.rows[a][r][quad]);
                const ivec w = (ivec)emulated_tiles.rows[b][quad];
                for (int j = 0; j < 4; ++j) emulated_tiles.rows[c][r] += (uvec)(byte_of(x, j) * byte_of(w, j));
            }
    }

private:
    // The instructions fault where shapes do not fit.
    template <int c, int a, int b>
    static INFINILM_MEMBER void check() {
        const TileShapes& shapes = emulated_tiles.shapes;
        if (shapes.rows[a] != shapes.rows[c] || shapes.row_bytes[b] != shapes.row_bytes[c] ||
            shapes.row_bytes[a] != 4 * shapes.rows[b] || shapes.rows[c] == 0)
            __builtin_trap();
    }
};

#endif

}  // namespace infinilm::cpu::INFINILM_ISA
