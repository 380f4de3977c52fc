#include "model/sublayers/mamba.h"

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// Sections of rows, of which B and C are of groups: those of a model's only group are whole on every rank.
Cut sections_of(const MambaSpec& model, std::vector<int64_t> sizes, std::vector<bool> of_groups) {
    return Cut::rows([sizes = std::move(sizes), of_groups = std::move(of_groups), whole = model.num_groups == 1](
                         int64_t, Shard shard) {
        std::vector<Range> ranges;
        int64_t before = 0;
        for (size_t i = 0; i < sizes.size(); before += sizes[i++]) {
            const Range own = whole && of_groups[i] ? Range{0, sizes[i]} : equal_parts(sizes[i], shard)[0];
            ranges.push_back({before + own.begin, before + own.end});
        }
        return joined(ranges);
    });
}

}  // namespace

void MambaSpec::check(const ModelSpec&) const {
    require_spec(num_groups > 0 && num_heads > 0 && num_heads % num_groups == 0 && head_dim > 0 && state_dim > 0 &&
                     state_dim <= most_k_dim && conv_size > 0 && conv_size <= most_taps,
                 "Mamba layers need heads in multiples of their groups, states of 1 to ", most_k_dim,
                 " elements, and a convolution of 1 to ", most_taps, " tokens; got ", num_heads, " heads of ", head_dim,
                 " in ", num_groups, " groups, states of ", state_dim, ", and ", conv_size, " tokens");
    require_spec(dt_min <= dt_max, "dt_min (", dt_min, ") must be at most dt_max (", dt_max, ")");
}

std::vector<Divided> MambaSpec::divided() const {
    std::vector<Divided> all{{"heads of Mamba layers", num_heads}};
    if (num_groups > 1) all.push_back({"groups of Mamba layers", num_groups});
    return all;
}

MambaSpec MambaSpec::local(Shard shard) const {
    MambaSpec own = *this;
    own.num_heads = num_heads / shard.size;
    if (num_groups > 1) own.num_groups = num_groups / shard.size;
    return own;
}

CacheSpec MambaSpec::cache() const {
    return {.kind = CacheKind::none,
            .states = {{conv_size - 1, conv_dim()}, {num_heads, state_dim, head_dim}},
            .log_columns = conv_dim() + size() + group_size() + num_heads};
}

// Operations on an element of the state: one for the decay, two each for the update and S^T C.
CostSpec MambaSpec::cost() const { return {.of_token = int64_t{5} * size() * state_dim}; }

Mamba::Mamba(const ModelSpec& model, const MambaSpec& spec, BufferPlan& plan)
    : spec_(spec), hidden_size_(model.hidden_size), eps_(model.rms_norm_eps) {
    in_ = plan.add({.name = "mamba_in", .columns = spec_.padded_in_dim()});
    conv_ = plan.add({.name = "conv", .columns = spec_.conv_dim()});
    gates_ = plan.add({.name = "mamba_gates", .columns = 2 * spec_.num_heads, .dtype = DType::float32});
    // Not "mixed": attention may have begun before this mixer ends.
    scanned_ = plan.add({.name = "scanned", .columns = spec_.size()});
    const bool is_one_group = spec_.norm != GateNorm::none && spec_.num_groups == 1;
    mean_square_ = plan.add({.name = "mean_square", .columns = is_one_group ? 1 : 0, .dtype = DType::float32});
}

void Mamba::declare(ParamTable& table) {
    const auto& model = table.layer_spec().mixer_of<MambaSpec>();
    const std::string at = table.prefix() + "mamba.";
    const int64_t size = model.size(), group_size = model.group_size(), conv_dim = model.conv_dim();
    norm_of_all_ranks_ = model.norm != GateNorm::none && model.num_heads > spec_.num_heads && model.num_groups == 1;
    const Cut rows = Cut::rows(equal_parts);
    const Cut conv = sections_of(model, {size, group_size, group_size}, {false, true, true});
    table.linear(in_proj_, {.name = at + "in_proj",
                            .in_features = hidden_size_,
                            .parts = {{at + "in_proj", model.in_dim(),
                                       sections_of(model, {size, size, group_size, group_size, model.num_heads},
                                                   {false, false, true, true, false})}},
                            .timed = "qkv_proj",
                            .bias = model.proj_bias});
    // The convolution is linear in what the first linear gives, so its weights take the multipliers of x, B and C.
    table.tensor(conv_weight_, at + "conv1d.weight", {conv_dim, 1, model.conv_size}, conv,
                 [own = spec_](Backend& backend, const VectorWeights& weight) {
                     const Tensor taps = by_tap(backend, weight);
                     const int64_t b = own.size(), c = b + own.group_size();
                     for (int64_t i = 0; i < taps.numel(); ++i) {
                         const int64_t channel = i % own.conv_dim();
                         taps.as<float>()[i] *= channel < b   ? own.x_multiplier
                                                : channel < c ? own.b_multiplier
                                                              : own.c_multiplier;
                     }
                     return taps;
                 });
    if (model.conv_bias) table.wide(conv_bias_, at + "conv1d.bias", conv_dim, conv);
    table.tensor(decay_rate_, at + "A_log", {model.num_heads}, rows, negative_exp);
    table.wide(dt_bias_, at + "dt_bias", model.num_heads, rows);
    table.wide(skip_, at + "D", model.num_heads, rows);
    if (model.norm != GateNorm::none) table.wide(norm_, at + "norm.weight", size, rows);
    table.linear(out_proj_, {.name = at + "out_proj",
                             .in_features = size,
                             .parts = {{at + "out_proj", hidden_size_, Cut::columns(equal_parts)}},
                             .timed = "o_proj",
                             .bias = model.proj_bias});
}

