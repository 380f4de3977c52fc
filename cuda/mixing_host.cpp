#include "mixing_host.h"

#include "grouped.h"
#include "packed_layout.h"

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

void check_head(int head_dim) {
    require(head_dim % 8 == 0 && head_dim <= attention_widest_head, "head_dim is ", head_dim,
            ": on CUDA it must be a multiple of 8, at most ", attention_widest_head, "; use device='cpu'");
}

RopeStoreArgs rope_args(const RopeStoreParams& p) {
    const TensorView& q_cos_sin = p.q_cos_sin ? p.q_cos_sin : p.cos_sin;
    return {.cos_sin = p.cos_sin.as<const float>(),
            .q_cos_sin = q_cos_sin.as<const float>(),
            .q_norm = p.q_norm.as<const float>(),
            .k_norm = p.k_norm.as<const float>(),
            .v_norm = p.v_norm.as<const float>(),
            .slot_mapping = p.slot_mapping.as<const int64_t>(),
            .k_cache = p.k_cache.data(),
            .v_cache = p.v_cache.data(),
            .q_turned = p.q_turned.data(),
            .q_turned_stride = p.q_turned ? p.q_turned.stride(0) : 0,
            .q_turned_head_stride = p.q_turned ? p.q_turned.stride(1) : 0,
            .num_heads = p.num_heads,
            .num_kv_heads = p.num_kv_heads,
            .head_dim = p.head_dim,
            .rotary_dim = q_cos_sin ? count(q_cos_sin.shape(1)) : 0,
            .block_size = p.k_cache ? count(p.k_cache.shape(2)) : 0,
            .eps = p.eps};
}

cudaError_t run_head_linear(const HeadLinearParams& p, cudaStream_t stream) {
    const bool aligned = p.x.stride(0) % 8 == 0 && p.x.stride(1) % 8 == 0 &&
                         reinterpret_cast<uintptr_t>(p.x.data()) % (size_bytes(p.x.dtype()) == 4 ? 32 : 16) == 0;
    require(aligned && p.x.shape(2) % 8 == 0, "linears of heads of ", p.x.shape(2),
            " inputs: on CUDA the parts of a query and of a latent must be multiples of 8; use device='cpu'");
    return head_linear({.x = p.x.data(),
                        .x_stride = p.x.stride(0),
                        .x_head_stride = p.x.stride(1),
                        .num_tokens = count(p.x.shape(0)),
                        .num_heads = count(p.x.shape(1)),
                        .out_features = count(p.out.shape(2)),
                        .weight = packed(p.weight),
                        .out = p.out.data(),
                        .out_stride = p.out.stride(0),
                        .out_head_stride = p.out.stride(1)},
                       stream);
}

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
