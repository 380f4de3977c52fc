// Arguments of kernels of positions, of the cache and of attention. See args/rows.h for what holds of all structs of
// this folder.
#pragma once

#include <stdint.h>

#include "args/element.h"

namespace infinilm {

// Where keys and values go, and how q and k are turned first.
struct RopeStoreArgs {
    const float* cos_sin;         // [num_tokens, rotary_dim], or null: k is not turned
    const float* q_cos_sin;       // the same of q
    const void* q_norm;           // [head_dim] or null
    const void* k_norm;           // [head_dim] or null
    const void* v_norm;           // [head_dim] or null
    const int64_t* slot_mapping;  // [num_tokens]: block * block_size + offset, or -1 to store nothing; or null
    void* k_cache;                // [num_blocks, num_kv_heads, block_size, head_dim] of cache_type
    void* v_cache;                // the same, or null: there is no v; a value fills the beginning of its row
    const void* q_turned;         // what is turned into the beginning of each head of q; or null: that itself
    int64_t q_turned_stride, q_turned_head_stride;  // of tokens, and of heads
    int num_heads, num_kv_heads, head_dim, value_dim, rotary_dim, block_size;
    float eps;
    float *k_scales, *v_scales;  // [num_blocks, num_kv_heads, block_size] where rows have scales, or null
    Element cache_type;
};

// In place in qkv; then k and v go to the cache.
struct QkNormRopeStoreArgs {
    void* qkv;  // [num_tokens, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim] T; without v where
                // there is no v_cache
    int64_t qkv_stride;
    int num_tokens;
    RopeStoreArgs rope;
    Element type;
};

// See AttentionParams in ops/backend.h. v_cache may lie in k_cache, behind the beginning of the first key: then a value
// is so many elements at the end of its key, and else at the beginning of its own row.
struct AttentionArgs {
    const void* q;                  // [num_tokens, num_heads, head_dim] T, tokens q_stride elements apart
    const void *k_cache, *v_cache;  // [num_blocks, num_kv_heads, block_size, head_dim] of cache_type
    const int32_t* block_table;     // [num_seqs, ..], rows block_table_stride apart
    const int32_t* cu_seqlens_q;    // [num_seqs + 1]
    const int32_t* context_lens;    // [num_seqs]
    const float* sinks;             // [num_heads] or null
    const int32_t* two_way_seqs;    // [num_seqs] or null: not 0 where queries see all keys behind their positions
    const float* position_bias;     // of head h and of a key at position p + d: [h * position_bias_stride + d]; or null
    void* out;                      // [num_tokens, num_heads, value_dim] T, tokens out_stride elements apart
    int64_t q_stride, out_stride, block_table_stride, position_bias_stride;
    int num_seqs, num_heads, num_kv_heads, head_dim, value_dim, block_size;
    int max_query_len;               // no sequence has more; where the host knows it
    float softmax_scale, score_cap;  // score_cap 0: none
    int sliding_window;              // 0: none
    bool chunked;                    // it begins where the position is a multiple of it, and does not slide
    bool two_way;                    // keys behind the position are seen, too
    Element type;
    const float *k_scales, *v_scales;  // [num_blocks, num_kv_heads, block_size] where rows have scales, or null
    Element cache_type;                // of k_cache and v_cache
};

// See ChooseKeysParams in ops/backend.h.
struct ChooseKeysArgs {
    const void* q;                // [num_tokens, num_heads, head_dim] T, tokens q_stride elements apart
    const float* weights;         // [num_tokens, num_heads], rows weights_stride apart; or null: of one head
    const void* k_cache;          // [num_blocks, block_size, head_dim] of cache_type
    const int32_t* block_table;   // [num_seqs, ..], rows block_table_stride apart
    const int32_t* cu_seqlens_q;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    int32_t* slots;               // [num_tokens, top_k]
    float* scores;                // scratch [num_score_rows, scores_stride]
    int64_t q_stride, weights_stride, block_table_stride, scores_stride;
    int num_tokens, num_seqs, num_heads, head_dim, block_size, top_k, num_score_rows;
    int run_keys, last_runs, slot_heads, slot_head;
    Element type;
    const float* k_scales;  // [num_blocks, block_size] where rows have scales, or null
    Element cache_type;
};

}  // namespace infinilm
