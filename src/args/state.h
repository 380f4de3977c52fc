// Arguments of kernels of layers with a state. See args/rows.h for what holds of all structs of this folder.
#pragma once

#include <stdint.h>

#include "args/delta_limits.h"
#include "args/element.h"

namespace infinilm {

// See StateSteps in ops/backend.h.
struct StateStepsArgs {
    const int32_t* cu_seqlens_q;  // [num_seqs + 1]
    const int32_t* state_in;      // [num_seqs], -1: zeros
    const int32_t* state_out;     // [num_seqs]
    const int32_t* state_tokens;  // [num_seqs], or null: all
    const int32_t* num_replayed;  // [num_seqs], or null: none
    int num_seqs;
};

// The part of a log that an op reads. See StateSteps in ops/backend.h.
struct StateLogArgs {
    const void* rows;  // [num_states, num_rows, n] T, or null where nothing is replayed
    int64_t stride;    // of a row
    int num_rows;      // of a state
};

struct CausalConvArgs {
    const void* x;        // [num_tokens, channels] T
    const float* weight;  // [taps, channels]
    const float* bias;    // [channels], or null
    float* state;         // [num_states, taps - 1, channels]
    StateStepsArgs sequences;
    void* out;  // [num_tokens, channels] T
    int64_t x_stride, out_stride;
    int num_tokens, channels, taps;  // taps: 1 to most_taps
    Element type;
    const void *gate_in, *gate_out;  // [num_tokens, channels] T, in place of silu; both null: silu
    int64_t gate_in_stride, gate_out_stride;
    StateLogArgs x_log, gate_in_log;
};

// What the state reads is rounded to T before it is normed.
struct DeltaRuleArgs {
    const void* qkv;          // [num_tokens, 2 * num_k_heads * k_dim + num_v_heads * v_dim] T
    const void* z;            // [num_tokens, num_v_heads * v_dim] T
    const void* a;            // [num_tokens, num_v_heads] T; by_element: [num_tokens, num_v_heads * k_dim]
    const void* b;            // [num_tokens, num_v_heads] T
    const float* decay_rate;  // [num_v_heads]
    const float* dt_bias;     // [num_v_heads]; by_element: [num_v_heads * k_dim]
    const float* norm;        // [v_dim]
    float* state;             // [num_states, num_v_heads, k_dim, v_dim]
    StateStepsArgs sequences;
    void* out;  // [num_tokens, num_v_heads * v_dim] T
    int64_t qkv_stride, z_stride, a_stride, b_stride, out_stride;
    int num_tokens, num_k_heads, num_v_heads, k_dim, v_dim;  // k_dim: at most most_k_dim
    float eps;
    Element type;
    StateLogArgs kv_log, a_log, b_log;
    bool by_element, sigmoid_gate, doubled_beta;
    float lower_bound;  // see DeltaRuleParams
};

// See SelectiveScanParams in ops/backend.h.
struct SelectiveScanArgs {
    const void* xbc;          // [num_tokens, num_heads * head_dim + 2 * num_groups * state_dim] T
    const void* dt;           // [num_tokens, num_heads] T
    const float* decay_rate;  // [num_heads]
    const float* dt_bias;     // [num_heads]
    const float* skip;        // [num_heads]
    float* state;             // [num_states, num_heads, state_dim, head_dim]
    StateStepsArgs sequences;
    void* out;  // [num_tokens, num_heads * head_dim] T
    int64_t xbc_stride, dt_stride, out_stride;
    int num_tokens, num_heads, num_groups, state_dim, head_dim;  // state_dim: at most most_k_dim
    float dt_multiplier, dt_min, dt_max;
    Element type;
    StateLogArgs xb_log, dt_log;
};

constexpr int most_log_parts = 4;

// See LogDraftsParams in ops/backend.h.
struct LogDraftsArgs {
    struct Part {
        const void* rows;  // [num_tokens, columns] T
        int64_t stride;
        int columns;
    };
    Part parts[most_log_parts];
    int num_parts;
    void* log;           // [num_states, num_rows, columns of all parts] T
    int64_t log_stride;  // of a row
    int num_rows, num_tokens;
    StateStepsArgs sequences;
    Element type;
};

// See GatedNormParams in ops/backend.h.
struct GatedNormArgs {
    const void* x;        // [num_tokens, size] T
    const void* gate;     // [num_tokens, size] T
    const float* weight;  // [size], or null: nothing is normed
    void* out;            // [num_tokens, size] T
    int64_t x_stride, gate_stride, out_stride;
    int num_tokens, size, group_size;
    float eps, gate_multiplier;
    bool norm_first;
    Element type;
};

}  // namespace infinilm