std::vector<Site> Mamba::sites() const { return {sites::conv, sites::scan}; }

std::vector<LinearCall> Mamba::calls() const {
    return {{.in_features = hidden_size_, .out_features = spec_.in_dim()},
            {.in_features = spec_.size(), .out_features = hidden_size_}};
}

// Norm, the gate, x, B, C and dt, a convolution over x, B and C, the state space, its gate and norm.
template <class Tap>
void Mamba::begin(const Step<Tap>& s, const Input& input) const {
    const TensorView in = s.view(in_).slice(1, 0, spec_.in_dim()), conv = s.view(conv_), out = s.view(scanned_);
    const int64_t x = spec_.size(), dt = x + spec_.conv_dim();
    s.linear(in_proj_, input.x, in, input.norm);
    const StateSteps sequences = state_steps(s.batch);
    const StateLog log(s, std::array{in.slice(1, x, dt), conv.slice(1, 0, spec_.size() + spec_.group_size()),
                                     in.slice(1, dt, spec_.in_dim())});
    ops::causal_conv(s.backend, {.x = in.slice(1, x, dt),
                                 .weight = conv_weight_.prepared,
                                 .state = s.cache.state(s.layer, 0),
                                 .sequences = sequences,
                                 .out = conv,
                                 .bias = conv_bias_.prepared,
                                 .x_log = log.of(0)});
    s.tap_own(sites::conv, conv, conv_);
    ops::selective_scan(s.backend, {.xbc = conv,
                                    .dt = in.slice(1, dt, spec_.in_dim()),
                                    .decay_rate = decay_rate_.prepared,
                                    .dt_bias = dt_bias_.prepared,
                                    .skip = skip_.prepared,
                                    .state = s.cache.state(s.layer, 1),
                                    .sequences = sequences,
                                    .gates = s.view(gates_),
                                    .out = out,
                                    .num_groups = spec_.num_groups,
                                    .dt_multiplier = spec_.dt_multiplier,
                                    .dt_min = spec_.dt_min,
                                    .dt_max = spec_.dt_max,
                                    .xb_log = log.of(1),
                                    .dt_log = log.of(2)});
    log.keep(s);
    gate_and_norm(s, in.slice(1, 0, x), out);
    s.tap_own(sites::scan, out.reshape({out.shape(0), spec_.num_heads, spec_.head_dim}), scanned_);
}

// In place. Where ranks divide the heads of the only group, the norm is over those of all of them.
template <class Tap>
void Mamba::gate_and_norm(const Step<Tap>& s, const TensorView& gate, const TensorView& scanned) const {
    GatedNormParams own{.x = scanned,
                        .gate = gate,
                        .weight = norm_.prepared,
                        .out = scanned,
                        .group_size = spec_.size() / spec_.num_groups,
                        .eps = eps_,
                        .norm_first = spec_.norm == GateNorm::before_gate,
                        .gate_multiplier = spec_.gate_multiplier};
    if (!norm_of_all_ranks_) return ops::gated_norm(s.backend, own);
    own.weight = {};
    if (!own.norm_first) ops::gated_norm(s.backend, own);
    const TensorView mean = s.view(mean_square_);
    ops::mean_square(s.backend, {.x = scanned, .out = mean, .multiplier = 1.0f / static_cast<float>(s.num_ranks())});
    s.ranks.all_reduce(mean);
    ops::rms_norm(s.backend,
                  {.x = scanned, .weight = norm_.prepared, .out = scanned, .eps = eps_, .mean_square = mean});
    if (own.norm_first) ops::gated_norm(s.backend, own);
}

template <class Tap>
void Mamba::finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const {
    s.linear(out_proj_, s.view(scanned_), out, {}, residual);
}

template void Mamba::begin(const Step<NoTap>&, const Input&) const;
template void Mamba::begin(const Step<StepTap>&, const Input&) const;
template void Mamba::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Mamba::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
