// The kernels of logits and sampling. See core/types.h for what holds of all launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/core/types.h"

namespace infinilm::cuda {

// Which tokens a row may draw; AllowedTokens in src/ops/backend.h explains the fields. null: every row may draw all.
struct AllowedArgs {
    const uint32_t* allowed;  // [num_masks, num_words], rows allowed_stride apart
    int64_t allowed_stride;
    const int* allowed_row;  // [num_rows]
};

// The blocks of a row of logits; the bits are the same with any number of them. Without clusters (before sm_90) they
// talk by a workspace, where there is one, and else a row has one block.
struct RowBlocks {
    int count = 0;              // 1, 2, 4, 8, with a workspace also 16; 0: as many as suit the device
    void* workspace = nullptr;  // sampling_workspace_bytes(places), zero before its first use, of one stream at a time
    int places = 0;             // the most blocks of all rows together
};
size_t sampling_workspace_bytes(int blocks);
// The places that a workspace wants on the current device: one for each multiprocessor, or 0 where clusters serve rows,
// or nothing does, as blocks that wait for each other can only be launched together (cooperative launches).
cudaError_t sampling_places(int& places);

// SampleParams in src/ops/backend.h explains the fields. A row that cannot be sampled gets a negative id: SampleFault.
enum SampleFault : int { nan_logit = -1, infinite_logit = -2, no_logit = -3 };
struct SampleArgs {
    const float* logits;  // [num_rows, vocab_size]
    int64_t logits_stride;
    int num_rows, vocab_size;
    const float* temperature;  // [num_rows], so all below
    const int* top_k;
    const float *top_p, *min_p, *random_val;
    int* ids;
    const int* token_ids = nullptr;  // [num_rows, vocab_size], rows token_ids_stride apart: of the columns; or null
    int64_t token_ids_stride = 0;
    AllowedArgs mask = {};
    RowBlocks blocks = {};
};
cudaError_t sample(const SampleArgs&, cudaStream_t);

// ChangeLogitsParams in src/ops/backend.h explains the fields.
struct ChangeLogitsArgs {
    float* logits;  // [num_rows, n]
    int64_t logits_stride;
    int num_rows, n, first_id;
    const int* rows;         // [num_rows, 2]
    const float* penalties;  // [num_rows, 3]
    int* tokens;             // [num_changes, 3]
    const int* input_ids;    // [num_tokens]
    const int* logits_rows;  // [num_rows]
    bool undo = false;
};
cudaError_t change_logits(const ChangeLogitsArgs&, cudaStream_t);

// FindBestParams in src/ops/backend.h explains the fields. n >= 0, 1 <= k <= 512.
struct FindBestArgs {
    const float* logits;  // [num_rows, n]
    int64_t logits_stride;
    int num_rows, n, k, first_id;
    float* best;  // [num_rows, k]
    int* ids;     // the same
    AllowedArgs mask = {};
    RowBlocks blocks = {};
};
cudaError_t find_best(const FindBestArgs&, cudaStream_t);

// LogProbsParams in src/ops/backend.h explains the fields.
struct LogProbsArgs {
    const float* logits;  // [num_rows, vocab_size]
    int64_t logits_stride;
    int num_rows, vocab_size, width;
    const int *drawn, *num_logprobs;  // [num_rows]
    int* ids;                         // [num_rows, width]
    float* logprobs;                  // the same
    RowBlocks blocks = {};
};
cudaError_t log_probs(const LogProbsArgs&, cudaStream_t);

}  // namespace infinilm::cuda
