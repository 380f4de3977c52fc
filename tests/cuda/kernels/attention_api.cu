// attention() and attention_f32(), and the lists of work, for tests/cuda/attention_cases.py.
#include <algorithm>

#include "cuda/attention/kernels.h"
#include "ops/attention_work.h"

using namespace infinilm;
using namespace infinilm::cuda;

extern "C" {
int64_t attention_bytes(int num_heads, int num_kv_heads, int head_dim, int64_t num_tokens) {
    return attention_workspace_bytes({num_heads, num_kv_heads, head_dim, head_dim}, num_tokens,
                                     attention_row_floats(head_dim));
}

// The array for one window into `array`, where there is room for so many elements; known: the number of items of decode
// and of prefill, and the element where those of decode begin. Returns the number of elements, or -1. block_table:
// [num_seqs, table_stride] or null.
int64_t attention_list(int num_seqs, const int* cu_seqlens_q, const int* context_lens, int num_heads, int num_kv_heads,
                       int head_dim, int value_dim, int sliding_window, int chunked, int two_way,
                       const int* two_way_seqs, const int* block_table, int64_t table_stride, int block_size,
                       int num_sms, int64_t workspace_bytes, int* array, int64_t capacity, int64_t* known) {
    AttentionLengths lengths{num_seqs, cu_seqlens_q, context_lens, nullptr, two_way_seqs};
    lengths.block_table = block_table, lengths.table_stride = table_stride, lengths.block_size = block_size;
    const AttentionWork work = list_attention_work(
        lengths, {{sliding_window, {num_heads, num_kv_heads, head_dim, value_dim}, chunked != 0, two_way != 0}},
        num_sms, workspace_bytes);
    const int64_t count = static_cast<int64_t>(work.array.size()) / 4;
    if (count > capacity) return -1;
    std::copy(work.array.begin(), work.array.end(), array);
    const AttentionList& list = work.lists[0];
    known[0] = list.num_decode, known[1] = list.num_prefill, known[2] = list.decode_begin;
    return count;
}

// sm90: 1: by attention_sm90, 2: by attention_sm90_in_turns. store: 0: q is as attention reads it; else q is what a
// linear gave, with keys and values that go to `slots`: 1: by a kernel in front of attention; 2: by
// store_kv_and_attend, -1 if it does not take them.
int run_attention(int sm90, int type, const void* q, const void* k_cache, const void* v_cache, const int* block_table,
                  const int* cu_seqlens_q, const int* context_lens, void* out, const void* work, void* workspace,
                  int num_decode, int num_prefill, int q_stride, int out_stride, int block_table_stride, int num_seqs,
                  int num_heads, int num_kv_heads, int head_dim, int value_dim, int block_size, int max_query_len,
                  float softmax_scale, float score_cap, int sliding_window, int chunked, int two_way,
                  const float* sinks, const int* two_way_seqs, const float* position_bias, int position_bias_stride,
                  int cache_type, float* k_scales, float* v_scales, void* wide_k, void* wide_v, int store,
                  int num_tokens, int own_kv, const int64_t* slots, const float* q_norm, const float* k_norm,
                  const float* v_norm, const float* cos_sin, int rotary_dim) {
    const AttentionArgs a{q,
                          k_cache,
                          v_cache,
                          block_table,
                          cu_seqlens_q,
                          context_lens,
                          sinks,
                          two_way_seqs,
                          position_bias,
                          out,
                          q_stride,
                          out_stride,
                          block_table_stride,
                          position_bias_stride,
                          num_seqs,
                          num_heads,
                          num_kv_heads,
                          head_dim,
                          value_dim,
                          block_size,
                          max_query_len,
                          softmax_scale,
                          score_cap,
                          sliding_window,
                          chunked != 0,
                          two_way != 0,
                          static_cast<Element>(type),
                          k_scales,
                          v_scales,
                          static_cast<Element>(cache_type)};
    if (a.type == Element::f32) return attention_f32(a, nullptr);
    // The list of one window: its items of prefill, and behind them those of decode.
    const AttentionWorkArgs args{static_cast<const int4*>(work), num_prefill, num_decode, 0,     num_prefill,
                                 attention_row_floats(head_dim), workspace,   wide_k,     wide_v};
    if (store) {
        RopeStoreArgs rope{};
        rope.cos_sin = rope.q_cos_sin = cos_sin, rope.q_norm = q_norm, rope.k_norm = k_norm, rope.v_norm = v_norm;
        rope.num_heads = num_heads, rope.head_dim = head_dim, rope.value_dim = head_dim, rope.rotary_dim = rotary_dim;
        rope.block_size = block_size, rope.eps = 1e-5f, rope.cache_type = static_cast<Element>(cache_type);
        if (own_kv) {
            rope.num_kv_heads = num_kv_heads, rope.slot_mapping = slots, rope.k_scales = k_scales;
            rope.v_scales = v_scales, rope.k_cache = const_cast<void*>(k_cache),
            rope.v_cache = const_cast<void*>(v_cache);
        }
        const QkNormRopeStoreArgs of_step{const_cast<void*>(q), q_stride, num_tokens, rope, static_cast<Element>(type)};
        if (store == 2)
            return attention_stores_kv(of_step, a, args) ? store_kv_and_attend(of_step, a, args, nullptr) : -1;
        if (cudaError_t error = qk_norm_rope_store_kv(of_step, nullptr)) return error;
    }
    constexpr decltype(&attention) kernels[] = {attention, attention_sm90, attention_sm90_in_turns};
    return kernels[sm90](a, args, nullptr);
}
}
