#include "model/sublayers/indexer.h"

#include "ops/ops.h"

namespace infinilm {

void IndexerSpec::check_of_latents(int q_rank, int rope_dim) const {
    require_spec(num_heads > 0 && head_dim >= rope_dim && top_k > 0 && q_rank > 0,
                 "an indexer needs a latent of queries, heads of at least ", rope_dim,
                 " elements, which RoPE turns, and keys to choose; got a latent of ", q_rank, ", ", num_heads,
                 " heads of ", head_dim, " and ", top_k, " keys");
    require_spec(!by_head && run_keys == 1 && last_runs == 0,
                 "an indexer of latents chooses single keys for all heads");
}

void IndexerSpec::check_by_head(int num_kv_heads) const {
    require_spec(by_head && !shared && num_heads == num_kv_heads && head_dim > 0 && head_dim % 2 == 0,
                 "an indexer of attention has a head for each of ", num_kv_heads, " heads of keys; got ", num_heads,
                 " heads of ", head_dim);
    require_spec(run_keys > 0 && top_k > 0 && top_k % run_keys == 0 && last_runs > 0 && last_runs <= top_k / run_keys,
                 "an indexer chooses whole runs of keys, the last one or more of them always; got ", top_k,
                 " keys in runs of ", run_keys, ", ", last_runs, " of them always");
}

const char* IndexerSpec::only_on_cpus() const {
    const bool fits = int64_t{heads_at_once()} * head_dim <= most_index_size;
    if (fits && head_dim % 8 == 0) return nullptr;
    return fits ? "indexers whose heads are no multiple of 8" : "indexers of more than 11264 elements together";
}

Indexer::Indexer(const IndexerSpec& spec, int rope, BufferPlan& plan) : spec_(spec), rope_(rope) {
    slots_ = plan.add({.name = "chosen_slots", .columns = spec.top_k, .dtype = DType::int32});
    if (spec.shared) return;
    qk_ = plan.add({.name = "index_qk", .columns = int64_t{spec.num_heads + 1} * spec.head_dim});
    if (spec.by_head) return;
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

void Indexer::declare_by_head(ParamTable& table, const std::string& at, int64_t hidden_size, int64_t num_heads,
                              const Cut& q_rows) {
    const std::string own = at + "indexer.";
    table.linear(qk_proj_,
                 {.name = own + "qk_proj",
                  .in_features = hidden_size,
                  .parts = {{own + "q_proj", num_heads * spec_.head_dim, q_rows}, {own + "k_proj", spec_.head_dim}},
                  .timed = "indexer"});
    table.norm(q_norm_, own + "q_norm", spec_.head_dim);
    table.norm(k_norm_, own + "k_norm", spec_.head_dim);
}

std::vector<LinearCall> Indexer::calls(int64_t hidden_size, int64_t q_rank) const {
    if (spec_.shared) return {};
    const int64_t q_size = int64_t{spec_.num_heads} * spec_.head_dim;
    if (spec_.by_head) return {{.in_features = hidden_size, .out_features = q_size}};
    return {{.in_features = q_rank, .out_features = q_size},
            {.in_features = hidden_size, .out_features = spec_.head_dim},
            {.in_features = hidden_size, .out_features = spec_.num_heads, .adaptable = false}};
}

std::vector<Site> Indexer::sites() const {
    if (spec_.shared) return {};
    if (spec_.by_head) return {sites::index_q, sites::index_k};
    return {sites::index_q, sites::index_k, sites::index_weights};
}

template <class Tap>
void Indexer::turn_and_store(const Step<Tap>& s) const {
    const TensorView qk = s.view(qk_);
    const int64_t head_dim = spec_.head_dim, q_size = spec_.num_heads * head_dim;
    RopeStoreParams store{.qkv = qk,
                          .cos_sin = rope_ < 0 ? TensorView() : s.ropes[static_cast<size_t>(rope_)],
                          .q_cos_sin = {},
                          .q_norm = q_norm_.prepared,
                          .k_norm = spec_.by_head ? k_norm_.prepared.view() : TensorView(),
                          .slot_mapping = s.batch.slot_mapping.select(0, s.cache.group(s.layer)),
                          .k_cache = s.cache.index_keys(s.layer),
                          .v_cache = {},
                          .k_scales = s.cache.index_scales(s.layer),
                          .v_scales = {},
                          .num_heads = spec_.num_heads,
                          .num_kv_heads = 1,
                          .head_dim = spec_.head_dim,
                          .eps = spec_.norm_eps};
    if constexpr (Tap::active) {
        RopeStoreParams turn = store;
        turn.slot_mapping = {};
        ops::qk_norm_rope_store_kv(s.backend, turn);
        const TensorView queries = of_heads(qk, spec_.num_heads, head_dim, 0, head_dim);
        if (spec_.by_head)
            s.tap_own(sites::index_q, queries, qk_);
        else
            s.tap_common(sites::index_q, queries, qk_);
        s.tap_common(sites::index_k, of_heads(qk, 1, head_dim, q_size, head_dim), qk_);
        store.cos_sin = store.q_norm = store.k_norm = {};
    }
    ops::qk_norm_rope_store_kv(s.backend, store);
}

template <class Tap>
void Indexer::store(const Step<Tap>& s, const TensorView& x, const TensorView& q_latent) const {
    if (spec_.shared) return;
    const TensorView qk = s.view(qk_);
    if (spec_.by_head) {
        s.linear(qk_proj_, x, qk);
        return turn_and_store(s);
    }
    const int64_t q_size = int64_t{spec_.num_heads} * spec_.head_dim;
    const TensorView key = qk.slice(1, q_size, q_size + spec_.head_dim);
    const TensorView weights = s.view(weights_).slice(1, 0, spec_.num_heads);
    s.linear(wq_b_, q_latent, qk.slice(1, 0, q_size));
    s.linear(wk_, x, key);
    s.linear(weights_proj_, x, weights);
    ops::rms_norm(s.backend, {.x = key, .weight = k_norm_.prepared, .out = key, .eps = spec_.norm_eps});
    turn_and_store(s);
    if constexpr (Tap::active) s.tap_common(sites::index_weights, weights, weights_);
}

template <class Tap>
TensorView Indexer::choose(const Step<Tap>& s, int head) const {
    const TensorView slots = s.view(slots_);
    if (spec_.shared) return slots;
    const int group = s.cache.group(s.layer);
    const int64_t head_dim = spec_.head_dim;
    ops::choose_keys(s.backend,
                     {.q = of_heads(s.view(qk_), spec_.heads_at_once(), head_dim, head * head_dim, head_dim),
                      .weights = spec_.by_head ? TensorView() : s.view(weights_).slice(1, 0, spec_.num_heads),
                      .k_cache = s.cache.index_keys(s.layer),
                      .k_scales = s.cache.index_scales(s.layer),
                      .block_table = s.batch.block_table.select(0, group),
                      .cu_seqlens_q = s.batch.cu_seqlens_q,
                      .context_lens = s.batch.lens_of(group),
                      .slots = slots,
                      .scores = s.cache.index_scores(),
                      .run_keys = spec_.run_keys,
                      .last_runs = spec_.last_runs,
                      .slot_heads = spec_.by_head ? spec_.num_heads : 1,
                      .slot_head = head});
    return slots;
}

template void Indexer::store(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Indexer::store(const Step<StepTap>&, const TensorView&, const TensorView&) const;
template TensorView Indexer::choose(const Step<NoTap>&, int) const;
template TensorView Indexer::choose(const Step<StepTap>&, int) const;

}  // namespace infinilm
