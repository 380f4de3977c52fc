// attention() and attention_f32() for tests/cuda/attention_cases.py.
#include "kernels.h"

using namespace infinilm::cuda;

extern "C" {
size_t attention_bytes(int type, int num_seqs, int num_heads, int num_kv_heads, int head_dim, int max_query_len,
                       int max_context_len, int sliding_window) {
    AttentionArgs a{};
    a.type = static_cast<Type>(type), a.num_seqs = num_seqs, a.head_dim = head_dim, a.block_size = 1;
    a.num_heads = num_heads, a.num_kv_heads = num_kv_heads, a.sliding_window = sliding_window;
    a.max_query_len = max_query_len, a.max_context_len = max_context_len;
    return attention_workspace_bytes(a);
}

int run_attention(int type, const void* q, const void* k_cache, const void* v_cache, const int* block_table,
                  const int* cu_seqlens_q, const int* context_lens, void* out, void* workspace, int q_stride,
                  int out_stride, int block_table_stride, int num_seqs, int num_heads, int num_kv_heads, int head_dim,
                  int block_size, int max_query_len, int max_context_len, float softmax_scale, float score_cap,
                  int sliding_window, const float* sinks) {
    const AttentionArgs a{q,
                          k_cache,
                          v_cache,
                          block_table,
                          cu_seqlens_q,
                          context_lens,
                          sinks,
                          out,
                          q_stride,
                          out_stride,
                          block_table_stride,
                          num_seqs,
                          num_heads,
                          num_kv_heads,
                          head_dim,
                          block_size,
                          max_query_len,
                          max_context_len,
                          softmax_scale,
                          score_cap,
                          sliding_window,
                          workspace,
                          static_cast<Type>(type)};
    return a.type == Type::f32 ? attention_f32(a, nullptr) : attention(a, nullptr);
}
}
