// Packed weights, the linears of them, and adapters beside these.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/ops/ops.h"
#include "core/enum_names.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

LinearKind linear_kind(const std::string& text) {
    if (text == "plain") return LinearKind::plain;
    if (text == "act_mul") return LinearKind::act_mul;
    if (text == "qkv") return LinearKind::qkv;
    if (text == "by_head") return LinearKind::by_head;
    throw ConfigError("unknown kind of linear '" + text + "'; expected plain, act_mul, qkv or by_head");
}

}  // namespace

void bind_linear_ops(nb::module_& m, OpsClass& backend) {
    nb::class_<PreparedLinear>(m, "PreparedLinear", "Weights of a linear in a backend's own form.")
        .def_ro("in_features", &PreparedLinear::in_features)
        .def_ro("out_features", &PreparedLinear::out_features)
        .def_prop_ro(
            "tensors",
            [](const PreparedLinear& linear) {
                const auto [panels, scales] = linear.tensors();
                return std::pair(panels ? std::optional(panels) : std::nullopt,
                                 scales ? std::optional(scales) : std::nullopt);
            },
            "Panels and scales, as adopt_linear takes them; None where there are none.");

    backend
        .def(
            "prepare_linear",
            [](SharedBackend& shared, const std::vector<std::pair<Tensor, OptionalTensor>>& parts,
               const std::string& kind, int head_dim, const std::string& quantization,
               const std::vector<std::string>& types) {
                const InUse b(shared);
                std::vector<LinearPart> joined;
                for (const auto& [weight, bias] : parts) joined.push_back({weight, bias.value_or(Tensor())});
                for (size_t i = 0; i < std::min(types.size(), joined.size()); ++i)
                    joined[i].blocks = blocks_from_string(types[i]);
                return std::shared_ptr<PreparedLinear>(ops::prepare_linear(
                    b, std::move(joined), linear_kind(kind), head_dim, quantization_from_string(quantization)));
            },
            "parts"_a, "kind"_a = "plain", "head_dim"_a = 0, "quantization"_a = "none",
            "types"_a = std::vector<std::string>(),
            "parts: weight and bias of each. types: of parts that are blocks, as load_param takes them.")
        .def(
            "adopt_linear",
            [](SharedBackend& shared, const Tensor& panels, const OptionalTensor& scales,
               const std::vector<int64_t>& out_features, int64_t in_features, const std::string& kind, int head_dim) {
                const InUse b(shared);
                PackedSource source{.tensors = {panels, scales.value_or(Tensor())},
                                    .kind = linear_kind(kind),
                                    .head_dim = head_dim,
                                    .in_features = in_features,
                                    .columns = {0, in_features}};
                for (const int64_t rows : out_features)
                    source.parts.push_back({.out_features = rows, .rows = {{0, rows}}, .bias = {}});
                return std::shared_ptr<PreparedLinear>(static_cast<Backend&>(b).adopt_linear(source));
            },
            "panels"_a, "scales"_a, "out_features"_a, "in_features"_a, "kind"_a = "plain", "head_dim"_a = 0,
            "A linear of the tensors of another one; out_features: of each part.")
        .def(
            "unpack_linear",
            [](SharedBackend& shared, const PreparedLinear& linear, size_t part) {
                const InUse b(shared);
                return static_cast<Backend&>(b).unpack_linear(linear, part);
            },
            "linear"_a, "part"_a = 0, Release())
        .def(
            "linear",
            [](SharedBackend& shared, const Tensor& x, const PreparedLinear& weight, const Tensor& out,
               const OptionalTensor& residual, const OptionalTensor& norm, const OptionalTensor& scratch, float eps,
               const std::string& activation) {
                const InUse b(shared);
                ops::linear(b, {.x = x,
                                .weight = weight,
                                .norm = {.weight = optional_view(norm), .scratch = optional_view(scratch), .eps = eps},
                                .residual = optional_view(residual),
                                .out = output("linear", "out", out),
                                .activation = from_string<Activation>("activation", activation)});
            },
            "x"_a, "weight"_a, "out"_a, "residual"_a = nb::none(), "norm"_a = nb::none(), "scratch"_a = nb::none(),
            "eps"_a = 0.0f, "activation"_a = "silu", Release(),
            "With norm ([in_features]): of rms_norm(x); scratch is as large as x.")
        .def(
            "linear_act",
            [](SharedBackend& shared, const Tensor& x, const PreparedLinear& weight, const Tensor& out,
               const std::string& activation) {
                const InUse b(shared);
                ops::linear_act(b, {.x = x,
                                    .weight = weight,
                                    .norm = {},
                                    .residual = {},
                                    .out = output("linear_act", "out", out),
                                    .activation = from_string<Activation>("activation", activation)});
            },
            "x"_a, "weight"_a, "out"_a, "activation"_a, Release(), "activation(linear of a plain weight).")
        .def(
            "head_linear",
            [](SharedBackend& shared, const Tensor& x, const PreparedLinear& weight, const Tensor& out) {
                const InUse b(shared);
                ops::head_linear(b, {.x = x, .weight = weight, .out = output("head_linear", "out", out)});
            },
            "x"_a, "weight"_a, "out"_a, Release(), "x: [num_tokens, num_heads, in_features]; weight: by_head.")
        .def(
            "lora",
            [](SharedBackend& shared, const Tensor& x,
               const std::vector<
                   std::tuple<std::shared_ptr<PreparedLinear>, std::shared_ptr<PreparedLinear>, float, Tensor>>& parts,
               const Tensor& out, const Tensor& inner, const Tensor& delta) {
                const InUse own(shared);
                std::vector<LoraPart> listed;
                for (const auto& [a, b, scale, rows] : parts)
                    listed.push_back({.a = a.get(), .b = b.get(), .scale = scale, .rows = rows});
                ops::lora(own, {.x = x,
                                .parts = listed,
                                .out = output("lora", "out", out),
                                .inner = output("lora", "inner", inner),
                                .delta = output("lora", "delta", delta)});
            },
            "x"_a, "parts"_a, "out"_a, "inner"_a, "delta"_a, Release(),
            "parts: (a, b, scale, rows) of each adapter; out is changed in place.");
}

}  // namespace infinilm
