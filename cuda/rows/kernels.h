// Kernels that work on the rows of a matrix one by one. See core/types.h for what holds of all launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args/rows.h"
#include "cuda/linear/packed_weight.h"

namespace infinilm::cuda {

struct EmbeddingArgs {
    const int* ids;      // [num_tokens]
    int first_id;        // of the table's rows
    bool is_part;        // an id that has no row gives zeros; else NaN, since it is outside the vocabulary
    PackedWeight table;  // natural order: a tied lm_head is its own embedding table
    void* out;           // [num_tokens, k] T
    int64_t out_stride;  // elements between rows, here and below
    int num_tokens;
    float multiplier;   // of the rows; the product is rounded to T
    int known_ids = 0;  // ids from this one on count as id 0; 0: there are none such
};
cudaError_t embedding(const EmbeddingArgs&, cudaStream_t);

cudaError_t rms_norm(const NormArgs&, cudaStream_t);  // weight and bias are float32

// Sizes are multiples of 8.
cudaError_t row_moment(const RowMomentArgs&, cudaStream_t);
cudaError_t sparsify(const SparsifyArgs&, cudaStream_t);
cudaError_t match_rms(const MatchRmsArgs&, cudaStream_t);
cudaError_t mix_streams(const MixStreamsArgs&, cudaStream_t);

cudaError_t act_mul(const ActMulArgs&, cudaStream_t);

cudaError_t soft_cap(const SoftCapArgs&, cudaStream_t);

struct GatherRowsArgs {
    const void* x;    // [.., hidden_size] T
    const int* rows;  // [num_rows]
    void* out;        // [num_rows, hidden_size] T
    int64_t x_stride, out_stride;
    int num_rows, hidden_size;
    Element type;
};
cudaError_t gather_rows(const GatherRowsArgs&, cudaStream_t);

// ClipArgs in src/args/rows.h explains the fields; n is a multiple of 8.
cudaError_t clip(const ClipArgs&, cudaStream_t);

// out[r, p * columns ..] = parts[p * num_rows + r], of elements of 4 bytes.
struct JoinColumnsArgs {
    const void* parts;  // [num_parts * num_rows, columns], contiguous
    void* out;          // [num_rows, num_parts * columns]
    int64_t out_stride;
    int num_parts, num_rows, columns;
};
cudaError_t join_columns(const JoinColumnsArgs&, cudaStream_t);

// UpdateStepParams in src/ops/backend.h explains the fields.
struct UpdateStepArgs {
    const int* previous_ids;  // [num_rows]
    const int* rows;          // [num_tokens], -1: the id stays
    int* ids;                 // [num_tokens]
    int num_tokens;           // 0: no ids
    int* table;
    const int2* entries;  // [num_entries]: element of the table, and what it holds now
    int num_entries;
};
cudaError_t update_step(const UpdateStepArgs&, cudaStream_t);

// out[i] = parts[0][i] + parts[1][i] + .., in that order in float32, rounded to T.
struct SumPartsArgs {
    const void* parts;  // [num_parts, size] T, contiguous
    void* out;          // [size] T
    int num_parts;
    int64_t size;  // a multiple of 8
    Element type;
};
cudaError_t sum_parts(const SumPartsArgs&, cudaStream_t);

// Uniform numbers of this standard deviation around zero, element i from (seed, i): weights for benchmarks.
struct FillRandomArgs {
    void* dst;  // [count]
    Element type;
    int64_t count;
    uint64_t seed;
    float deviation;
};
cudaError_t fill_random(const FillRandomArgs&, cudaStream_t);

}  // namespace infinilm::cuda
