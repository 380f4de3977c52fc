#include "model/sublayers/shared_block.h"

#include "ops/ops.h"

namespace infinilm {

void SharedBlockSpec::check(const ModelSpec& model) const {
    attention.check(model);
    mlp.check(model);
    require_spec(attention.inputs == 2 && attention.own_kv(),
                 "the attention of a shared block reads rows of 2 * hidden_size, and has keys and values of its own");
    require_spec(adapter_rank >= 0 && (adapter_rank > 0 || !attention_adapters),
                 "adapter_rank must be 0 or positive, and positive with attention_adapters; got ", adapter_rank);
}

std::vector<Divided> SharedBlockSpec::divided() const {
    std::vector<Divided> all = attention.divided();
    all.push_back(mlp.divided()[0]);
    return all;
}

SharedBlockSpec SharedBlockSpec::local(Shard shard) const {
    SharedBlockSpec own = *this;
    own.attention = attention.local(shard);
    own.mlp = mlp.local(shard);
    return own;
}

Buffer SharedBlockUse::mixer_input(const ModelSpec& model, BufferPlan& plan) {
    return plan.add({.name = "block_out", .columns = model.hidden_size});
}

Buffer SharedBlockUse::joined(const ModelSpec& model, BufferPlan& plan) {
    return plan.add({.name = "block_in", .columns = 2 * int64_t{model.hidden_size}});
}

SharedBlockUse::SharedBlockUse(const ModelSpec& model, int layer, std::shared_ptr<SharedBlock> block, BufferPlan& plan)
    : spec_(*model.layer(layer).block),
      block_(std::move(block)),
      layer_(layer),
      hidden_size_(model.hidden_size),
      eps_(model.rms_norm_eps),
      joined_(joined(model, plan)),
      normed_(plan.add({.name = "block_normed", .columns = 2 * hidden_size_})),
      result_(plan.add({.name = "block_result", .columns = hidden_size_})),
      input_(mixer_input(model, plan)),
      inner_(plan.add({.name = "block_adapter", .columns = spec_.adapter_rank})) {}

void SharedBlockUse::declare(ParamTable& table) {
    const SharedBlockSpec& whole = *table.layer_spec().block;
    const std::string own = table.prefix(), at = concat("model.layers.", spec_.owner, ".shared_block.");
    if (layer_ == spec_.owner) {
        table.norm(block_->norm, at + "input_layernorm", 2 * hidden_size_);
        block_->attention.declare(table, at + "self_attn.", whole.attention);
        table.norm(block_->mlp_norm, at + "post_attention_layernorm", hidden_size_);
        block_->mlp.declare(table, at + "mlp.", whole.mlp);
    }
    const int64_t q = spec_.attention.q_dim(), kv = spec_.attention.kv_dim(), inner = spec_.mlp.intermediate_size;
    const std::string added = concat(at, "adapters.", spec_.use, ".");
    if (spec_.attention_adapters) {
        const std::pair<char, Range> parts[] = {{'q', {0, q}}, {'k', {q, q + kv}}, {'v', {q + kv, q + 2 * kv}}};
        for (const auto& [part, outputs] : parts)
            declare_adapter(table, block_->attention.qkv_proj(), concat(added, part, "_down"), outputs,
                            {{concat(added, part, "_up"), concat(at, "self_attn.", part, "_proj")}});
    }
    if (spec_.adapter_rank > 0)
        declare_adapter(table, block_->mlp.gate_up_proj(), added + "mlp_down", {0, 2 * inner},
                        {{added + "mlp_gate", at + "mlp.gate_proj"}, {added + "mlp_up", at + "mlp.up_proj"}});
    table.linear(linear_, {.name = own + "block_proj",
                           .in_features = hidden_size_,
                           .parts = {{own + "block_proj", hidden_size_}},
                           .timed = "down_proj"});
    table.norm(mixer_norm_, own + "input_layernorm", hidden_size_);
}

// Ranks divide an added weight as they divide the tensor that it is added to.
void SharedBlockUse::declare_adapter(ParamTable& table, LinearWeights& linear, const std::string& down, Range outputs,
                                     const std::vector<Added>& up) {
    linear.beside.push_back(
        {.layer = layer_, .begin = outputs.begin, .end = outputs.end, .inner = inner_, .down = {}, .up = {}});
    LowRank& added = linear.beside.back();
    const auto declare = [&](LinearWeights& weights, const std::string& name, int64_t in_features,
                             std::vector<ParamTable::Part> parts) {
        table.linear(weights, {.name = name,
                               .in_features = in_features,
                               .parts = std::move(parts),
                               .timed = "qkv_proj",
                               .quantised = false,
                               .adaptable = false});
    };
    int64_t in_features = 0;
    std::vector<ParamTable::Part> parts;
    for (const auto& [name, of] : up) {
        const ParamRow& row = *table.find(of + ".weight");
        parts.push_back({name, row.shape[0], row.cut});
        in_features = row.shape[1];
    }
    declare(added.down, down, in_features, {{down, spec_.adapter_rank}});
    declare(added.up, up[0].name, spec_.adapter_rank, std::move(parts));
}

std::vector<Site> SharedBlockUse::sites() const {
    std::vector<Site> out{sites::block_norm};
    const auto add = [&](const std::vector<Site>& own) { out.insert(out.end(), own.begin(), own.end()); };
    add(block_->attention.sites());
    add({sites::o_proj, sites::block_mlp_norm});
    add(block_->mlp.sites());
    add({sites::down_proj, sites::block_sum});
    return out;
}

std::vector<LinearCall> SharedBlockUse::calls() const {
    std::vector<LinearCall> calls{{.in_features = hidden_size_, .out_features = hidden_size_}};
    const auto add = [&](const std::vector<LinearCall>& own) { calls.insert(calls.end(), own.begin(), own.end()); };
    add(block_->attention.calls());
    add(block_->mlp.calls());
    if (spec_.adapter_rank > 0) {
        const int64_t widest = std::max<int64_t>(spec_.attention.q_dim(), 2 * int64_t{spec_.mlp.intermediate_size});
        add({{.in_features = 2 * hidden_size_, .out_features = spec_.adapter_rank, .adaptable = false},
             {.in_features = spec_.adapter_rank, .out_features = widest, .adaptable = false}});
    }
    return calls;
}

template <class Tap>
void SharedBlockUse::keep_embedding(const Step<Tap>& s, const Buffer& joined) {
    s.copy_rows(s.x, s.view(joined).slice(1, joined.columns / 2, joined.columns));
}

template <class Tap>
void SharedBlockUse::begin(const Step<Tap>& s, const Input&) const {
    const TensorView joined = s.view(joined_), normed = s.view(normed_), result = s.view(result_),
                     input = s.view(input_);
    const auto norm = [&](const TensorView& x, const VectorWeights& weight, const TensorView& out, Site own,
                          const Buffer& buffer) {
        ops::rms_norm(s.backend, {.x = x, .weight = weight.prepared, .out = out, .eps = eps_});
        s.tap_common(own, out, buffer);
    };
    const auto finish = [&](const auto& body, Site own) {
        body.finish(s, TensorView(), result);
        if (s.num_ranks() > 1) s.ranks.all_reduce(result);
        s.tap_common(own, result, result_);
    };
    s.copy_rows(s.x, joined.slice(1, 0, hidden_size_));
    norm(joined, block_->norm, normed, sites::block_norm, normed_);
    block_->attention.begin(s, {.x = normed});
    finish(block_->attention, sites::o_proj);
    norm(result, block_->mlp_norm, result, sites::block_mlp_norm, result_);
    block_->mlp.begin(s, {.x = result});
    finish(block_->mlp, sites::down_proj);
    s.linear(linear_, result, input, {}, s.x);
    s.tap_common(sites::block_sum, input, input_);
    norm(input, mixer_norm_, input, sites::mixer_norm, input_);
}

template void SharedBlockUse::begin(const Step<NoTap>&, const Input&) const;
template void SharedBlockUse::begin(const Step<StepTap>&, const Input&) const;
template void SharedBlockUse::keep_embedding(const Step<NoTap>&, const Buffer&);
template void SharedBlockUse::keep_embedding(const Step<StepTap>&, const Buffer&);

}  // namespace infinilm
