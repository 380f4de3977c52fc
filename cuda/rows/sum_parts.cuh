// The sum over ranks, shared by sum_parts and by the one-shot all-reduce so that both give the same bits: in the order
// of the parts, in float32; the caller rounds.
#pragma once

#include "cuda/core/norm.cuh"

namespace infinilm::cuda {

// 8 neighbouring elements of each part, whose parts lie stride_bytes apart; 16-byte aligned.
template <class T>
__device__ __forceinline__ void sum_parts8(const uint8_t* first, int64_t stride_bytes, int num_parts,
                                           float (&total)[8]) {
    constexpr int kHeld = 16 / sizeof(T);  // parts in flight: 32 registers
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] = -0.0f;  // -0 + x is x, also for -0
    for (int begin = 0; begin < num_parts; begin += kHeld) {
        Vector<T> held[kHeld];
        const uint8_t* part = first + begin * stride_bytes;
#pragma unroll
        for (int h = 0; h < kHeld; ++h, part += stride_bytes)
            if (begin + h < num_parts) held[h].load(reinterpret_cast<const T*>(part));
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            if (begin + h >= num_parts) continue;
            float x[8];
            held[h].unpack(x);
#pragma unroll
            for (int j = 0; j < 8; ++j) total[j] = __fadd_rn(total[j], x[j]);
        }
    }
}

}  // namespace infinilm::cuda
