#include "model/sublayers/laurel.h"

#include "ops/ops.h"

namespace infinilm {

void LaurelSpec::check(const ModelSpec& model) const {
    require_spec(rank > 0, "the rank of a learned residual layer must be positive, got ", rank);
    require_spec(model.pre_norms && model.post_norms && !model.parallel_blocks,
                 "a learned residual layer reads the norm of attention, and has one of its own behind it");
}

Laurel::Laurel(const ModelSpec& model, const LaurelSpec& spec, BufferPlan& plan)
    : hidden_size_(model.hidden_size), rank_(spec.rank), inner_(plan.add({.name = "laurel", .columns = rank_})) {}

void Laurel::declare(ParamTable& table) {
    const auto linear = [&](LinearWeights& weights, const char* name, int64_t in_features, int64_t out_features) {
        const std::string module = concat(table.prefix(), "laurel.", name);
        table.linear(weights, {.name = module,
                               .in_features = in_features,
                               .parts = {{module, out_features}},
                               .timed = "laurel",
                               .quantised = false});
    };
    linear(left_, "linear_left", hidden_size_, rank_);
    linear(right_, "linear_right", rank_, hidden_size_);
}

std::vector<LinearCall> Laurel::calls() const {
    return {{.in_features = hidden_size_, .out_features = rank_}, {.in_features = rank_, .out_features = hidden_size_}};
}

template <class Tap>
void Laurel::begin(const Step<Tap>& s, const Input& in) const {
    s.linear(left_, in.x, s.view(inner_));
    ops::add_rms_norm(s.backend, {.x = in.x, .residual = s.x, .weight = {}, .out = in.x, .eps = 0});
}

template <class Tap>
void Laurel::finish(const Step<Tap>& s, const TensorView&, const TensorView& out) const {
    s.linear(right_, s.view(inner_), out);
}

template void Laurel::begin(const Step<NoTap>&, const Input&) const;
template void Laurel::begin(const Step<StepTap>&, const Input&) const;
template void Laurel::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Laurel::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
