#include "model/sublayers/own_vectors.h"

#include <cmath>

#include "ops/ops.h"

namespace infinilm {

namespace {

constexpr float half = 0.70710678f;  // of each of the two that are added up

Buffer all_vectors(const ModelSpec& spec, BufferPlan& plan) {
    return plan.add({.name = "per_layer", .columns = int64_t{spec.num_layers} * spec.own_vectors->size});
}

}  // namespace

void OwnVectorsSpec::check(const ModelSpec& model) const {
    require_spec(pad_id >= 0 && pad_id < vocab_size, "the table of vectors of each layer has no row ", pad_id);
    require_spec(activation != Activation::xielu, "vectors of each layer have no activation with numbers of its own");
    require_spec(size > 0 && model.post_norms, "vectors of each layer need post_norms");
}

OwnVectors::OwnVectors(const ModelSpec& model, BufferPlan& plan)
    : hidden_size_(model.hidden_size),
      size_(model.own_vectors->size),
      num_layers_(model.num_layers),
      vocab_size_(model.own_vectors->vocab_size),
      eps_(model.rms_norm_eps),
      vectors_(all_vectors(model, plan)),
      projected_(plan.add({.name = "per_layer_projected", .columns = num_layers_ * size_})) {}

void OwnVectors::declare(ParamTable& table) {
    const int64_t all = num_layers_ * size_;
    table.linear(table_, {.name = "model.embed_tokens_per_layer",
                          .in_features = all,
                          .parts = {{"model.embed_tokens_per_layer", vocab_size_, Cut::rows(vocab_parts)}},
                          .timed = "embedding",
                          .vocabulary = true});
    table.linear(projection_, {.name = "model.per_layer_model_projection",
                               .in_features = hidden_size_,
                               .parts = {{"model.per_layer_model_projection", all}},
                               .timed = "per_layer",
                               .quantised = false});
    table.norm(norm_, "model.per_layer_projection_norm", size_, {}, half);
}

std::vector<LinearCall> OwnVectors::calls() const {
    return {{.in_features = hidden_size_, .out_features = num_layers_ * size_}};
}

template <class Tap>
void OwnVectors::run(const Step<Tap>& s) const {
    const TensorView vectors = s.view(vectors_), projected = s.view(projected_);
    const TensorView ids = s.batch.own_vector_ids ? s.batch.own_vector_ids : s.batch.input_ids;
    s.embed(ids, table_, vocab_size_, half * std::sqrt(static_cast<float>(size_)), vectors, vocab_size_);
    s.linear(projection_, s.x, projected);
    const auto of_layers = [&](const TensorView& view) { return view.reshape({view.shape(0) * num_layers_, size_}); };
    // The linear's result times hidden_size^-0.5 is what is normed: that changes eps alone.
    ops::rms_norm(s.backend, {.x = of_layers(projected),
                              .weight = norm_.prepared,
                              .out = of_layers(projected),
                              .eps = eps_ * static_cast<float>(hidden_size_)});
    ops::add_rms_norm(s.backend, {.x = of_layers(projected),
                                  .residual = of_layers(vectors),
                                  .weight = {},
                                  .out = of_layers(projected),
                                  .eps = 0});
}

OwnVector::OwnVector(const ModelSpec& spec, int layer, BufferPlan& plan)
    : hidden_size_(spec.hidden_size),
      size_(spec.own_vectors->size),
      layer_(layer),
      activation_(spec.own_vectors->activation),
      vectors_(all_vectors(spec, plan)),
      gate_(plan.add({.name = "per_layer_gate", .columns = size_})) {}

void OwnVector::declare(ParamTable& table) {
    const std::string gate = table.prefix() + "per_layer_input_gate",
                      projection = table.prefix() + "per_layer_projection";
    table.linear(gate_proj_, {.name = gate,
                              .in_features = hidden_size_,
                              .parts = {{gate, size_}},
                              .timed = "per_layer",
                              .quantised = false});
    table.linear(projection_, {.name = projection,
                               .in_features = size_,
                               .parts = {{projection, hidden_size_}},
                               .timed = "per_layer",
                               .quantised = false});
}

std::vector<LinearCall> OwnVector::calls() const {
    return {{.in_features = hidden_size_, .out_features = size_}, {.in_features = size_, .out_features = hidden_size_}};
}

template <class Tap>
void OwnVector::begin(const Step<Tap>& s, const Input& in) const {
    const TensorView gate = s.view(gate_), own = s.view(vectors_).slice(1, layer_ * size_, (layer_ + 1) * size_);
    s.linear(gate_proj_, in.x, gate);
    ops::act_mul(s.backend, {.gate_up = gate, .out = gate, .activation = activation_, .up = own});
    s.tap_common(sites::per_layer_input, gate, gate_);
}

template <class Tap>
void OwnVector::finish(const Step<Tap>& s, const TensorView&, const TensorView& out) const {
    s.linear(projection_, s.view(gate_), out);
}

template void OwnVectors::run(const Step<NoTap>&) const;
template void OwnVectors::run(const Step<StepTap>&) const;
template void OwnVector::begin(const Step<NoTap>&, const Input&) const;
template void OwnVector::begin(const Step<StepTap>&, const Input&) const;
template void OwnVector::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void OwnVector::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
