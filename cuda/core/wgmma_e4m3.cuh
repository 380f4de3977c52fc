// wgmma of e4m3: d[64][N] += a[64][32] b[32][N], fp32 sums. A in registers has the fragment of mma_m16n8k32_e4m3, B
// lies K-major; bytes lie where numbers of 16 bits lie in pairs (wgmma.cuh, whose rules these are).
#pragma once

#include "cuda/core/wgmma.cuh"

namespace infinilm::cuda {

struct e4m3;  // what is multiplied, of two in 16 bits; in the emulator wgmma_emulated.h has it

#ifndef INFINILM_CUDA_EMULATOR

// clang-format off
// n: columns; r: accumulators (n / 2); p0..p5: the numbers r, r + 1, .. as strings.
#define INFINILM_WGMMA_E4M3(n, r, p0, p1, p2, p3, p4, p5)                                                            \
    template <> struct Wgmma<n, e4m3> {                                                                              \
        static __device__ __forceinline__ void multiply(float (&d)[r], const uint32_t (&a)[4], uint64_t b,           \
                                                        int accumulate) {                                            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p5 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" INFINILM_R##r                  \
                         "}, {" p0 ", " p1 ", " p2 ", " p3 "}, " p4 ", p, 1, 1;\n}\n"                                \
                         : INFINILM_O##r                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                     \
        }                                                                                                            \
    };

INFINILM_WGMMA_E4M3(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
INFINILM_WGMMA_E4M3(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
INFINILM_WGMMA_E4M3(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
// clang-format on

#endif  // INFINILM_CUDA_EMULATOR

}  // namespace infinilm::cuda
