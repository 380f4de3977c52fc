// Layers with a state: the causal convolution, the gated delta rule, and the state space of Mamba-2.
#include "bind/ops/ops.h"
#include "ops/ops.h"

namespace infinilm {

void bind_delta_ops(OpsClass& backend) {
    backend
        .def(
            "causal_conv",
            [](SharedBackend& shared, const Tensor& x, const Tensor& weight, const Tensor& state,
               const Tensor& cu_seqlens_q, const Tensor& state_in, const Tensor& state_out, const Tensor& out,
               const OptionalTensor& state_tokens, const OptionalTensor& gate_in, const OptionalTensor& gate_out,
               const OptionalTensor& bias, const OptionalTensor& num_replayed, const OptionalTensor& x_log,
               const OptionalTensor& gate_in_log) {
                const InUse b(shared);
                ops::causal_conv(b, {.x = x,
                                     .weight = weight,
                                     .state = output("causal_conv", "state", state),
                                     .sequences = {.cu_seqlens_q = cu_seqlens_q,
                                                   .state_in = state_in,
                                                   .state_out = state_out,
                                                   .state_tokens = optional_view(state_tokens),
                                                   .num_replayed = optional_view(num_replayed)},
                                     .out = output("causal_conv", "out", out),
                                     .gate_in = optional_view(gate_in),
                                     .gate_out = optional_view(gate_out),
                                     .bias = optional_view(bias),
                                     .x_log = optional_view(x_log),
                                     .gate_in_log = optional_view(gate_in_log)});
            },
            "x"_a, "weight"_a, "state"_a, "cu_seqlens_q"_a, "state_in"_a, "state_out"_a, "out"_a,
            "state_tokens"_a = nb::none(), "gate_in"_a = nb::none(), "gate_out"_a = nb::none(), "bias"_a = nb::none(),
            "num_replayed"_a = nb::none(), "x_log"_a = nb::none(), "gate_in_log"_a = nb::none(), Release())
        .def(
            "delta_rule",
            [](SharedBackend& shared, const Tensor& qkv, const Tensor& z, const Tensor& a, const Tensor& b,
               const Tensor& decay_rate, const Tensor& dt_bias, const Tensor& norm, const Tensor& state,
               const Tensor& cu_seqlens_q, const Tensor& state_in, const Tensor& state_out, const Tensor& gates,
               const Tensor& out, int num_k_heads, float eps, const OptionalTensor& state_tokens,
               const OptionalTensor& num_replayed, const OptionalTensor& kv_log, const OptionalTensor& a_log,
               const OptionalTensor& b_log, bool by_element, bool sigmoid_gate, bool doubled_beta, float lower_bound) {
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
                                                    .state_tokens = optional_view(state_tokens),
                                                    .num_replayed = optional_view(num_replayed)},
                                      .gates = output("delta_rule", "gates", gates),
                                      .out = output("delta_rule", "out", out),
                                      .num_k_heads = num_k_heads,
                                      .eps = eps,
                                      .kv_log = optional_view(kv_log),
                                      .a_log = optional_view(a_log),
                                      .b_log = optional_view(b_log),
                                      .by_element = by_element,
                                      .sigmoid_gate = sigmoid_gate,
                                      .doubled_beta = doubled_beta,
                                      .lower_bound = lower_bound});
            },
            "qkv"_a, "z"_a, "a"_a, "b"_a, "decay_rate"_a, "dt_bias"_a, "norm"_a, "state"_a, "cu_seqlens_q"_a,
            "state_in"_a, "state_out"_a, "gates"_a, "out"_a, "num_k_heads"_a, "eps"_a, "state_tokens"_a = nb::none(),
            "num_replayed"_a = nb::none(), "kv_log"_a = nb::none(), "a_log"_a = nb::none(), "b_log"_a = nb::none(),
            "by_element"_a = false, "sigmoid_gate"_a = false, "doubled_beta"_a = false, "lower_bound"_a = 0.0f,
            Release())
        .def(
            "selective_scan",
            [](SharedBackend& shared, const Tensor& xbc, const Tensor& dt, const Tensor& decay_rate,
               const Tensor& dt_bias, const Tensor& skip, const Tensor& state, const Tensor& cu_seqlens_q,
               const Tensor& state_in, const Tensor& state_out, const Tensor& gates, const Tensor& out, int num_groups,
               float dt_multiplier, float dt_min, float dt_max, const OptionalTensor& state_tokens,
               const OptionalTensor& num_replayed, const OptionalTensor& xb_log, const OptionalTensor& dt_log) {
                const InUse b(shared);
                ops::selective_scan(b, {.xbc = xbc,
                                        .dt = dt,
                                        .decay_rate = decay_rate,
                                        .dt_bias = dt_bias,
                                        .skip = skip,
                                        .state = output("selective_scan", "state", state),
                                        .sequences = {.cu_seqlens_q = cu_seqlens_q,
                                                      .state_in = state_in,
                                                      .state_out = state_out,
                                                      .state_tokens = optional_view(state_tokens),
                                                      .num_replayed = optional_view(num_replayed)},
                                        .gates = output("selective_scan", "gates", gates),
                                        .out = output("selective_scan", "out", out),
                                        .num_groups = num_groups,
                                        .dt_multiplier = dt_multiplier,
                                        .dt_min = dt_min,
                                        .dt_max = dt_max,
                                        .xb_log = optional_view(xb_log),
                                        .dt_log = optional_view(dt_log)});
            },
            "xbc"_a, "dt"_a, "decay_rate"_a, "dt_bias"_a, "skip"_a, "state"_a, "cu_seqlens_q"_a, "state_in"_a,
            "state_out"_a, "gates"_a, "out"_a, "num_groups"_a, "dt_multiplier"_a = 1.0f, "dt_min"_a = 0.0f,
            "dt_max"_a = std::numeric_limits<float>::max(), "state_tokens"_a = nb::none(),
            "num_replayed"_a = nb::none(), "xb_log"_a = nb::none(), "dt_log"_a = nb::none(), Release())
        .def(
            "log_drafts",
            [](SharedBackend& shared, const std::vector<Tensor>& parts, const Tensor& log, const Tensor& cu_seqlens_q,
               const Tensor& state_in, const Tensor& state_out, const Tensor& state_tokens) {
                const InUse b(shared);
                const std::vector<TensorView> views(parts.begin(), parts.end());
                ops::log_drafts(b, {.parts = views,
                                    .log = output("log_drafts", "log", log),
                                    .sequences = {.cu_seqlens_q = cu_seqlens_q,
                                                  .state_in = state_in,
                                                  .state_out = state_out,
                                                  .state_tokens = state_tokens}});
            },
            "parts"_a, "log"_a, "cu_seqlens_q"_a, "state_in"_a, "state_out"_a, "state_tokens"_a, Release())
        .def(
            "gated_norm",
            [](SharedBackend& shared, const Tensor& x, const Tensor& gate, const OptionalTensor& weight,
               const Tensor& out, int group_size, float eps, bool norm_first, float gate_multiplier) {
                const InUse b(shared);
                ops::gated_norm(b, {.x = x,
                                    .gate = gate,
                                    .weight = optional_view(weight),
                                    .out = output("gated_norm", "out", out),
                                    .group_size = group_size,
                                    .eps = eps,
                                    .norm_first = norm_first,
                                    .gate_multiplier = gate_multiplier});
            },
            "x"_a, "gate"_a, "weight"_a.none(), "out"_a, "group_size"_a, "eps"_a, "norm_first"_a = false,
            "gate_multiplier"_a = 1.0f, Release());
}

}  // namespace infinilm
