#include "cpu/delta.h"

#include <algorithm>
#include <cmath>

namespace infinilm::cpu {

namespace {

StateArgs state_args(const StateSteps& p) {
    return {.cu_seqlens_q = p.cu_seqlens_q.as<const int32_t>(),
            .state_in = p.state_in.as<const int32_t>(),
            .state_out = p.state_out.as<const int32_t>(),
            .num_seqs = p.state_in.shape(0)};
}

}  // namespace

CausalConvArgs conv_args(const CausalConvParams& p) {
    return {.x = p.x.as<const float>(),
            .x_stride = p.x.stride(0),
            .weight = p.weight.as<const float>(),
            .state = p.state.as<float>(),
            .sequences = state_args(p.sequences),
            .out = p.out.as<float>(),
            .out_stride = p.out.stride(0),
            .channels = p.x.shape(1),
            .taps = static_cast<int>(p.weight.shape(0))};
}

DeltaRuleArgs delta_args(const DeltaRuleParams& p) {
    return {.qkv = p.qkv.as<const float>(),
            .qkv_stride = p.qkv.stride(0),
            .z = p.z.as<const float>(),
            .z_stride = p.z.stride(0),
            .gates = p.gates.as<const float>(),
            .norm = p.norm.as<const float>(),
            .state = p.state.as<float>(),
            .sequences = state_args(p.sequences),
            .out = p.out.as<float>(),
            .out_stride = p.out.stride(0),
            .num_k_heads = p.num_k_heads,
            .num_v_heads = static_cast<int>(p.state.shape(1)),
            .k_dim = static_cast<int>(p.state.shape(2)),
            .v_dim = static_cast<int>(p.state.shape(3)),
            .eps = p.eps};
}

void make_gates(const DeltaRuleParams& p, int64_t begin, int64_t end) {
    const int64_t num_heads = p.state.shape(1);
    const auto *rate = p.decay_rate.as<const float>(), *bias = p.dt_bias.as<const float>();
    for (int64_t t = begin; t < end; ++t) {
        const float *a = p.a.as<const float>() + t * p.a.stride(0), *b = p.b.as<const float>() + t * p.b.stride(0);
        float* const gates = p.gates.as<float>() + t * 2 * num_heads;
        for (int64_t h = 0; h < num_heads; ++h) {
            const double x = double{a[h]} + double{bias[h]};
            const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
            gates[h] = static_cast<float>(std::exp(double{rate[h]} * softplus));
            gates[num_heads + h] = static_cast<float>(1 / (1 + std::exp(-double{b[h]})));
        }
    }
}

}  // namespace infinilm::cpu
