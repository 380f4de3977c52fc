// The causal convolution and the gated delta rule.
#include "bind/ops/ops.h"
#include "ops/ops.h"

namespace infinilm {

void bind_delta_ops(OpsClass& backend) {
    backend
        .def(
            "causal_conv",
            [](SharedBackend& shared, const Tensor& x, const Tensor& weight, const Tensor& state,
               const Tensor& cu_seqlens_q, const Tensor& state_in, const Tensor& state_out, const Tensor& out,
               const OptionalTensor& state_tokens, const OptionalTensor& gate_in, const OptionalTensor& gate_out) {
                const InUse b(shared);
                ops::causal_conv(b, {.x = x,
                                     .weight = weight,
                                     .state = output("causal_conv", "state", state),
                                     .sequences = {.cu_seqlens_q = cu_seqlens_q,
                                                   .state_in = state_in,
                                                   .state_out = state_out,
                                                   .state_tokens = optional_view(state_tokens)},
                                     .out = output("causal_conv", "out", out),
                                     .gate_in = optional_view(gate_in),
                                     .gate_out = optional_view(gate_out)});
            },
            "x"_a, "weight"_a, "state"_a, "cu_seqlens_q"_a, "state_in"_a, "state_out"_a, "out"_a,
            "state_tokens"_a = nb::none(), "gate_in"_a = nb::none(), "gate_out"_a = nb::none(), Release())
        .def(
            "delta_rule",
            [](SharedBackend& shared, const Tensor& qkv, const Tensor& z, const Tensor& a, const Tensor& b,
               const Tensor& decay_rate, const Tensor& dt_bias, const Tensor& norm, const Tensor& state,
               const Tensor& cu_seqlens_q, const Tensor& state_in, const Tensor& state_out, const Tensor& gates,
               const Tensor& out, int num_k_heads, float eps, const OptionalTensor& state_tokens) {
                const InUse own(shared);
                ops::delta_rule(own, {.qkv = qkv,
                                      .z = z,
                                      .a = a,
                                      .b = b,
                                      .decay_rate = decay_rate,
                                      .dt_bias = dt_bias,
                                      .norm = norm,
                                      .state = output("delta_rule", "state", state),
                                      .sequences = {.cu_seqlens_q = cu_seqlens_q,
                                                    .state_in = state_in,
                                                    .state_out = state_out,
                                                    .state_tokens = optional_view(state_tokens)},
                                      .gates = output("delta_rule", "gates", gates),
                                      .out = output("delta_rule", "out", out),
                                      .num_k_heads = num_k_heads,
                                      .eps = eps});
            },
            "qkv"_a, "z"_a, "a"_a, "b"_a, "decay_rate"_a, "dt_bias"_a, "norm"_a, "state"_a, "cu_seqlens_q"_a,
            "state_in"_a, "state_out"_a, "gates"_a, "out"_a, "num_k_heads"_a, "eps"_a, "state_tokens"_a = nb::none(),
            Release());
}

}  // namespace infinilm
