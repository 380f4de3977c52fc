#include "model/sublayers/indexer.h"

#include "ops/ops.h"

namespace infinilm {

void IndexerSpec::check(int q_rank, int rope_dim) const {
    require_spec(num_heads > 0 && head_dim >= rope_dim && top_k > 0 && q_rank > 0,
                 "an indexer needs a latent of queries, heads of at least ", rope_dim,
                 " elements, which RoPE turns, and keys to choose; got a latent of ", q_rank, ", ", num_heads,
                 " heads of ", head_dim, " and ", top_k, " keys");
}

const char* IndexerSpec::only_on_cpus() const {
    const bool fits = int64_t{num_heads} * head_dim <= most_index_size;
    if (fits && head_dim % 8 == 0) return nullptr;
    return fits ? "indexers whose heads are no multiple of 8" : "indexers of more than 11264 elements together";
}

Indexer::Indexer(const IndexerSpec& spec, int rope, BufferPlan& plan) : spec_(spec), rope_(rope) {
    slots_ = plan.add({.name = "chosen_slots", .columns = spec.top_k, .dtype = DType::int32});
    if (spec.shared) return;
    qk_ = plan.add({.name = "index_qk", .columns = int64_t{spec.num_heads + 1} * spec.head_dim});
    weights_ =
        plan.add({.name = "index_weights", .columns = (int64_t{spec.num_heads} + 7) / 8 * 8, .dtype = DType::float32});
}

void Indexer::declare(ParamTable& table, const std::string& at, int64_t hidden_size, int64_t q_rank) {
    if (spec_.shared) return;
    const std::string own = at + "indexer.";
    const auto linear = [&](LinearWeights& weights, const std::string& name, int64_t in, int64_t out) {
        table.linear(weights, {.name = name, .in_features = in, .parts = {{name, out}}, .timed = "indexer"});
    };
    linear(wq_b_, own + "wq_b", q_rank, int64_t{spec_.num_heads} * spec_.head_dim);
    linear(wk_, own + "wk", hidden_size, spec_.head_dim);
    table.norm(k_norm_, own + "k_norm", spec_.head_dim, NormForm{NormKind::layer_bias, 0});
    table.linear(weights_proj_, {.name = own + "weights_proj",
                                 .in_features = hidden_size,
                                 .parts = {{own + "weights_proj", spec_.num_heads}},
                                 .timed = "indexer",
                                 .quantised = false,
                                 .adaptable = false});
}

std::vector<LinearCall> Indexer::calls(int64_t hidden_size, int64_t q_rank) const {
    if (spec_.shared) return {};
    return {{.in_features = q_rank, .out_features = int64_t{spec_.num_heads} * spec_.head_dim},
            {.in_features = hidden_size, .out_features = spec_.head_dim},
            {.in_features = hidden_size, .out_features = spec_.num_heads, .adaptable = false}};
}

std::vector<Site> Indexer::sites() const {
    if (spec_.shared) return {};
    return {sites::index_q, sites::index_k, sites::index_weights};
}

template <class Tap>
TensorView Indexer::choose(const Step<Tap>& s, const TensorView& x, const TensorView& q_latent) const {
    const TensorView slots = s.view(slots_);
    if (spec_.shared) return slots;
    const int64_t q_size = int64_t{spec_.num_heads} * spec_.head_dim;
    const TensorView qk = s.view(qk_), key = qk.slice(1, q_size, q_size + spec_.head_dim);
    const TensorView weights = s.view(weights_).slice(1, 0, spec_.num_heads);
    s.linear(wq_b_, q_latent, qk.slice(1, 0, q_size));
    s.linear(wk_, x, key);
    s.linear(weights_proj_, x, weights);
    ops::rms_norm(s.backend, {.x = key, .weight = k_norm_.prepared, .out = key, .eps = spec_.norm_eps});
    const TensorView keys = s.cache.index_keys(s.layer), scales = s.cache.index_scales(s.layer);
    const int group = s.cache.group(s.layer);
    RopeStoreParams store{.qkv = qk,
                          .cos_sin = s.ropes[static_cast<size_t>(rope_)],
                          .q_cos_sin = {},
                          .q_norm = {},
                          .k_norm = {},
                          .slot_mapping = s.batch.slot_mapping.select(0, group),
                          .k_cache = keys,
                          .v_cache = {},
                          .k_scales = scales,
                          .v_scales = {},
                          .num_heads = spec_.num_heads,
                          .num_kv_heads = 1,
                          .head_dim = spec_.head_dim,
                          .eps = spec_.norm_eps};
    const TensorView queries = of_heads(qk, spec_.num_heads, spec_.head_dim, 0, spec_.head_dim);
    if constexpr (Tap::active) {
        RopeStoreParams turn = store;
        turn.slot_mapping = {};
        ops::qk_norm_rope_store_kv(s.backend, turn);
        s.tap_common(sites::index_q, queries, qk_);
        s.tap_common(sites::index_k, of_heads(key, 1, spec_.head_dim, 0, spec_.head_dim), qk_);
        s.tap_common(sites::index_weights, weights, weights_);
        store.cos_sin = {};
    }
    ops::qk_norm_rope_store_kv(s.backend, store);
    ops::choose_keys(s.backend, {.q = queries,
                                 .weights = weights,
                                 .k_cache = keys,
                                 .k_scales = scales,
                                 .block_table = s.batch.block_table.select(0, group),
                                 .cu_seqlens_q = s.batch.cu_seqlens_q,
                                 .context_lens = s.batch.lens_of(group),
                                 .slots = slots,
                                 .scores = s.cache.index_scores()});
    return slots;
}

template TensorView Indexer::choose(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template TensorView Indexer::choose(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
