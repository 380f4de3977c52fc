#include "model/sublayers/delta.h"

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

void DeltaSpec::check(const ModelSpec&) const {
    require_spec(num_k_heads > 0 && num_v_heads > 0 && num_v_heads % num_k_heads == 0 && k_dim > 0 &&
                     k_dim <= most_k_dim && v_dim > 0 && conv_size > 0 && conv_size <= most_taps,
                 "layers with a state need heads of v in multiples of those of k, of 1 to ", most_k_dim,
                 " elements, and a convolution of 1 to ", most_taps, " tokens; got ", num_k_heads, " and ", num_v_heads,
                 " heads of ", k_dim, " and ", v_dim, " elements, and ", conv_size, " tokens");
}

DeltaSpec DeltaSpec::local(Shard shard) const {
    DeltaSpec own = *this;
    own.num_k_heads = num_k_heads / shard.size;
    own.num_v_heads = num_v_heads / shard.size;
    return own;
}

CacheSpec DeltaSpec::cache() const {
    return {.kind = CacheKind::none,
            .states = {{conv_size - 1, conv_dim()}, {num_v_heads, k_dim, v_dim}},
            .log_columns = conv_dim() + k_size() + v_size() + 2 * num_v_heads};
}

// Operations on an element of the state: one for the decay, two each for S^T k, the update and S^T q.
CostSpec DeltaSpec::cost() const { return {.of_token = int64_t{7} * v_size() * k_dim}; }

Delta::Delta(const ModelSpec& model, const DeltaSpec& spec, BufferPlan& plan)
    : spec_(spec), hidden_size_(model.hidden_size), eps_(model.rms_norm_eps) {
    in_ = plan.add({.name = "delta_in", .columns = spec_.padded_in_dim()});
    conv_ = plan.add({.name = "conv", .columns = spec_.conv_dim()});
    gates_ = plan.add({.name = "delta_gates", .columns = 2 * spec_.num_v_heads, .dtype = DType::float32});
    mixed_ = plan.add({.name = "mixed", .columns = spec_.v_size()});
}

void Delta::declare(ParamTable& table) {
    const auto& model = table.layer_spec().mixer_of<DeltaSpec>();
    const std::string at = table.prefix() + "linear_attn.";
    const Cut qkv = Cut::sections({model.k_size(), model.k_size(), model.v_size()}), rows = Cut::rows(equal_parts);
    table.linear(in_proj_, {.name = at + "in_proj",
                            .in_features = hidden_size_,
                            .parts = {{at + "in_proj_qkv", model.conv_dim(), qkv},
                                      {at + "in_proj_z", model.v_size(), rows},
                                      {at + "in_proj_b", model.num_v_heads, rows},
                                      {at + "in_proj_a", model.num_v_heads, rows}},
                            .timed = "qkv_proj"});
    table.tensor(conv_weight_, at + "conv1d.weight", {model.conv_dim(), 1, model.conv_size}, qkv, by_tap);
    table.tensor(decay_rate_, at + "A_log", {model.num_v_heads}, rows, negative_exp);
    table.wide(dt_bias_, at + "dt_bias", model.num_v_heads, rows);
    table.wide(norm_, at + "norm.weight", model.v_dim);
    table.linear(out_proj_, {.name = at + "out_proj",
                             .in_features = model.v_size(),
                             .parts = {{at + "out_proj", hidden_size_, Cut::columns(equal_parts)}},
                             .timed = "o_proj"});
}

std::vector<Site> Delta::sites() const { return {sites::conv, sites::attention}; }

std::vector<LinearCall> Delta::calls() const {
    return {{.in_features = hidden_size_, .out_features = spec_.conv_dim()},
            {.in_features = spec_.v_size(), .out_features = hidden_size_}};
}

// Norm, q, k and v, which a convolution mixes with those of the tokens before, and the gated delta rule.
template <class Tap>
void Delta::begin(const Step<Tap>& s, const Input& input) const {
    const TensorView in = s.view(in_).slice(1, 0, spec_.in_dim()), conv = s.view(conv_), out = s.view(mixed_);
    const int64_t z = spec_.conv_dim(), b = z + spec_.v_size(), a = b + spec_.num_v_heads;
    s.linear(in_proj_, input.x, in, input.norm);
    const StateSteps sequences = state_steps(s.batch);
    const StateLog log(s,
                       std::array{in.slice(1, 0, z), conv.slice(1, spec_.k_size(), z), in.slice(1, b, spec_.in_dim())});
    ops::causal_conv(s.backend, {.x = in.slice(1, 0, z),
                                 .weight = conv_weight_.prepared,
                                 .state = s.cache.state(s.layer, 0),
                                 .sequences = sequences,
                                 .out = conv,
                                 .x_log = log.of(0)});
    s.tap_own(sites::conv, conv, conv_);
    ops::delta_rule(s.backend, {.qkv = conv,
                                .z = in.slice(1, z, b),
                                .a = in.slice(1, a, a + spec_.num_v_heads),
                                .b = in.slice(1, b, a),
                                .decay_rate = decay_rate_.prepared,
                                .dt_bias = dt_bias_.prepared,
                                .norm = norm_.prepared,
                                .state = s.cache.state(s.layer, 1),
                                .sequences = sequences,
                                .gates = s.view(gates_),
                                .out = out,
                                .num_k_heads = spec_.num_k_heads,
                                .eps = eps_,
                                .kv_log = log.of(1),
                                .a_log = log.of(2, spec_.num_v_heads, 2 * spec_.num_v_heads),
                                .b_log = log.of(2, 0, spec_.num_v_heads)});
    log.keep(s);
    s.tap_own(sites::attention, out.reshape({out.shape(0), spec_.num_v_heads, spec_.v_dim}), mixed_);
}

template <class Tap>
void Delta::finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const {
    s.linear(out_proj_, s.view(mixed_), out, {}, residual);
}

template void Delta::begin(const Step<NoTap>&, const Input&) const;
template void Delta::begin(const Step<StepTap>&, const Input&) const;
template void Delta::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Delta::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
