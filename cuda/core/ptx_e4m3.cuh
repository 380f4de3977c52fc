// The instructions of ptx.cuh that linears of rounded inputs have alone: products of e4m3, and copies of their scales.
#pragma once

#include "cuda/core/ptx.cuh"

namespace infinilm::cuda {

// d[16][8] += a[16][32] b[32][8] of e4m3, fp32 sums. "mma.m16n8k32", .e4m3, from sm_89 on. In the lane with group g and
// t = 4 (lane % 4), a register is four neighbours in k: a[0] (g, t), a[1] (g + 8, t), a[2] (g, t + 16), a[3]
// (g + 8, t + 16); b[0] rows t .. t + 3 of column g, b[1] rows t + 16 ..; d as of mma_m16n8k16. Without the
// instruction, as in the emulator: by f16, which has all numbers of e4m3. That is also what ptxas makes of it for
// Hopper.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 890
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {  // bytes 0 and 2 of every register, then 1 and 3
        uint32_t rows[4], columns[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = e4m3_to_f16(a[i] >> 8 * odd);
#pragma unroll
        for (int i = 0; i < 2; ++i) columns[i] = e4m3_to_f16(b[i] >> 8 * odd);
        mma_m16n8k16<f16>(d, rows, columns);
    }
#endif
}

// cp_async_8 of 4 bytes, both 4-byte aligned.
__device__ __forceinline__ void cp_async_4(void* dst, const void* src, bool valid) {
#ifdef INFINILM_CUDA_EMULATOR
    emulated_alignment(dst, 4, "cp.async");
    if (valid) emulated_alignment(src, 4, "cp.async");
    emulator::shared_address(dst, "cp.async");
    auto* const to = static_cast<uint32_t*>(dst);
    const auto* const from = static_cast<const uint32_t*>(src);
    if (!emulator::eager()) {
        if (valid) static_cast<void>(*static_cast<const volatile uint32_t*>(from));
        *to = ~0u;
    }
    emulator::async_push([=] { *to = valid ? *from : 0; });
#else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(shared_u32(dst)), "l"(src),
                 "r"(valid ? 4 : 0)
                 : "memory");
#endif
}

}  // namespace infinilm::cuda
