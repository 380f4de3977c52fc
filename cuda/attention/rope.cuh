// The arithmetic of RoPE and where a key lies in the cache, shared by qk_norm_rope_store_kv and by the epilogue of
// linear_decode so that both give the same bits.
#pragma once

#include "cuda/core/device.cuh"

namespace infinilm::cuda {

// Turns the pair (x[i], x[i + rotary_dim / 2]). No fused multiply-add: the bits must not depend on how it is compiled.
__device__ __forceinline__ void rotate(float& first, float& second, float cosine, float sine) {
    const float a = first, b = second;
    first = __fadd_rn(__fmul_rn(a, cosine), -__fmul_rn(b, sine));
    second = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
}

// A head's row in [num_blocks, num_kv_heads, block_size], for slot = block * block_size + offset in the block.
__device__ __forceinline__ int64_t cache_row(int64_t slot, int kv_head, int num_kv_heads, int block_size) {
    const int64_t block = slot / block_size;
    return (block * num_kv_heads + kv_head) * block_size + slot % block_size;
}

}  // namespace infinilm::cuda
