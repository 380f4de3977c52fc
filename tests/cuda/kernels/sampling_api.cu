// C functions over the launchers of cuda/sampling/sampling.cu, for sampling_cases.py.
#include "cuda/sampling/kernels.h"

using infinilm::cuda::RowBlocks;

extern "C" int64_t workspace_bytes(int blocks) {
    return static_cast<int64_t>(infinilm::cuda::sampling_workspace_bytes(blocks));
}

extern "C" int draw(const float* logits, int64_t logits_stride, int num_rows, int vocab_size, const float* temperature,
                    const int* top_k, const float* top_p, const float* min_p, const float* random_val, int* ids,
                    const int* token_ids, int64_t token_ids_stride, const uint32_t* allowed, int64_t allowed_stride,
                    const int* allowed_row, int blocks, void* workspace, int places) {
    return infinilm::cuda::sample({logits,
                                   logits_stride,
                                   num_rows,
                                   vocab_size,
                                   temperature,
                                   top_k,
                                   top_p,
                                   min_p,
                                   random_val,
                                   ids,
                                   token_ids,
                                   token_ids_stride,
                                   {allowed, allowed_stride, allowed_row},
                                   RowBlocks{blocks, workspace, places}},
                                  nullptr);
}

extern "C" int change(float* logits, int64_t logits_stride, int num_rows, int n, int first_id, const int* rows,
                      const float* penalties, int* tokens, const int* input_ids, const int* logits_rows, bool undo) {
    return infinilm::cuda::change_logits(
        {logits, logits_stride, num_rows, n, first_id, rows, penalties, tokens, input_ids, logits_rows, undo}, nullptr);
}

extern "C" int log_probs(const float* logits, int64_t logits_stride, int num_rows, int vocab_size, int width,
                         const int* drawn, const int* num_logprobs, int* ids, float* logprobs, int blocks,
                         void* workspace, int places) {
    return infinilm::cuda::log_probs({logits, logits_stride, num_rows, vocab_size, width, drawn, num_logprobs, ids,
                                      logprobs, RowBlocks{blocks, workspace, places}},
                                     nullptr);
}

extern "C" int best(const float* logits, int64_t logits_stride, int num_rows, int n, int k, int first_id, float* best,
                    int* ids, const uint32_t* allowed, int64_t allowed_stride, const int* allowed_row, int blocks,
                    void* workspace, int places) {
    return infinilm::cuda::find_best({logits,
                                      logits_stride,
                                      num_rows,
                                      n,
                                      k,
                                      first_id,
                                      best,
                                      ids,
                                      {allowed, allowed_stride, allowed_row},
                                      RowBlocks{blocks, workspace, places}},
                                     nullptr);
}
