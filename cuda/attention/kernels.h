// The kernels of positions, of the cache and of attention. See core/types.h for what holds of all launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args/attention.h"
#include "cuda/core/types.h"

namespace infinilm::cuda {

// ---- positions and the cache -------------------------------------------------------------------------------------

struct RopeTableArgs {
    const int* positions;   // [num_tokens], or [num_axes, num_tokens]
    const float* inv_freq;  // [half]
    const int* axes;        // [half]: the axis of each frequency; null: there is one
    float* cos_sin;         // [num_tokens, 2 * half]: half cosines, then half sines; rows contiguous
    int num_tokens, half;
    float attention_factor;
    float scale_beta;  // see RopeTableParams in src/ops/backend.h
    int scale_positions, scale_offset;
};
cudaError_t rope_table(const RopeTableArgs&, cudaStream_t);

cudaError_t qk_norm_rope_store_kv(const QkNormRopeStoreArgs&, cudaStream_t);

// ---- the keys that attention reads -------------------------------------------------------------------------------

// head_dim is a multiple of 8. The queries of a token lie in shared memory: at most most_index_size elements.
cudaError_t choose_keys(const ChooseKeysArgs&, cudaStream_t);

// ---- attention ---------------------------------------------------------------------------------------------------

// Heads: head_dim is a multiple of 8, at most 256, 512 or 576. Norms of heads are float32.
//
// What is to be done, as ops/attention_work.h has it: the array of a step's lists, on the device, and where the items
// of this window lie in it.
struct AttentionWorkArgs {
    const int4* array;
    int decode_begin, num_decode;
    int prefill_begin, num_prefill;
    int row_floats;   // of a row of partial results
    void* workspace;  // aligned to 256; zero before the first use
    // [num_blocks, num_kv_heads, block_size, head_dim] of `type`: room for keys and values where the cache has 8 bits.
    // Where a value is the end of its key, v begins there.
    void *wide_k, *wide_v;
};
cudaError_t attention(const AttentionArgs&, const AttentionWorkArgs&, cudaStream_t);       // bf16, f16
cudaError_t attention_sm90(const AttentionArgs&, const AttentionWorkArgs&, cudaStream_t);  // the same on Hopper (wgmma)
// The same, whose warpgroups take turns at the tensor cores. Not measured, so that no step takes it: bench/gpu_kernels.
cudaError_t attention_sm90_in_turns(const AttentionArgs&, const AttentionWorkArgs&, cudaStream_t);
// qk_norm_rope_store_kv and attention of its q, in one kernel, where attention_stores_kv(): no sequence reads a key
// that another one writes here. q is not written.
bool attention_stores_kv(const QkNormRopeStoreArgs&, const AttentionArgs&, const AttentionWorkArgs&);
cudaError_t store_kv_and_attend(const QkNormRopeStoreArgs&, const AttentionArgs&, const AttentionWorkArgs&,
                                cudaStream_t);
cudaError_t attention_f32(const AttentionArgs&, cudaStream_t);  // Element::f32

}  // namespace infinilm::cuda
