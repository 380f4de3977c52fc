// The kernels of layers of experts, besides their linears. See core/types.h for what holds of all launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args/rows.h"
#include "cuda/core/types.h"

namespace infinilm::cuda {

constexpr int kMaxExperts = 1024, kMaxExpertGroups = 32;

// RouteParams in src/ops/backend.h explains the fields.
struct RouteArgs {
    const float* logits;           // [num_tokens, num_experts]
    const float* correction_bias;  // [num_experts] or null
    int* ids;                      // [num_tokens, top_k]
    float* weights;                // [num_tokens, top_k]
    int64_t logits_stride, ids_stride, weights_stride;
    int num_tokens, num_experts, top_k;
    bool sigmoid, normalize;
    float scale;
    int num_groups, top_groups, group_best;  // group_best: 1 or 2
    const float* expert_scales;              // [num_experts] or null
    bool sparse_mixer;                       // in place of a softmax
    float tolerance;                         // of that
};
cudaError_t route(const RouteArgs&, cudaStream_t);

// A part is a token at one of its experts. Sorts the parts by expert, and lists the items of linear_grouped.
struct GroupRowsArgs {
    const int* ids;  // [num_tokens, top_k]
    int64_t ids_stride;
    int num_tokens, top_k, num_experts, tile;
    int* tokens;     // out [num_tokens * top_k]: of each part, in their order
    int* part_of;    // out [num_tokens, top_k]: where the part of a token is in that order
    int4* items;     // out [most_items()]
    int* num_items;  // out
};
constexpr int most_items(int num_parts, int num_experts, int tile) {
    return (num_parts < num_experts ? num_parts : num_experts) + num_parts / tile;
}
cudaError_t group_rows(const GroupRowsArgs&, cudaStream_t);

// out[part_of[t, k]] = weights[t, k] * x[t], or x[t].
struct WeighArgs {
    const void* x;         // [num_tokens, hidden_size] T
    const int* part_of;    // [num_tokens, top_k]
    const float* weights;  // [num_tokens, top_k], or null
    void* out;             // [num_tokens * top_k, hidden_size] T
    int64_t x_stride, weights_stride, out_stride;
    int num_tokens, top_k, hidden_size;
    Element type;
};
cudaError_t weigh(const WeighArgs&, cudaStream_t);

cudaError_t combine(const CombineArgs&, cudaStream_t);

}  // namespace infinilm::cuda
