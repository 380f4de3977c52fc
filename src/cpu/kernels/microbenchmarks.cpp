// The ceilings that `infinilm bench` and the kernel benchmarks measure in the same run as what they compare with them.
#include "cpu/kernels/functions.h"
#if INFINILM_TILES
#include "cpu/kernels/tile.h"
#endif

namespace infinilm::cpu::INFINILM_ISA {

// Four streams, as many accumulators each as hide the latency of the add; whole cache lines, what is left over unread.
uint64_t read_memory(const void* data, size_t bytes) {
    constexpr int streams = 4, per_line = 64 / sizeof(uvec) > 0 ? 64 / sizeof(uvec) : 1;
    typedef uint32_t uvec_mem __attribute__((vector_size(4 * INFINILM_WIDTH), aligned(1), may_alias));
    const size_t lines = bytes / 64 / streams;
    const char* p[streams];
    for (int i = 0; i < streams; ++i) p[i] = (const char*)data + (size_t)i * lines * 64;
    uvec sum[streams][per_line] = {};
    for (size_t line = 0; line < lines; ++line)
#pragma GCC unroll 4
        for (int i = 0; i < streams; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < per_line; ++j)
                sum[i][j] += *(const uvec_mem*)(p[i] + line * 64 + (size_t)j * sizeof(uvec));
    uint64_t checksum = 0;
    for (int i = 0; i < streams; ++i)
        for (int j = 0; j < per_line; ++j)
            for (int lane = 0; lane < width; ++lane) checksum += sum[i][j][lane];
    return checksum;
}

#if INFINILM_TILES
// The four C tiles that the linear has, from A and B tiles of zeros.
static double tile_flops(int64_t iterations) {
    const Tiles tiles(bf16_shapes);
    for (int64_t n = 0; n < iterations; ++n) {
        tiles.multiply_add_bf16<0, first_a, first_b>();
        tiles.multiply_add_bf16<1, first_a + 1, first_b>();
        tiles.multiply_add_bf16<2, first_a, first_b + 1>();
        tiles.multiply_add_bf16<3, first_a + 1, first_b + 1>();
    }
    return 4 * 2.0 * tile_rows * tile_rows * tile_step * (double)iterations;
}
#endif

// As many independent accumulators as the registers hold, which is more than latency x issue rate on every machine. The
// operands pass through an empty asm, so that nothing can be folded; they keep the sums finite.
double dot_flops(int64_t iterations, bool multiply_bf16) {
#if INFINILM_TILES
    if (multiply_bf16) return tile_flops(iterations);
#endif
    constexpr int accumulators = width == 16 ? 24 : 12;
    vec acc[accumulators];
    for (int i = 0; i < accumulators; ++i) acc[i] = set1((float)i);
    double flops_per_dot = 2.0 * width;
#if INFINILM_BF16_DOT
    if (multiply_bf16) {
        flops_per_dot = 4.0 * width;
        dvec a{}, b{};
        asm volatile("" : "+m"(a), "+m"(b));
        for (int64_t n = 0; n < iterations; ++n)
#pragma GCC unroll 24
            for (int i = 0; i < accumulators; ++i) acc[i] = dot(acc[i], a, b);
    }
#endif
    if (!multiply_bf16 || !INFINILM_BF16_DOT) {
        vec a = set1(0.5f), b = set1(1.0f);
        asm volatile("" : "+m"(a), "+m"(b));
        for (int64_t n = 0; n < iterations; ++n)
#pragma GCC unroll 24
            for (int i = 0; i < accumulators; ++i) acc[i] = fma(acc[i], a, b);
    }
    vec sum = zero();
    for (int i = 0; i < accumulators; ++i) sum += acc[i];
    volatile float kept = reduce_add(sum);
    (void)kept;
    return flops_per_dot * accumulators * (double)iterations;
}

}  // namespace infinilm::cpu::INFINILM_ISA
