#include "model/sublayers/mlp.h"

#include <algorithm>
#include <cmath>

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

void declare_mlp(ParamTable& table, LinearWeights& gate_up, LinearWeights& down, const std::string& at,
                 const MlpSpec& whole, bool is_expert, int64_t size, bool on_host) {
    const int64_t hidden = size > 0 ? size : table.model().hidden_size, intermediate_size = whole.intermediate_size;
    const bool gated = whole.gated;
    const Cut rows = Cut::rows(inner_parts);
    std::vector<ParamTable::Part> parts{{at + "up_proj", intermediate_size, rows}};
    if (gated) parts.insert(parts.begin(), {at + "gate_proj", intermediate_size, rows});
    table.linear(gate_up, {.name = at + (gated ? "gate_up_proj" : "up_proj"),
                           .in_features = hidden,
                           .parts = parts,
                           .timed = is_expert ? "experts" : "gate_up_proj",
                           .bias = whole.bias,
                           .kind = gated ? LinearKind::act_mul : LinearKind::plain,
                           .adaptable = !is_expert,
                           .on_host = on_host});
    table.linear(down, {.name = at + "down_proj",
                        .in_features = intermediate_size,
                        .parts = {{at + "down_proj", hidden, Cut::columns(inner_parts)}},
                        .timed = is_expert ? "experts" : "down_proj",
                        .bias = whole.bias || whole.down_bias,
                        .adaptable = !is_expert,
                        .on_host = on_host});
}

void MlpSpec::check(const ModelSpec&) const {
    require_spec(intermediate_size > 0, "intermediate_size must be positive, got ", intermediate_size);
    require_spec(!gate_deviations || (gated && std::isfinite(*gate_deviations)),
                 "gate_deviations are of an MLP with a gate, and finite");
    const bool clamps = activation == Activation::clamped_silu;
    require_spec(clamps == (limit > 0) && (gated || !clamps),
                 "limit: clamped_silu, of an MLP with a gate, needs one > 0, and others have none; got ", limit);
}

MlpSpec MlpSpec::local(Shard shard) const {
    MlpSpec own = *this;
    own.intermediate_size = static_cast<int>(inner_of(intermediate_size, shard).size());
    return own;
}

Mlp::Mlp(const ModelSpec& model, const MlpSpec& spec, BufferPlan& plan, bool hooked, bool is_shared)
    : hidden_size_(model.hidden_size),
      inner_size_(spec.intermediate_size),
      gated_(spec.gated),
      hooked_(hooked),
      activation_(spec.activation),
      gate_deviations_(spec.gate_deviations),
      limit_(spec.limit),
      clipped_(model.clipped_linears),
      is_shared_(is_shared),
      joined_(spec.gated && !is_apart(spec.activation) && !clipped_ && !gate_deviations_ && !is_shared) {
    inner_ = plan.add({.name = "inner", .columns = inner_size_});
    // Layers with joined linears may be beside others, whose steps without hooks need the buffer, too.
    gate_up_ = plan.add({.name = joined_ ? "gate_up" : "gate_up_apart",
                         .columns = spec.gated ? 2 * inner_size_ : 0,
                         .tapped = joined_});
    moments_ =
        plan.add({.name = "gate_moments", .columns = gate_deviations_ ? 1 : 0, .rows = 2, .dtype = DType::float32});
}

void Mlp::declare(ParamTable& table, const std::string& at, const MlpSpec& whole) {
    declare_mlp(table, gate_up_proj_, down_proj_, at, whole, false, hidden_size_);
    share_ = static_cast<float>(inner_size_) / static_cast<float>(whole.intermediate_size);
    if (activation_ != Activation::xielu) return;
    // Both are softplus of what is learned, so that neither is negative; alpha_n is at least the slope in 0, 1 / 2.
    const auto number = [&](VectorWeights& weights, const char* name, float& out, float least) {
        table.tensor(weights, at + name, {1}, {}, [&out, least](Backend& backend, const VectorWeights& own) {
            const float x = *widened(backend, own.loaded).as<const float>();
            out = least + std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)));
            return Tensor();  // the host reads it
        });
    };
    number(alpha_p_own_, "act_fn.alpha_p", alpha_p_, 0);
    number(alpha_n_own_, "act_fn.alpha_n", alpha_n_, 0.5f);
}

void Mlp::declare(ParamTable& table) { declare(table, table.prefix() + "mlp.", *table.layer_spec().mlp); }

std::vector<Site> Mlp::sites() const {
    std::vector<Site> out{sites::up_proj, sites::activation};
    if (gated_) out.push_back(sites::gate_proj);
    return out;
}

std::vector<LinearCall> Mlp::calls() const {
    return {{.in_features = hidden_size_, .out_features = inner_size_},
            {.in_features = inner_size_, .out_features = hidden_size_}};
}

// Norm, gate and up, activation(gate) * up; or without gate, activation(up).
template <class Tap>
void Mlp::begin(const Step<Tap>& s, const Input& in) const {
    const TensorView inner = s.view(inner_);
    LinearParams linear{.x = in.x,
                        .weight = *gate_up_proj_.prepared,
                        .norm = in.norm,
                        .residual = {},
                        .out = inner,
                        .activation = activation_};
    if (!Tap::active && joined_) return ops::linear(s.backend, linear);
    const bool is_plain = activation_ != Activation::xielu && !clipped_ && !is_shared_;
    if (!Tap::active && !gated_ && is_plain) return ops::linear_act(s.backend, linear);

    const Buffer& buffer = gated_ ? gate_up_ : inner_;
    const TensorView gate_up = s.view(buffer);
    s.linear(gate_up_proj_, in.x, gate_up, in.norm);
    if (gated_ && hooked_) s.tap_own(sites::gate_proj, gate_up.slice(1, 0, inner_size_), buffer);
    if (gate_deviations_) sparsify(s, gate_up.slice(1, 0, inner_size_));
    const TensorView up = gated_ ? gate_up.slice(1, inner_size_, 2 * inner_size_) : gate_up;
    if (hooked_) s.tap_own(sites::up_proj, up, buffer);
    ops::act_mul(s.backend, {.gate_up = gate_up,
                             .out = inner,
                             .activation = activation_,
                             .alpha_p = alpha_p_,
                             .alpha_n = alpha_n_,
                             .limit = limit_});
    if (hooked_) s.tap_own(sites::activation, inner, inner_);
}

// Mean and variance are those of all ranks, which have columns of the gate.
template <class Tap>
void Mlp::sparsify(const Step<Tap>& s, const TensorView& gate) const {
    const TensorView moments = s.view(moments_), mean = moments.slice(0, 0, s.num_tokens()),
                     variance = moments.slice(0, s.num_tokens(), 2 * s.num_tokens());
    ops::row_moment(s.backend, {.x = gate, .out = mean, .multiplier = share_});
    if (s.num_ranks() > 1) s.ranks.all_reduce(mean);
    ops::row_moment(s.backend, {.x = gate, .centre = mean, .out = variance, .multiplier = share_});
    if (s.num_ranks() > 1) s.ranks.all_reduce(variance);
    ops::sparsify(s.backend, {.x = gate, .mean = mean, .variance = variance, .deviations = *gate_deviations_});
}

template <class Tap>
void Mlp::finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const {
    s.linear(down_proj_, s.view(inner_), out, {}, residual);
}

template void Mlp::begin(const Step<NoTap>&, const Input&) const;
template void Mlp::begin(const Step<StepTap>&, const Input&) const;
template void Mlp::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Mlp::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
