#include "mixing_host.h"

#include "kernels.h"

namespace infinilm::cuda {

namespace {

int count(int64_t size) { return static_cast<int>(size); }

StateStepsArgs state_args(const StateSteps& p) {
    return {.cu_seqlens_q = p.cu_seqlens_q.as<const int>(),
            .state_in = p.state_in.as<const int>(),
            .state_out = p.state_out.as<const int>(),
            .num_seqs = count(p.state_in.shape(0))};
}

}  // namespace

cudaError_t run_causal_conv(const CausalConvParams& p, Type type, cudaStream_t stream) {
    return causal_conv({.x = p.x.data(),
                        .weight = p.weight.as<const float>(),
                        .state = p.state.as<float>(),
                        .sequences = state_args(p.sequences),
                        .out = p.out.data(),
                        .x_stride = p.x.stride(0),
                        .out_stride = p.out.stride(0),
                        .num_tokens = count(p.x.shape(0)),
                        .channels = count(p.x.shape(1)),
                        .taps = count(p.weight.shape(0)),
                        .type = type},
                       stream);
}

cudaError_t run_delta_rule(const DeltaRuleParams& p, Type type, cudaStream_t stream) {
    return delta_rule({.qkv = p.qkv.data(),
                       .z = p.z.data(),
                       .a = p.a.data(),
                       .b = p.b.data(),
                       .decay_rate = p.decay_rate.as<const float>(),
                       .dt_bias = p.dt_bias.as<const float>(),
                       .norm = p.norm.as<const float>(),
                       .state = p.state.as<float>(),
                       .sequences = state_args(p.sequences),
                       .out = p.out.data(),
                       .qkv_stride = p.qkv.stride(0),
                       .z_stride = p.z.stride(0),
                       .a_stride = p.a.stride(0),
                       .b_stride = p.b.stride(0),
                       .out_stride = p.out.stride(0),
                       .num_tokens = count(p.qkv.shape(0)),
                       .num_k_heads = p.num_k_heads,
                       .num_v_heads = count(p.state.shape(1)),
                       .k_dim = count(p.state.shape(2)),
                       .v_dim = count(p.state.shape(3)),
                       .eps = p.eps,
                       .type = type},
                      stream);
}

}  // namespace infinilm::cuda
