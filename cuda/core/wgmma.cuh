// wgmma: d[64][N] += a[64][16] b[16][N] by the four warps of a warpgroup, asynchronously. A from registers or from
// shared memory, B always from shared memory, bf16 or f16, fp32 sums. Included by ptx_sm90.cuh. Source: PTX ISA
// "Asynchronous Warpgroup Level Matrix Instructions"; descriptors as tabulated in its "Shared Memory Matrix Layout".
//
//   wgmma_fence();                                 // registers and shared memory written so far are ready
//   for (k..) Wgmma<N, T>::multiply(d, a, b, accumulate);
//   wgmma_commit();  wgmma_wait<0>();              // d, and a of registers, must not be touched before
//
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15: d[4 j + 2 h + c] is row lane / 4 + 8 h of them, column
// 8 j + 2 (lane % 4) + c; A in registers has the fragment of mma_m16n8k16.
#pragma once

#include "cuda/core/ptx.cuh"

namespace infinilm::cuda {

// How an operand lies in shared memory. K-major: neighbours along k are neighbours in memory (row-major A, row-major
// B^T); MN-major the other way. `leading` and `stride` are distances in bytes:
//                          leading                                      stride
//   K-major,  none         between the two 8-element (16-byte) halves   between groups of 8 rows
//                          of k; a group of 8 rows is 128 bytes
//   K-major,  swizzle_128  (unused)                                     between groups of 8 rows of 128 bytes
//   MN-major, none         between the two groups of 8 k; a group of    between groups of 8 rows (or columns)
//                          8 k is 8 pieces of 16 bytes
//   MN-major, swizzle_128  between groups of 64 rows (or columns)       between groups of 8 k of 128 bytes
// swizzle_128: start 1024-byte aligned, plus 32 bytes for each step of 16 along k (K-major).
enum class Layout : uint64_t { none = 0, swizzle_128 = 1 };

__device__ __forceinline__ uint64_t matrix_descriptor(const void* start, uint32_t leading_bytes, uint32_t stride_bytes,
                                                      Layout layout) {
    return static_cast<uint64_t>((shared_u32(start) & 0x3ffff) >> 4) |
           static_cast<uint64_t>((leading_bytes & 0x3ffff) >> 4) << 16 |
           static_cast<uint64_t>((stride_bytes & 0x3ffff) >> 4) << 32 | static_cast<uint64_t>(layout) << 62;
}
// The usual tile: K-major rows of 64 elements as tensor_load_2d writes them with swizzle_128.
__device__ __forceinline__ uint64_t matrix_descriptor_128(const void* start) {
    return matrix_descriptor(start, 16, 1024, Layout::swizzle_128);
}

}  // namespace infinilm::cuda

#ifdef INFINILM_CUDA_EMULATOR
#include "cuda/core/wgmma_emulated.h"
#else

namespace infinilm::cuda {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that a wgmma reads or writes: the compiler moves no other access to them past this. It stands before
// wgmma_fence() for earlier writes, and after wgmma_wait() for later reads.
template <int kCount>
__device__ __forceinline__ void wgmma_hold(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// multiply(d, descriptor or fragment of A, descriptor of B, accumulate): with accumulate 0, d need not be set before.
// kMnMajorB: B lies MN-major (V of attention); A is K-major. The columns that kernels use: others are to be added.
template <int N, class T>
struct Wgmma;

// The operand lists, made from pieces: numbers in inline PTX must be literals.
// clang-format off
#define INFINILM_R4 "%0, %1, %2, %3"
#define INFINILM_R8 INFINILM_R4 ", %4, %5, %6, %7"
#define INFINILM_R12 INFINILM_R8 ", %8, %9, %10, %11"
#define INFINILM_R16 INFINILM_R12 ", %12, %13, %14, %15"
#define INFINILM_R24 INFINILM_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define INFINILM_R32 INFINILM_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define INFINILM_R36 INFINILM_R32 ", %32, %33, %34, %35"
#define INFINILM_R40 INFINILM_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define INFINILM_R48 INFINILM_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define INFINILM_R64 INFINILM_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define INFINILM_R80 INFINILM_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define INFINILM_R88 INFINILM_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define INFINILM_R96 INFINILM_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define INFINILM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INFINILM_D8(i) INFINILM_D4(i), INFINILM_D4(i + 4)
#define INFINILM_D16(i) INFINILM_D8(i), INFINILM_D8(i + 8)
#define INFINILM_D32(i) INFINILM_D16(i), INFINILM_D16(i + 16)
#define INFINILM_O16 INFINILM_D16(0)
#define INFINILM_O32 INFINILM_D32(0)
#define INFINILM_O36 INFINILM_D32(0), INFINILM_D4(32)
#define INFINILM_O64 INFINILM_D32(0), INFINILM_D32(32)
#define INFINILM_O88 INFINILM_O64, INFINILM_D16(64), INFINILM_D8(80)
#define INFINILM_O96 INFINILM_O64, INFINILM_D32(64)

// n: columns; r: accumulators (n / 2); p0..p7: the numbers r, r + 1, .. as strings.
#define INFINILM_WGMMA(n, r, type, name, p0, p1, p2, p3, p4, p5, p6, p7)                                             \
    template <> struct Wgmma<n, type> {                                                                              \
        template <bool kMnMajorB = false>                                                                            \
        static __device__ __forceinline__ void multiply(float (&d)[r], uint64_t a, uint64_t b, int accumulate) {     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p2 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name " {" INFINILM_R##r "}, " p0 \
                         ", " p1 ", p, 1, 1, 0, " p3 ";\n}\n"                                                        \
                         : INFINILM_O##r                                                                             \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(int(kMnMajorB)));                                    \
        }                                                                                                            \
        template <bool kMnMajorB = false>                                                                            \
        static __device__ __forceinline__ void multiply(float (&d)[r], const uint32_t (&a)[4], uint64_t b,           \
                                                        int accumulate) {                                            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p5 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name " {" INFINILM_R##r          \
                         "}, {" p0 ", " p1 ", " p2 ", " p3 "}, " p4 ", p, 1, 1, " p6 ";\n}\n"                        \
                         : INFINILM_O##r                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int(kMnMajorB))); \
        }                                                                                                            \
    };
#define INFINILM_WGMMA_BOTH(n, r, ...)               \
    INFINILM_WGMMA(n, r, bf16, "bf16", __VA_ARGS__)  \
    INFINILM_WGMMA(n, r, f16, "f16", __VA_ARGS__)

INFINILM_WGMMA_BOTH(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")
INFINILM_WGMMA_BOTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
INFINILM_WGMMA_BOTH(72, 36, "%36", "%37", "%38", "%39", "%40", "%41", "%42", "%43")
INFINILM_WGMMA_BOTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
INFINILM_WGMMA_BOTH(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95")
INFINILM_WGMMA_BOTH(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103")
// clang-format on

}  // namespace infinilm::cuda

#endif  // INFINILM_CUDA_EMULATOR
