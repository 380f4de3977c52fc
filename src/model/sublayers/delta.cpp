#include "model/sublayers/delta.h"

#include <algorithm>
#include <array>

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

void DeltaSpec::check(const ModelSpec&) const {
    require_spec(num_k_heads > 0 && num_v_heads > 0 && num_v_heads % num_k_heads == 0 && k_dim > 0 &&
                     k_dim <= most_k_dim && v_dim > 0 && conv_size > 0 && conv_size <= most_taps,
                 "layers with a state need heads of v in multiples of those of k, of 1 to ", most_k_dim,
                 " elements, and a convolution of 1 to ", most_taps, " tokens; got ", num_k_heads, " and ", num_v_heads,
                 " heads of ", k_dim, " and ", v_dim, " elements, and ", conv_size, " tokens");
    require_spec(gate_rank >= 0 && (gate_rank == 0 || by_element), "gate_rank is of decays by_element; got ",
                 gate_rank);
    require_spec(apart || !by_element, "decays by_element are of q, k and v that are apart");
    require_spec(lower_bound <= 0, "lower_bound must be 0 or negative, got ", lower_bound);
    require_spec(norm_eps >= 0, "norm_eps must be 0 or positive, got ", norm_eps);
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
            .log_columns = conv_dim() + k_size() + v_size() + num_decays() + num_v_heads};
}

// Operations on an element of the state: one for the decay, two each for S^T k, the update and S^T q.
CostSpec DeltaSpec::cost() const { return {.of_token = int64_t{7} * v_size() * k_dim}; }

Delta::Delta(const ModelSpec& model, const DeltaSpec& spec, BufferPlan& plan)
    : spec_(spec), hidden_size_(model.hidden_size), eps_(spec.norm_eps > 0 ? spec.norm_eps : model.rms_norm_eps) {
    in_ = plan.add({.name = "delta_in", .columns = spec_.padded_in_dim()});
    conv_ = plan.add({.name = "conv", .columns = spec_.conv_dim()});
    gates_ = plan.add({.name = "delta_gates", .columns = 2 * spec_.num_v_heads, .dtype = DType::float32});
    mixed_ = plan.add({.name = "mixed", .columns = spec_.v_size()});
    const bool low_rank = spec_.gate_rank > 0;
    decay_ = plan.add({.name = "delta_decay", .columns = low_rank ? spec_.num_decays() : 0});
    gate_ = plan.add({.name = "delta_gate", .columns = low_rank ? spec_.v_size() : 0});
}

void Delta::declare(ParamTable& table) {
    const auto& model = table.layer_spec().mixer_of<DeltaSpec>();
    const std::string at = table.prefix() + "linear_attn.";
    const Cut qkv = Cut::sections({model.k_size(), model.k_size(), model.v_size()}), rows = Cut::rows(equal_parts);
    if (model.apart) {
        declare_apart(table, model, at);
    } else {
        table.linear(in_proj_, {.name = at + "in_proj",
                                .in_features = hidden_size_,
                                .parts = {{at + "in_proj_qkv", model.conv_dim(), qkv},
                                          {at + "in_proj_z", model.v_size(), rows},
                                          {at + "in_proj_b", model.num_v_heads, rows},
                                          {at + "in_proj_a", model.num_v_heads, rows}},
                                .timed = "qkv_proj"});
        table.tensor(conv_weight_, at + "conv1d.weight", {model.conv_dim(), 1, model.conv_size}, qkv, by_tap);
    }
    table.tensor(decay_rate_, at + "A_log", {model.num_v_heads}, rows, negative_exp);
    table.wide(dt_bias_, at + "dt_bias", model.num_decays(), rows);
    table.wide(norm_, at + "norm.weight", model.v_dim);
    table.linear(out_proj_, {.name = at + "out_proj",
                             .in_features = model.v_size(),
                             .parts = {{at + "out_proj", hidden_size_, Cut::columns(equal_parts)}},
                             .timed = "o_proj"});
}

