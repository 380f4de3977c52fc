#include "model/sublayers/latent.h"

#include <algorithm>

#include "ops/ops.h"

namespace infinilm {

void LatentSpec::check(const ModelSpec& model) const {
    require_spec(
        num_heads > 0 && q_rank >= 0 && kv_rank > 0 && rope_dim > 0 && rope_dim % 2 == 0 && nope_dim > 0 && v_dim > 0,
        "latent attention needs heads, latents and an even number of elements that RoPE turns; got ", num_heads,
        " heads of ", rope_dim, " + ", nope_dim, " and ", v_dim, " elements, and latents of ", q_rank, " and ",
        kv_rank);
    check_rope(model, rope, rope_dim);
    check_rope(model, q_scale, query_dim());
    if (indexer) indexer->check_of_latents(q_rank, rope_dim);
}

LatentSpec LatentSpec::local(Shard shard) const {
    LatentSpec own = *this;
    own.num_heads = num_heads / shard.size;
    return own;
}

CacheSpec LatentSpec::cache() const {
    return {.kind = CacheKind::latent,
            .num_heads = num_heads,
            .num_kv_heads = 1,
            .head_dim = row_dim(),
            .value_dim = kv_rank,
            .index_dim = indexer && !indexer->shared ? indexer->head_dim : 0,
            .top_k = indexer ? indexer->top_k : 0,
            .states = {}};
}

Latent::Latent(const ModelSpec& model, const LatentSpec& spec, BufferPlan& plan)
    : own_{.cache = spec.cache(), .softmax_scale = spec.softmax_scale, .rope = spec.rope, .eps = model.rms_norm_eps},
      spec_(spec),
      hidden_size_(model.hidden_size),
      num_heads_(spec.num_heads) {
    qkv_ = plan.add({.name = "qkv", .columns = (num_heads_ + 1) * spec_.row_dim()});
    mixed_ = plan.add({.name = "mixed", .columns = num_heads_ * spec_.v_dim});
    q_latent_ = plan.add({.name = "q_latent", .columns = spec_.q_rank});
    queries_ = plan.add({.name = "queries", .columns = num_heads_ * spec_.query_dim()});
    latents_ = plan.add({.name = "latents", .columns = num_heads_ * spec_.kv_rank});
    // Linears of GPUs write 8 columns at once.
    gate_ = plan.add({.name = "attention_gate", .columns = spec_.head_gate ? (num_heads_ + 7) / 8 * 8 : 0});
    if (spec_.indexer) indexer_.emplace(*spec_.indexer, spec_.rope, plan);
}

void Latent::declare(ParamTable& table) {
    const auto& model = table.layer_spec().mixer_of<LatentSpec>();
    const int64_t num_heads = model.num_heads;
    const std::string at = table.prefix() + "self_attn.";
    const Cut q_rows = Cut::rows(equal_parts);
    if (spec_.q_rank > 0) {
        table.linear(q_a_, {.name = at + "q_a_proj",
                            .in_features = hidden_size_,
                            .parts = {{at + "q_a_proj", spec_.q_rank}},
                            .timed = "qkv_proj",
                            .bias = model.latent_bias});
        table.norm(q_latent_norm_, at + "q_a_layernorm", spec_.q_rank);
    }
    const std::string q_b = at + (spec_.q_rank > 0 ? "q_b_proj" : "q_proj");
    table.linear(q_b_, {.name = q_b,
                        .in_features = spec_.q_rank > 0 ? spec_.q_rank : hidden_size_,
                        .parts = {{q_b, num_heads * spec_.query_dim(), q_rows}},
                        .timed = "qkv_proj"});
    table.linear(kv_a_, {.name = at + "kv_a_proj",
                         .in_features = hidden_size_,
                         .parts = {{at + "kv_a_proj", spec_.row_dim()}},
                         .timed = "qkv_proj",
                         .bias = model.latent_bias});
    table.norm(latent_norm_, at + "kv_a_layernorm", spec_.kv_rank);
    if (indexer_) indexer_->declare(table, at, hidden_size_, spec_.q_rank);
    if (model.head_gate)
        table.linear(gate_proj_, {.name = at + "gate_proj",
                                  .in_features = hidden_size_,
                                  .parts = {{at + "gate_proj", num_heads, q_rows}},
                                  .timed = "qkv_proj"});
    const auto by_head = [&](LinearWeights& weights, const std::string& name, int out, int in) {
        table.linear(weights, {.name = name,
                               .in_features = in,
                               .parts = {{name, num_heads * out, q_rows}},
                               .timed = "latents",
                               .kind = LinearKind::by_head,
                               .head_dim = out});
    };
    by_head(k_b_, at + "k_b_proj", spec_.kv_rank, spec_.nope_dim);
    by_head(v_b_, at + "v_b_proj", spec_.v_dim, spec_.kv_rank);
    table.linear(o_proj_, {.name = at + "o_proj",
                           .in_features = num_heads * spec_.v_dim,
                           .parts = {{at + "o_proj", hidden_size_, Cut::columns(equal_parts)}},
                           .timed = "o_proj",
                           .bias = model.out_bias});
}

std::vector<Site> Latent::sites() const {
    std::vector<Site> out{sites::q_proj, sites::k_proj, sites::q_rope, sites::k_rope, sites::attention};
    if (indexer_)
        for (const Site site : indexer_->sites()) out.push_back(site);
    return out;
}

std::vector<LinearCall> Latent::calls() const {
    const LatentSpec& d = spec_;
    const auto of_each_head = [&](int in_features, int out_features) {
        return LinearCall{
            .in_features = in_features, .out_features = out_features, .rows = num_heads_, .count = num_heads_};
    };
    std::vector<LinearCall> calls{
        {.in_features = hidden_size_, .out_features = std::max(d.q_rank, d.row_dim())},
        {.in_features = d.q_rank > 0 ? d.q_rank : hidden_size_, .out_features = num_heads_ * d.query_dim()},
        of_each_head(d.nope_dim, d.kv_rank),
        of_each_head(d.kv_rank, d.v_dim),
        {.in_features = num_heads_ * d.v_dim, .out_features = hidden_size_}};
    if (!indexer_) return calls;
    for (const LinearCall& call : indexer_->calls(hidden_size_, d.q_rank)) calls.push_back(call);
    return calls;
}

// Computes queries, from latents of their own, and the row of the cache, [the key that RoPE turns, latent]. A query
// takes the form of such a row: its part that RoPE turns, then the rest times the matrix that makes keys of latents.
// Returns the slots of the rows that each token reads, where it chooses them.
template <class Tap>
TensorView Latent::project(const Step<Tap>& s, const TensorView& x) const {
    const int64_t row_dim = spec_.row_dim(), rope_dim = spec_.rope_dim, query_dim = spec_.query_dim();
    const TensorView queries = s.view(queries_);
    TensorView slots;
    if (spec_.q_rank > 0) {
        const TensorView q_latent = s.view(q_latent_);
        s.linear(q_a_, x, q_latent);
        NormPrologue norm{.weight = q_latent_norm_.prepared, .scratch = q_latent, .eps = spec_.norm_eps};
        if (indexer_) {  // two linears read the norm
            ops::rms_norm(s.backend, {.x = q_latent, .weight = norm.weight, .out = q_latent, .eps = norm.eps});
            norm = {};
            indexer_->store(s, x, q_latent);
            slots = indexer_->choose(s);
        }
        s.linear(q_b_, q_latent, queries, norm);
    } else {
        s.linear(q_b_, x, queries);
    }
    s.tap_own(sites::q_proj, of_heads(queries, num_heads_, query_dim, 0, query_dim), queries_);
    if (spec_.q_scale >= 0)  // both parts of a query are linear in what is scaled here
        ops::qk_norm_rope_store_kv(s.backend, {.qkv = queries,
                                               .cos_sin = {},
                                               .q_cos_sin = s.ropes[static_cast<size_t>(spec_.q_scale)],
                                               .q_norm = {},
                                               .k_norm = {},
                                               .slot_mapping = {},
                                               .k_cache = {},
                                               .v_cache = {},
                                               .k_scales = {},
                                               .v_scales = {},
                                               .num_heads = spec_.num_heads,
                                               .num_kv_heads = 0,
                                               .head_dim = static_cast<int>(query_dim),
                                               .eps = own_.eps});

    const TensorView qkv = s.view(qkv_), row = qkv.slice(1, num_heads_ * row_dim, (num_heads_ + 1) * row_dim);
    const auto tap_row = [&](Site site) { s.tap_own(site, of_heads(row, 1, row_dim, 0, row_dim), qkv_); };
    s.linear(kv_a_, x, row);
    tap_row(sites::k_proj);
    const TensorView cached = row.slice(1, rope_dim, row_dim);
    ops::rms_norm(s.backend, {.x = cached, .weight = latent_norm_.prepared, .out = cached, .eps = spec_.norm_eps});
    s.head_linear(k_b_, of_heads(queries, num_heads_, query_dim, rope_dim, spec_.nope_dim),
                  of_heads(qkv, num_heads_, row_dim, rope_dim, spec_.kv_rank));

    RopeStoreParams params = rope_store(s, own_, qkv);
    params.q_turned = of_heads(queries, num_heads_, query_dim, 0, rope_dim);
    if constexpr (!Tap::active) {
        ops::qk_norm_rope_store_kv(s.backend, params);
        return slots;
    }
    RopeStoreParams turn = params, store = params;
    turn.slot_mapping = {};
    ops::qk_norm_rope_store_kv(s.backend, turn);
    s.tap_own(sites::q_rope, of_heads(qkv, num_heads_, row_dim, 0, row_dim), qkv_);
    tap_row(sites::k_rope);
    store.cos_sin = store.q_turned = {};
    ops::qk_norm_rope_store_kv(s.backend, store);
    return slots;
}

template <class Tap>
void Latent::begin(const Step<Tap>& s, const Input& in) const {
    const TensorView x = s.whole(in), slots = project(s, x);  // several linears read the norm
    const TensorView mixed = s.view(mixed_), result = of_heads(mixed, num_heads_, spec_.v_dim, 0, spec_.v_dim);
    const TensorView out = of_heads(s.view(latents_), num_heads_, spec_.kv_rank, 0, spec_.kv_rank);
    attend(s, own_, s.view(qkv_), {}, out, slots);
    s.head_linear(v_b_, out, result);
    if (spec_.head_gate) {
        const TensorView gate = s.view(gate_).slice(1, 0, num_heads_);
        s.linear(gate_proj_, x, gate);
        ops::act_mul(s.backend, {.gate_up = gate, .out = mixed, .activation = Activation::sigmoid, .up = mixed});
    }
    s.tap_own(sites::attention, result, mixed_);
}

template <class Tap>
void Latent::store(const Step<Tap>& s, const Input& in) const {
    project(s, s.whole(in));
}

template <class Tap>
void Latent::finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const {
    s.linear(o_proj_, s.view(mixed_), out, {}, residual);
}

template void Latent::store(const Step<NoTap>&, const Input&) const;
template void Latent::begin(const Step<NoTap>&, const Input&) const;
template void Latent::begin(const Step<StepTap>&, const Input&) const;
template void Latent::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Latent::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
