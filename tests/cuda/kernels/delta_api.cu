// C functions over the launchers of delta.cu for delta_cases.py. Types are their numbers in core/types.h.
#include "cuda/delta/kernels.h"

using namespace infinilm;
using namespace infinilm::cuda;

extern "C" {

int run_causal_conv(const void* x, int64_t x_stride, const float* weight, float* state, const int* cu_seqlens_q,
                    const int* state_in, const int* state_out, const int* state_tokens, int num_seqs, void* out,
                    int64_t out_stride, int num_tokens, int channels, int taps, int type, const void* gate_in,
                    int64_t gate_in_stride, const void* gate_out, int64_t gate_out_stride) {
    return causal_conv({x,
                        weight,
                        state,
                        {cu_seqlens_q, state_in, state_out, state_tokens, num_seqs},
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
                        gate_out_stride},
                       nullptr);
}

int run_delta_rule(const void* qkv, int64_t qkv_stride, const void* z, int64_t z_stride, const void* a,
                   int64_t a_stride, const void* b, int64_t b_stride, const float* decay_rate, const float* dt_bias,
                   const float* norm, float* state, const int* cu_seqlens_q, const int* state_in, const int* state_out,
                   const int* state_tokens, int num_seqs, void* out, int64_t out_stride, int num_tokens,
                   int num_k_heads, int num_v_heads, int k_dim, int v_dim, float eps, int type) {
    DeltaRuleArgs args{};
    args.qkv = qkv, args.z = z, args.a = a, args.b = b;
    args.qkv_stride = qkv_stride, args.z_stride = z_stride, args.a_stride = a_stride, args.b_stride = b_stride;
    args.decay_rate = decay_rate, args.dt_bias = dt_bias, args.norm = norm, args.state = state;
    args.sequences = {cu_seqlens_q, state_in, state_out, state_tokens, num_seqs};
    args.out = out, args.out_stride = out_stride;
    args.num_tokens = num_tokens, args.num_k_heads = num_k_heads, args.num_v_heads = num_v_heads;
    args.k_dim = k_dim, args.v_dim = v_dim, args.eps = eps, args.type = static_cast<Element>(type);
    return delta_rule(args, nullptr);
}
}
