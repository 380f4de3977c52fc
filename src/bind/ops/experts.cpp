// Routing, and the experts that it chooses.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/ops/ops.h"
#include "core/enum_names.h"
#include "ops/ops.h"

namespace infinilm {

void bind_expert_ops(OpsClass& backend) {
    backend
        .def(
            "route",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& ids, const Tensor& weights,
               const std::string& scoring, bool normalize, float scale, const OptionalTensor& correction_bias,
               int num_groups, int top_groups, const OptionalTensor& expert_scales, int group_best, float tolerance) {
                const InUse b(shared);
                ops::route(b, {.logits = logits,
                               .correction_bias = optional_view(correction_bias),
                               .expert_scales = optional_view(expert_scales),
                               .ids = output("route", "ids", ids),
                               .weights = output("route", "weights", weights),
                               .scoring = from_string<Scoring>("scoring", scoring),
                               .normalize = normalize,
                               .scale = scale,
                               .num_groups = num_groups,
                               .top_groups = top_groups,
                               .group_best = group_best,
                               .tolerance = tolerance});
            },
            "logits"_a, "ids"_a, "weights"_a, "scoring"_a = "softmax", "normalize"_a = false, "scale"_a = 1.0f,
            "correction_bias"_a = nb::none(), "num_groups"_a = 1, "top_groups"_a = 1, "expert_scales"_a = nb::none(),
            "group_best"_a = 2, "tolerance"_a = 0.0f, Release())
        .def(
            "experts",
            [](SharedBackend& shared, const Tensor& x, const Tensor& ids, const Tensor& weights,
               const std::vector<std::shared_ptr<PreparedLinear>>& gate_up,
               const std::vector<std::shared_ptr<PreparedLinear>>& down, const Tensor& out, const Tensor& inner,
               const Tensor& parts, const OptionalTensor& shared_expert, const OptionalTensor& shared_gate,
               const OptionalTensor& residual, const std::string& activation, float limit) {
                const InUse b(shared);
                const auto experts =
                    ops::prepare_experts(b, {gate_up.begin(), gate_up.end()}, {down.begin(), down.end()});
                ops::experts(b, {.x = x,
                                 .ids = ids,
                                 .weights = weights,
                                 .experts = *experts,
                                 .activation = from_string<Activation>("activation", activation),
                                 .shared = optional_view(shared_expert),
                                 .shared_gate = optional_view(shared_gate),
                                 .residual = optional_view(residual),
                                 .out = output("experts", "out", out),
                                 .inner = output("experts", "inner", inner),
                                 .parts = output("experts", "parts", parts),
                                 .limit = limit});
            },
            "x"_a, "ids"_a, "weights"_a, "gate_up"_a, "down"_a, "out"_a, "inner"_a, "parts"_a, "shared"_a = nb::none(),
            "shared_gate"_a = nb::none(), "residual"_a = nb::none(), "activation"_a = "silu", "limit"_a = 0.0f,
            Release(), "gate_up, down: [num_experts], put together for this call.");
}

}  // namespace infinilm
