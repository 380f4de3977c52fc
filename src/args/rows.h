// Arguments of kernels that work on the rows of a matrix one by one. Filled from an op's parameters by ops/args.h.
//
// In every struct of this folder a pointer to T points at elements of `type`, and the stride of a matrix is the number
// of elements between its rows. No C++ standard headers: kernels of every device include this.
#pragma once

#include <stdint.h>

#include "args/activation.h"
#include "args/element.h"

namespace infinilm {

struct NormArgs {
    const void* x;       // [num_tokens, num_groups * hidden_size] T: each group is normed by itself; of rms, one
    void* residual;      // null, or [num_tokens, hidden_size] T: scale * (residual + multiplier * x), rounded to T, is
                         // normed, and stays there
    const void* weight;  // [num_groups * hidden_size]; or null, with residual: nothing is normed
    const void* bias;    // the same of LayerNorm; or null: RMSNorm
    float* mean_square;  // [num_tokens] or null: read in place of the rows' own; without weight written, * multiplier
    void* out;           // as x, which it may be; not written without weight
    int64_t x_stride, residual_stride, out_stride;
    int num_tokens, num_groups, hidden_size;
    float eps, multiplier, scale;
    Element type;
};

// RowMomentParams, SparsifyParams, MatchRmsParams and MixStreamsParams in src/ops/backend.h explain the fields.
struct RowMomentArgs {
    const void* x;        // [num_tokens, size] T
    const float* centre;  // [num_tokens] or null
    float* out;           // [num_tokens]
    int64_t x_stride;
    int num_tokens, size;
    float multiplier;
    Element type;
};

struct SparsifyArgs {
    void* x;                       // [num_tokens, size] T
    const float *mean, *variance;  // [num_tokens]
    int64_t x_stride;
    int num_tokens, size;
    float deviations;
    Element type;
};

struct MatchRmsArgs {
    void* x;           // [num_tokens, hidden_size] T
    const void* like;  // the same
    int64_t x_stride, like_stride;
    int num_tokens, hidden_size;
    float least;
    Element type;
};

struct MixStreamsArgs {
    void* x;                    // [num_tokens, hidden_size] T
    void* streams;              // [num_streams, num_tokens, hidden_size] T
    const float* router;        // [num_streams, hidden_size]
    const float* coefficients;  // [num_streams * num_streams, num_streams]; of a correction [num_streams, num_streams]
    const float* scale;         // [hidden_size] or null
    void* scaled;               // [num_tokens, hidden_size] T, with scale
    int64_t x_stride, stream_stride, row_stride, scaled_stride;  // of streams: between two, and between rows of one
    int num_tokens, num_streams, hidden_size;
    bool corrects;
    float eps;
    Element type;
};

struct ActMulArgs {
    const void* gate;  // [num_tokens, intermediate_size / group] T
    const void* up;    // [num_tokens, intermediate_size] T, or null: there is none
    void* out;         // [num_tokens, intermediate_size] T; of a group of 1 it may be gate
    int64_t gate_stride, up_stride, out_stride;
    int num_tokens, intermediate_size;
    Activation activation;
    Element type;
    float alpha_p = 0, alpha_n = 0;  // of xielu
    float limit = 0;                 // of clamped_silu
    int group = 1;                   // so many neighbours of up share an element of gate; 1 unless is_gate
};

// x = cap * tanh(x / cap)
struct SoftCapArgs {
    float* x;  // [num_rows, n]
    int64_t x_stride;
    int num_rows, n;
    float cap;
};

// out = min(max(x, low), high); NaN stays.
struct ClipArgs {
    const void* x;  // [num_rows, n] T
    void* out;      // [num_rows, n] T; may be x
    int64_t x_stride, out_stride;
    int num_rows, n;
    float low, high;
    Element type;
};

// out[t] = sum of weights[t, k] * parts[part_of[t, k]], in the order of k; + sigmoid(shared_gate[t]) * shared[t];
// rounded, + residual[t].
struct CombineArgs {
    const void* parts;         // [num_tokens * top_k, hidden_size] T
    const int32_t* part_of;    // [num_tokens, top_k]: rows of parts
    const float* weights;      // [num_tokens, top_k], or null: 1
    const void* shared;        // [num_tokens, hidden_size] T or null
    const float* shared_gate;  // [num_tokens] or null: shared counts whole
    const void* residual;      // [num_tokens, hidden_size] T or null
    void* out;                 // [num_tokens, hidden_size] T; may be shared or residual
    int64_t parts_stride, weights_stride, shared_stride, shared_gate_stride, residual_stride, out_stride;
    int num_tokens, top_k, hidden_size;
    Element type;
};

}  // namespace infinilm
