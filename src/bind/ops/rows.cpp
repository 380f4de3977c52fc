// Embedding, norms, activations and what else works on rows.
#include "bind/ops/ops.h"
#include "core/check.h"
#include "core/enum_names.h"
#include "ops/ops.h"

namespace infinilm {

void bind_row_ops(OpsClass& backend) {
    backend
        .def(
            "embedding",
            [](SharedBackend& shared, const Tensor& ids, const Tensor& table, const Tensor& out,
               std::optional<int> first_id, const std::string& quantization, float multiplier, int known_ids) {
                const InUse b(shared);
                Check check("embedding");
                check.tensor("table", table, {"vocab_size", "hidden_size"});
                const auto prepared = ops::prepare_linear(b, {{.weight = table, .bias = {}}}, LinearKind::plain, 0,
                                                          quantization_from_string(quantization));
                ops::embedding(b, {.ids = ids,
                                   .table = *prepared,
                                   .out = output("embedding", "out", out),
                                   .first_id = first_id,
                                   .multiplier = multiplier,
                                   .known_ids = known_ids});
            },
            "ids"_a, "table"_a, "out"_a, "first_id"_a = nb::none(), "quantization"_a = "none", "multiplier"_a = 1.0f,
            "known_ids"_a = 0, Release(),
            "table: [vocab_size, hidden_size], prepared for this call, or the rows of it from first_id on.")
        .def(
            "rms_norm",
            [](SharedBackend& shared, const Tensor& x, const Tensor& weight, const Tensor& out, float eps,
               const OptionalTensor& mean_square, int num_groups) {
                const InUse b(shared);
                ops::rms_norm(b, {.x = x,
                                  .weight = weight,
                                  .out = output("rms_norm", "out", out),
                                  .eps = eps,
                                  .mean_square = optional_view(mean_square),
                                  .num_groups = num_groups});
            },
            "x"_a, "weight"_a, "out"_a, "eps"_a, "mean_square"_a = nb::none(), "num_groups"_a = 1, Release())
        .def(
            "mean_square",
            [](SharedBackend& shared, const Tensor& x, const Tensor& out, float multiplier) {
                const InUse b(shared);
                ops::mean_square(b, {.x = x, .out = output("mean_square", "out", out), .multiplier = multiplier});
            },
            "x"_a, "out"_a, "multiplier"_a = 1.0f, Release())
        .def(
            "add_rms_norm",
            [](SharedBackend& shared, const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
               const Tensor& out, float eps, float multiplier, float scale) {
                const InUse b(shared);
                ops::add_rms_norm(b, {.x = x,
                                      .residual = output("add_rms_norm", "residual", residual),
                                      .weight = optional_view(weight),
                                      .out = output("add_rms_norm", "out", out),
                                      .eps = eps,
                                      .multiplier = multiplier,
                                      .scale = scale});
            },
            "x"_a, "residual"_a, "weight"_a.none(), "out"_a, "eps"_a, "multiplier"_a = 1.0f, "scale"_a = 1.0f,
            Release())
        .def(
            "row_moment",
            [](SharedBackend& shared, const Tensor& x, const Tensor& out, float multiplier,
               const OptionalTensor& centre) {
                const InUse b(shared);
                ops::row_moment(b, {.x = x,
                                    .centre = optional_view(centre),
                                    .out = output("row_moment", "out", out),
                                    .multiplier = multiplier});
            },
            "x"_a, "out"_a, "multiplier"_a = 1.0f, "centre"_a = nb::none(), Release(),
            "out = multiplier * mean(x), or with a centre, multiplier * mean((x - centre)^2), of each row.")
        .def(
            "sparsify",
            [](SharedBackend& shared, const Tensor& x, const Tensor& mean, const Tensor& variance, float deviations) {
                const InUse b(shared);
                ops::sparsify(
                    b, {.x = output("sparsify", "x", x), .mean = mean, .variance = variance, .deviations = deviations});
            },
            "x"_a, "mean"_a, "variance"_a, "deviations"_a, Release(),
            "x = max(x - (mean + deviations * sqrt(variance)), 0), in place.")
        .def(
            "match_rms",
            [](SharedBackend& shared, const Tensor& x, const Tensor& like, float least) {
                const InUse b(shared);
                ops::match_rms(b, {.x = output("match_rms", "x", x), .like = like, .least = least});
            },
            "x"_a, "like"_a, "least"_a, Release(), "x = x * rms(like) / max(rms(x), sqrt(least)), in place.")
        .def(
            "mix_streams",
            [](SharedBackend& shared, const Tensor& x, const Tensor& streams, const Tensor& router,
               const Tensor& coefficients, bool corrects, float eps, const OptionalTensor& scale,
               const OptionalTensor& scaled) {
                const InUse b(shared);
                ops::mix_streams(b, {.x = output("mix_streams", "x", x),
                                     .streams = output("mix_streams", "streams", streams),
                                     .router = router,
                                     .coefficients = coefficients,
                                     .corrects = corrects,
                                     .eps = eps,
                                     .scale = optional_view(scale),
                                     .scaled = scaled ? output("mix_streams", "scaled", *scaled) : TensorView()});
            },
            "x"_a, "streams"_a, "router"_a, "coefficients"_a, "corrects"_a, "eps"_a, "scale"_a = nb::none(),
            "scaled"_a = nb::none(), Release(),
            "A step of alternating updates: x and streams [num_streams, num_tokens, hidden_size], in place.")
        .def(
            "act_mul",
            [](SharedBackend& shared, const Tensor& gate_up, const Tensor& out, const std::string& activation,
               const OptionalTensor& up, float alpha_p, float alpha_n, float limit) {
                const InUse b(shared);
                ops::act_mul(b, {.gate_up = gate_up,
                                 .out = output("act_mul", "out", out),
                                 .activation = from_string<Activation>("activation", activation),
                                 .up = optional_view(up),
                                 .alpha_p = alpha_p,
                                 .alpha_n = alpha_n,
                                 .limit = limit});
            },
            "gate_up"_a, "out"_a, "activation"_a = "silu", "up"_a = nb::none(), "alpha_p"_a = 0.0f, "alpha_n"_a = 0.0f,
            "limit"_a = 0.0f, Release())
        .def(
            "clip",
            [](SharedBackend& shared, const Tensor& x, const Tensor& out, float low, float high) {
                const InUse b(shared);
                ops::clip(b, {.x = x, .out = output("clip", "out", out), .low = low, .high = high});
            },
            "x"_a, "out"_a, "low"_a, "high"_a, Release(), "out = min(max(x, low), high); NaN stays.")
        .def(
            "soft_cap",
            [](SharedBackend& shared, const Tensor& x, float cap) {
                const InUse b(shared);
                ops::soft_cap(b, {.x = output("soft_cap", "x", x), .cap = cap});
            },
            "x"_a, "cap"_a, Release(), "x = cap * tanh(x / cap), in place.")
        .def(
            "gather_rows",
            [](SharedBackend& shared, const Tensor& x, const Tensor& rows, const Tensor& out) {
                const InUse b(shared);
                ops::gather_rows(b, {.x = x, .rows = rows, .out = output("gather_rows", "out", out)});
            },
            "x"_a, "rows"_a, "out"_a, Release())
        .def(
            "sum_parts",
            [](SharedBackend& shared, const Tensor& parts, const Tensor& out) {
                const InUse b(shared);
                ops::sum_parts(b, {.parts = parts, .out = output("sum_parts", "out", out)});
            },
            "parts"_a, "out"_a, Release());
}

}  // namespace infinilm
