// C functions over the launchers of delta.cu and selective_scan.cu for delta_cases.py and scan_cases.py. Types are
// their numbers in core/types.h.
#include "cuda/delta/kernels.h"

using namespace infinilm;
using namespace infinilm::cuda;

extern "C" {

int run_causal_conv(const void* x, int64_t x_stride, const float* weight, float* state, const int* cu_seqlens_q,
                    const int* state_in, const int* state_out, const int* state_tokens, const int* num_replayed,
                    int num_seqs, void* out, int64_t out_stride, int num_tokens, int channels, int taps, int type,
                    const void* gate_in, int64_t gate_in_stride, const void* gate_out, int64_t gate_out_stride,
                    const float* bias, const void* x_log, const void* gate_in_log, int64_t log_stride, int log_rows) {
    return causal_conv({x,
                        weight,
                        bias,
                        state,
                        {cu_seqlens_q, state_in, state_out, state_tokens, num_replayed, num_seqs},
                        out,
                        x_stride,
                        out_stride,
                        num_tokens,
                        channels,
                        taps,
                        static_cast<Element>(type),
                        gate_in,
                        gate_out,
                        gate_in_stride,
                        gate_out_stride,
                        {x_log, log_stride, log_rows},
                        {gate_in_log, log_stride, log_rows}},
                       nullptr);
}

int run_delta_rule(const void* qkv, int64_t qkv_stride, const void* z, int64_t z_stride, const void* a,
                   int64_t a_stride, const void* b, int64_t b_stride, const float* decay_rate, const float* dt_bias,
                   const float* norm, float* state, const int* cu_seqlens_q, const int* state_in, const int* state_out,
                   const int* state_tokens, const int* num_replayed, int num_seqs, void* out, int64_t out_stride,
                   int num_tokens, int num_k_heads, int num_v_heads, int k_dim, int v_dim, float eps, int type,
                   const void* kv_log, const void* a_log, const void* b_log, int64_t log_stride, int log_rows,
                   int by_element, float lower_bound) {
    DeltaRuleArgs args{};
    args.by_element = args.sigmoid_gate = by_element != 0;
    args.lower_bound = lower_bound;
    args.qkv = qkv, args.z = z, args.a = a, args.b = b;
    args.qkv_stride = qkv_stride, args.z_stride = z_stride, args.a_stride = a_stride, args.b_stride = b_stride;
    args.decay_rate = decay_rate, args.dt_bias = dt_bias, args.norm = norm, args.state = state;
    args.sequences = {cu_seqlens_q, state_in, state_out, state_tokens, num_replayed, num_seqs};
    args.out = out, args.out_stride = out_stride;
    args.num_tokens = num_tokens, args.num_k_heads = num_k_heads, args.num_v_heads = num_v_heads;
    args.k_dim = k_dim, args.v_dim = v_dim, args.eps = eps, args.type = static_cast<Element>(type);
    args.kv_log = {kv_log, log_stride, log_rows};
    args.a_log = {a_log, log_stride, log_rows}, args.b_log = {b_log, log_stride, log_rows};
    return delta_rule(args, nullptr);
}

int run_selective_scan(const void* xbc, int64_t xbc_stride, const void* dt, int64_t dt_stride, const float* decay_rate,
                       const float* dt_bias, const float* skip, float* state, const int* cu_seqlens_q,
                       const int* state_in, const int* state_out, const int* state_tokens, const int* num_replayed,
                       int num_seqs, void* out, int64_t out_stride, int num_tokens, int num_heads, int num_groups,
                       int state_dim, int head_dim, float dt_multiplier, float dt_min, float dt_max, int type,
                       const void* xb_log, const void* dt_log, int64_t log_stride, int log_rows) {
    SelectiveScanArgs args{};
    args.xbc = xbc, args.dt = dt, args.xbc_stride = xbc_stride, args.dt_stride = dt_stride;
    args.decay_rate = decay_rate, args.dt_bias = dt_bias, args.skip = skip, args.state = state;
    args.sequences = {cu_seqlens_q, state_in, state_out, state_tokens, num_replayed, num_seqs};
    args.out = out, args.out_stride = out_stride, args.num_tokens = num_tokens;
    args.num_heads = num_heads, args.num_groups = num_groups, args.state_dim = state_dim, args.head_dim = head_dim;
    args.dt_multiplier = dt_multiplier, args.dt_min = dt_min, args.dt_max = dt_max;
    args.type = static_cast<Element>(type);
    args.xb_log = {xb_log, log_stride, log_rows}, args.dt_log = {dt_log, log_stride, log_rows};
    return selective_scan(args, nullptr);
}

// x and y are the two parts that a log has side by side.
int run_log_drafts(const void* x, int64_t x_stride, int x_columns, const void* y, int64_t y_stride, int y_columns,
                   const int* cu_seqlens_q, const int* state_in, const int* state_out, const int* state_tokens,
                   const int* num_replayed, int num_seqs, void* log, int log_rows, int num_tokens, int type) {
    LogDraftsArgs args{};
    args.parts[0] = {x, x_stride, x_columns}, args.parts[1] = {y, y_stride, y_columns}, args.num_parts = 2;
    args.log = log, args.log_stride = x_columns + y_columns, args.num_rows = log_rows, args.num_tokens = num_tokens;
    args.sequences = {cu_seqlens_q, state_in, state_out, state_tokens, num_replayed, num_seqs};
    args.type = static_cast<Element>(type);
    return log_drafts(args, nullptr);
}

int run_gated_norm(const void* x, int64_t x_stride, const void* gate, int64_t gate_stride, const float* weight,
                   void* out, int64_t out_stride, int num_tokens, int size, int group_size, float eps,
                   float gate_multiplier, int norm_first, int type) {
    GatedNormArgs args{};
    args.x = x, args.gate = gate, args.weight = weight, args.out = out;
    args.x_stride = x_stride, args.gate_stride = gate_stride, args.out_stride = out_stride;
    args.num_tokens = num_tokens, args.size = size, args.group_size = group_size;
    args.eps = eps, args.gate_multiplier = gate_multiplier, args.norm_first = norm_first != 0;
    args.type = static_cast<Element>(type);
    return gated_norm(args, nullptr);
}
}
