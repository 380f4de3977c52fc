// choose_keys() for choose_keys_cases.py. Types are their numbers in core/types.h.
#include "cuda/attention/kernels.h"

using namespace infinilm;
using namespace infinilm::cuda;

extern "C" {
int run_choose_keys(const void* q, int64_t q_stride, const float* weights, int64_t weights_stride, const void* k_cache,
                    const int* block_table, int block_table_stride, const int* cu_seqlens_q, const int* context_lens,
                    int* slots, float* scores, int scores_stride, int num_score_rows, int num_tokens, int num_seqs,
                    int num_heads, int head_dim, int block_size, int top_k, int run_keys, int last_runs, int slot_heads,
                    int slot_head, int type) {
    ChooseKeysArgs args{};
    args.q = q, args.q_stride = q_stride, args.weights = weights, args.weights_stride = weights_stride;
    args.k_cache = k_cache, args.block_table = block_table, args.block_table_stride = block_table_stride;
    args.cu_seqlens_q = cu_seqlens_q, args.context_lens = context_lens, args.slots = slots;
    args.scores = scores, args.scores_stride = scores_stride, args.num_score_rows = num_score_rows;
    args.num_tokens = num_tokens, args.num_seqs = num_seqs, args.num_heads = num_heads, args.head_dim = head_dim;
    args.run_keys = run_keys, args.last_runs = last_runs, args.slot_heads = slot_heads, args.slot_head = slot_head;
    args.block_size = block_size, args.top_k = top_k, args.type = static_cast<Element>(type);
    return choose_keys(args, nullptr);
}
}