void Delta::declare_apart(ParamTable& table, const DeltaSpec& model, const std::string& at) {
    const Cut rows = Cut::rows(equal_parts), whole;
    const bool low_rank = model.gate_rank > 0;
    table.linear(in_proj_, {.name = at + "in_proj",
                            .in_features = hidden_size_,
                            .parts = {{at + "q_proj", model.k_size(), rows},
                                      {at + "k_proj", model.k_size(), rows},
                                      {at + "v_proj", model.v_size(), rows},
                                      {at + (low_rank ? "g_a_proj" : "g_proj"), model.z_dim(), low_rank ? whole : rows},
                                      {at + (low_rank ? "f_a_proj" : "f_proj"), model.a_dim(), low_rank ? whole : rows},
                                      {at + "b_proj", model.num_v_heads, rows}},
                            .timed = "qkv_proj"});
    const auto second = [&](LinearWeights& weights, const std::string& name, int64_t size) {
        table.linear(
            weights,
            {.name = name, .in_features = model.gate_rank, .parts = {{name, size, rows}}, .timed = "qkv_proj"});
    };
    if (low_rank) second(decay_proj_, at + "f_b_proj", model.num_decays());
    if (low_rank) second(gate_proj_, at + "g_b_proj", model.v_size());
    // One op convolves q, k and v: the last of the three tensors makes the weight of all.
    const auto none = [](Backend&, const VectorWeights&) { return Tensor(); };
    table.tensor(q_conv_, at + "q_conv1d.weight", {model.k_size(), 1, model.conv_size}, rows, none);
    table.tensor(k_conv_, at + "k_conv1d.weight", {model.k_size(), 1, model.conv_size}, rows, none);
    table.tensor(conv_weight_, at + "v_conv1d.weight", {model.v_size(), 1, model.conv_size}, rows,
                 [this](Backend& backend, const VectorWeights& v) {
                     const std::array parts{by_tap(backend, q_conv_), by_tap(backend, k_conv_), by_tap(backend, v)};
                     const Tensor all = allocate_host(DType::float32, {spec_.conv_size, spec_.conv_dim()});
                     float* out = all.as<float>();
                     for (int64_t tap = 0; tap < spec_.conv_size; ++tap)
                         for (const Tensor& part : parts)
                             out = std::copy_n(part.as<const float>() + tap * part.shape(1), part.shape(1), out);
                     return all;
                 });
}

std::vector<Site> Delta::sites() const { return {sites::conv, sites::attention}; }

std::vector<LinearCall> Delta::calls() const {
    std::vector<LinearCall> calls{{.in_features = hidden_size_, .out_features = spec_.conv_dim()},
                                  {.in_features = spec_.v_size(), .out_features = hidden_size_}};
    if (spec_.gate_rank > 0)
        calls.push_back({.in_features = spec_.gate_rank, .out_features = std::max(spec_.num_decays(), spec_.v_size())});
    return calls;
}

// Norm, q, k and v, which a convolution mixes with those of the tokens before, and the gated delta rule.
template <class Tap>
void Delta::begin(const Step<Tap>& s, const Input& input) const {
    const TensorView in = s.view(in_).slice(1, 0, spec_.in_dim()), conv = s.view(conv_), out = s.view(mixed_);
    const int64_t behind_z = spec_.conv_dim() + spec_.z_dim(), end = spec_.in_dim();
    const int64_t b_begin = spec_.apart ? end - spec_.num_v_heads : behind_z;
    const int64_t a_begin = spec_.apart ? behind_z : behind_z + spec_.num_v_heads;
    TensorView z = in.slice(1, spec_.conv_dim(), behind_z), a = in.slice(1, a_begin, a_begin + spec_.a_dim());
    s.linear(in_proj_, input.x, in, input.norm);
    const StateSteps sequences = state_steps(s.batch);
    if (spec_.gate_rank > 0) {
        const TensorView decay = s.view(decay_), gate = s.view(gate_);
        s.linear(decay_proj_, a, decay), s.linear(gate_proj_, z, gate);
        a = decay, z = gate;
    }
    const TensorView x = in.slice(1, 0, spec_.conv_dim()), b = in.slice(1, b_begin, b_begin + spec_.num_v_heads);
    const StateLog log(s, std::array{x, conv.slice(1, spec_.k_size(), spec_.conv_dim()), a, b});
    ops::causal_conv(s.backend, {.x = x,
                                 .weight = conv_weight_.prepared,
                                 .state = s.cache.state(s.layer, 0),
                                 .sequences = sequences,
                                 .out = conv,
                                 .x_log = log.of(0)});
    s.tap_own(sites::conv, conv, conv_);
    ops::delta_rule(s.backend, {.qkv = conv,
                                .z = z,
                                .a = a,
                                .b = b,
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
                                .a_log = log.of(2),
                                .b_log = log.of(3),
                                .by_element = spec_.by_element,
                                .sigmoid_gate = spec_.by_element,
                                .doubled_beta = spec_.doubled_beta,
                                .lower_bound = spec_.lower_bound});
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
