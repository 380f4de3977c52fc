#include "model/sublayers/experts.h"

#include <cmath>

#include "ops/ops.h"

namespace infinilm {

void ExpertsSpec::check(const ModelSpec& model) const {
    require_spec(expert.activation != Activation::xielu, "experts have no activation '", name(expert.activation), "'");
    require_spec(top_k > 0 && top_k <= count && expert.intermediate_size > 0, "a layer with experts needs 1 to ", count,
                 " experts per token and their intermediate_size, got ", top_k, " and ", expert.intermediate_size);
    require_spec(num_groups > 0 && count % num_groups == 0 && top_groups > 0 && top_groups <= num_groups &&
                     group_best >= 1 && group_best <= 2 && top_k <= count / num_groups * top_groups,
                 "groups of experts do not fit: ", count, " experts in ", num_groups, ", of which ", top_groups,
                 " have the ", top_k, " of a token");
    require_spec(scoring != Scoring::sparse_mixer || (tolerance >= 0 && !norm_topk_prob && !correction_bias),
                 "sparse_mixer has a tolerance, and neither norm_topk_prob nor correction_bias");
    require_spec(latent_size >= 0 && (latent_size == 0 || !shared_gate),
                 "experts in a latent have one of at least an element, and no gate of what is shared");
    require_spec(!post_norm || (model.pre_norms && !model.post_norms),
                 "a norm behind experts alone needs norms before all sublayers, and none behind them");
    require_spec(!model.parallel_blocks || model.pre_norms, "experts beside a mixer need a norm of what they read");
    require_spec(expert.in_multiplier == 1 && expert.out_multiplier == 1, "experts have no multipliers of their own");
    expert.check(model);
    if (shared) shared->check(model);
}

std::vector<Divided> ExpertsSpec::divided() const {
    std::vector<Divided> all = expert.divided();
    if (shared) all.push_back(shared->divided()[0]);
    return all;
}

ExpertsSpec ExpertsSpec::local(Shard shard) const {
    ExpertsSpec own = *this;
    own.expert = expert.local(shard);
    if (shared) own.shared = shared->local(shard);
    return own;
}

namespace {

// The columns of what an expert has inside: gate and up lie apart where the activation does not join them.
int64_t inner_columns(const MlpSpec& expert) {
    return (expert.gated && is_apart(expert.activation) ? 2 : 1) * int64_t{expert.intermediate_size};
}

}  // namespace

HostExperts::TokenSizes sizes_on_host(const ModelSpec& model, const ExpertsSpec& spec) {
    const int64_t own = spec.latent_size > 0 ? spec.latent_size : model.hidden_size;
    return {.x = own,
            .shared = spec.shared && spec.latent_size == 0 ? model.hidden_size : 0,
            .out = own,
            .inner = spec.top_k * inner_columns(spec.expert),
            .parts = spec.top_k * own,
            .top_k = spec.top_k};
}

Experts::Experts(const ModelSpec& model, const ExpertsSpec& spec, BufferPlan& plan)
    : spec_(spec),
      hidden_size_(model.hidden_size),
      pre_norms_(model.pre_norms),
      own_size_(spec_.latent_size > 0 ? spec_.latent_size : model.hidden_size),
      gate_up_(static_cast<size_t>(spec_.count)),
      down_(static_cast<size_t>(spec_.count)) {
    const int top_k = spec_.top_k;
    logits_ = plan.add({.name = "router_logits", .columns = (spec_.count + 7) / 8 * 8, .dtype = DType::float32});
    ids_ = plan.add({.name = "expert_ids", .columns = top_k, .dtype = DType::int32});
    weights_ = plan.add({.name = "expert_weights", .columns = top_k, .dtype = DType::float32});
    if (!spec_.on_host) {
        inner_ = plan.add({.name = "expert_inner", .columns = inner_columns(spec_.expert), .rows = top_k});
        parts_ = plan.add({.name = "expert_parts", .columns = own_size_, .rows = top_k});
        lists_ = plan.add({.name = "expert_lists", .columns = expert_list_ints, .rows = top_k, .dtype = DType::int32});
    }
    latent_ = plan.add({.name = "expert_latent", .columns = spec_.latent_size});
    latent_out_ = plan.add({.name = "expert_latent_out", .columns = spec_.latent_size});
    read_ = plan.add({.name = "expert_read", .columns = model.parallel_blocks ? hidden_size_ : 0});
    if (!spec_.shared) return;
    shared_.emplace(model, *spec_.shared, plan, false);
    shared_out_ = plan.add({.name = "shared", .columns = spec_.latent_size > 0 ? 0 : hidden_size_});
    shared_gate_ = plan.add({.name = "shared_gate", .columns = spec_.shared_gate ? 8 : 0, .dtype = DType::float32});
}

void Experts::declare(ParamTable& table) {
    const LayerSpec& layer = table.layer_spec();
    const ExpertsSpec& model = *layer.experts;
    const std::string at = table.prefix() + "mlp.";
    if (layer.mlp) {
        const float scale = 1 / std::sqrt(static_cast<float>(hidden_size_));
        table.wide(router_norm_, at + "gate.scale", hidden_size_, {}, scale);
        table.wide(expert_scales_, at + "gate.per_expert_scale", model.count);
    }
    table.linear(router_, {.name = at + "gate",
                           .in_features = hidden_size_,
                           .parts = {{at + "gate", model.count}},
                           .timed = "router",
                           .bias = model.router_bias,
                           .quantised = false,
                           .adaptable = false});
    if (model.correction_bias) table.wide(correction_, at + "gate.e_score_correction_bias", model.count);
    for (size_t e = 0; e < down_.size(); ++e)
        declare_mlp(table, gate_up_[e], down_[e], concat(at, "experts.", e, "."), model.expert, true, own_size_,
                    model.on_host);
    if (model.latent_size > 0) {
        const auto latent = [&](LinearWeights& weights, const std::string& name, int64_t in, int64_t out) {
            table.linear(weights, {.name = name, .in_features = in, .parts = {{name, out}}, .timed = "router"});
        };
        latent(to_latent_, at + "fc1_latent_proj", hidden_size_, own_size_);
        latent(from_latent_, at + "fc2_latent_proj", own_size_, hidden_size_);
    }
    if (!shared_) return;
    shared_->declare(table, at + "shared_expert.", *model.shared);
    if (model.shared_gate)
        table.linear(shared_gate_proj_, {.name = at + "shared_expert_gate",
                                         .in_features = hidden_size_,
                                         .parts = {{at + "shared_expert_gate", 1}},
                                         .timed = "router",
                                         .quantised = false,
                                         .adaptable = false});
}

void Experts::prepare(Backend& backend) {
    const auto prepared = [](const std::vector<LinearWeights>& linears) {
        Backend::SharedLinears out;
        for (const LinearWeights& linear : linears) out.push_back(linear.prepared);
        return out;
    };
    prepared_ = ops::prepare_experts(keeper_of(backend, spec_.on_host), prepared(gate_up_), prepared(down_));
    prepared_->on_host = spec_.on_host;
}

std::vector<Site> Experts::sites() const { return {sites::router_logits}; }

std::vector<LinearCall> Experts::calls() const {
    std::vector<LinearCall> calls{
        {.in_features = hidden_size_, .out_features = spec_.count, .adaptable = false}};  // the router
    if (spec_.latent_size > 0) {
        calls.push_back({.in_features = hidden_size_, .out_features = own_size_});
        calls.push_back({.in_features = own_size_, .out_features = hidden_size_});
    }
    for (const int64_t in_features : {own_size_, int64_t{spec_.expert.intermediate_size}})
        if (!spec_.on_host)
            calls.push_back({.in_features = in_features,
                             .out_features = 0,
                             .rows = spec_.top_k,
                             .count = spec_.count,
                             .adaptable = false});
    if (!shared_) return calls;
    const std::vector<LinearCall> of_shared = shared_->calls();
    calls.insert(calls.end(), of_shared.begin(), of_shared.end());
    return calls;
}

template <class Tap>
void Experts::choose(const Step<Tap>& s, const TensorView& x) const {
    const TensorView logits = s.view(logits_).slice(1, 0, spec_.count);
    s.linear(router_, x, logits);
    s.tap_common(sites::router_logits, logits, logits_);
    ops::route(s.backend, {.logits = logits,
                           .correction_bias = correction_.prepared,
                           .expert_scales = expert_scales_.prepared,
                           .ids = s.view(ids_),
                           .weights = s.view(weights_),
                           .scoring = spec_.scoring,
                           .normalize = spec_.norm_topk_prob,
                           .scale = spec_.scale,
                           .num_groups = spec_.num_groups,
                           .top_groups = spec_.top_groups,
                           .group_best = spec_.group_best,
                           .tolerance = spec_.tolerance});
}

template <class Tap>
void Experts::begin(const Step<Tap>& s, const Input& in) const {
    const TensorView x = s.whole(in), kept = s.view(read_);  // several linears read the norm
    choose(s, x);
    if (kept) s.copy_rows(x, kept);  // the mixer beside them ends first, where the norm is
}

// The residual may be absent; out may be the normed input.
template <class Tap>
void Experts::finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const {
    const TensorView kept = s.view(read_), shared = s.view(shared_out_), padded = s.view(shared_gate_);
    const TensorView x = kept ? kept : pre_norms_ ? TensorView(s.normed) : TensorView(s.x);
    const TensorView shared_gate = padded ? padded.slice(1, 0, 1) : TensorView();
    const bool in_latent = spec_.latent_size > 0;
    if (shared_) {
        if (shared_gate) s.linear(shared_gate_proj_, x, shared_gate);
        shared_->begin(s, {.x = x});
        if (!in_latent) shared_->finish(s, {}, shared);
    }
    const TensorView latent = s.view(latent_), latent_out = s.view(latent_out_);
    if (in_latent) s.linear(to_latent_, x, latent);
    ops::experts(s.backend, {.x = in_latent ? latent : x,
                             .ids = s.view(ids_),
                             .weights = s.view(weights_),
                             .experts = *prepared_,
                             .activation = spec_.expert.activation,
                             .shared = in_latent ? TensorView() : shared,
                             .shared_gate = shared_gate,
                             .residual = in_latent ? TensorView() : residual,
                             .out = in_latent ? latent_out : out,
                             .inner = s.view(inner_),
                             .parts = s.view(parts_),
                             .lists = s.view(lists_),
                             .weigh_inputs = spec_.weigh_inputs,
                             .limit = spec_.expert.limit});
    if (!in_latent) return;
    s.linear(from_latent_, latent_out, out, {}, residual);  // of a rank's part, which is a sum like all that it gives
    if (shared_) shared_->finish(s, out, out);
}

MlpAndExperts::MlpAndExperts(const ModelSpec& model, const MlpSpec& mlp, const ExpertsSpec& experts, BufferPlan& plan)
    : mlp_(model, mlp, plan),
      experts_(model, experts, plan),
      hidden_size_(model.hidden_size),
      eps_(model.rms_norm_eps),
      experts_out_(plan.add({.name = "shared", .columns = hidden_size_})),
      branch_(plan.add({.name = "branch", .columns = hidden_size_, .tapped = true})) {}

void MlpAndExperts::declare(ParamTable& table) {
    experts_.declare(table);
    mlp_.declare(table);
    const std::string at = table.prefix();
    table.norm(mlp_post_norm_, at + "post_feedforward_layernorm_1", hidden_size_);
    table.norm(experts_norm_, at + "pre_feedforward_layernorm_2", hidden_size_);
    table.norm(experts_post_norm_, at + "post_feedforward_layernorm_2", hidden_size_);
}

std::vector<Site> MlpAndExperts::sites() const {
    std::vector<Site> out = mlp_.sites();
    out.insert(out.end(), {sites::router_logits, sites::experts, sites::down_proj, sites::post_feedforward_layernorm_1,
                           sites::pre_feedforward_layernorm_2, sites::post_feedforward_layernorm_2});
    return out;
}

std::vector<LinearCall> MlpAndExperts::calls() const {
    std::vector<LinearCall> calls = mlp_.calls();
    const std::vector<LinearCall> of_experts = experts_.calls();
    calls.insert(calls.end(), of_experts.begin(), of_experts.end());
    return calls;
}

// MLP, router and experts read the residual stream through norms of their own.
template <class Tap>
void MlpAndExperts::begin(const Step<Tap>& s, const Input& in) const {
    mlp_.begin(s, in);
    const auto normed = [&](const VectorWeights& norm) {
        ops::rms_norm(s.backend, {.x = s.x, .weight = norm.prepared, .out = s.normed, .eps = eps_});
        return s.normed;
    };
    experts_.choose(s, normed(experts_.router_norm_));
    s.tap_common(sites::pre_feedforward_layernorm_2, normed(experts_norm_), s.normed);
}

template <class Tap>
void MlpAndExperts::finish(const Step<Tap>& s, const TensorView&, const TensorView& out) const {
    const TensorView own = s.view(experts_out_);
    const auto norm = [&](const TensorView& view, const Buffer& buffer, const VectorWeights& weight, Site site,
                          Site norm_site) {
        if (s.num_ranks() > 1) s.ranks.all_reduce(view);
        s.tap_common(site, view, buffer);
        ops::rms_norm(s.backend, {.x = view, .weight = weight.prepared, .out = view, .eps = eps_});
        s.tap_common(norm_site, view, buffer);
    };
    experts_.finish(s, {}, own);  // first: out may be where what they read is
    norm(own, experts_out_, experts_post_norm_, sites::experts, sites::post_feedforward_layernorm_2);
    mlp_.finish(s, {}, out);
    norm(out, branch_, mlp_post_norm_, sites::down_proj, sites::post_feedforward_layernorm_1);
    ops::add_rms_norm(s.backend, {.x = own, .residual = out, .weight = {}, .out = own, .eps = eps_});
}

template void Experts::begin(const Step<NoTap>&, const Input&) const;
template void Experts::begin(const Step<StepTap>&, const Input&) const;
template void Experts::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Experts::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;
template void MlpAndExperts::begin(const Step<NoTap>&, const Input&) const;
template void MlpAndExperts::begin(const Step<StepTap>&, const Input&) const;
template void MlpAndExperts::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void MlpAndExperts::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
