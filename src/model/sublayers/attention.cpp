#include "model/sublayers/attention.h"

#include <algorithm>
#include <numeric>

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// Query heads of a rank that read the same kv head: they may not cross a group of the model's.
int local_group(const AttentionSpec& model, Shard shard) {
    return std::gcd(model.num_heads / shard.size, model.num_heads / model.num_kv_heads);
}

// For each of a rank's kv heads the one of the model. They serve equally many consecutive query heads of the rank;
// where there are more ranks than kv heads, or the ratio is odd, several ranks have the same one.
std::vector<int> kv_heads_of(const AttentionSpec& model, Shard shard) {
    const int group = local_group(model, shard);
    const int num_heads = model.num_heads / shard.size;  // consecutive ones, as many on every rank
    std::vector<int> heads;
    for (int head = shard.rank * num_heads; head < (shard.rank + 1) * num_heads; head += group)
        heads.push_back(head / (model.num_heads / model.num_kv_heads));
    return heads;
}

// Rows of kv heads, so many each: only those that are neighbours are one range.
Cut kv_rows(const AttentionSpec& model, int64_t rows) {
    return Cut::rows([model, rows](int64_t, Shard shard) {
        std::vector<Range> ranges;
        for (const int64_t head : kv_heads_of(model, shard)) ranges.push_back({head * rows, (head + 1) * rows});
        return joined(ranges);
    });
}

// Whether the linear of q, k and v may turn and store what it gives, which takes heads of one size.
bool fuses_rope(const AttentionSpec& heads) { return heads.own_kv() && heads.value_dim() == heads.head_dim; }

}  // namespace

void AttentionSpec::check(const ModelSpec& model) const {
    require_spec(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, "num_heads (", num_heads,
                 ") must be a multiple of num_kv_heads (", num_kv_heads, ")");
    require_spec(head_dim > 0 && head_dim % 2 == 0, "head_dim must be positive and even, got ", head_dim);
    require_spec(value_dim() > 0 && value_dim() <= head_dim, "v_head_dim must be at most head_dim (", head_dim,
                 "), got ", v_head_dim);
    require_spec(!v_norm || value_dim() == head_dim, "v_norm: of values that are as long as keys alone");
    require_spec(inputs > 0, "inputs must be positive, got ", inputs);
    require_spec(sliding_window >= 0, "sliding_window must be 0 or positive, got ", sliding_window);
    require_spec(sliding_window > 0 || !chunked, "a layer that is chunked needs the size as sliding_window");
    require_spec(!two_way || (!chunked && own_kv()),
                 "two_way: attention in both directions is not chunked, and has keys and values of its own");
    require_spec(!v_norm || qk_norm == QkNorm::head, "v_norm needs a norm of each head of k");
    require_spec(output_gate || !(gate_by_head || softplus_gate),
                 "gate_by_head and softplus_gate are of an output_gate");
    require_spec(clip_qkv >= 0, "clip_qkv must be 0 or positive, got ", clip_qkv);
    require_spec(model.norm_weights || qk_norm == QkNorm::none || qk_norm == QkNorm::turned_heads,
                 "norms of q and k have weights in models whose norms have weights alone");
    for (const int own : {rope, q_rope}) check_rope(model, own, head_dim);
    if (!indexer) return;
    indexer->check_by_head(num_kv_heads);
    check_rope(model, rope, indexer->head_dim);
    require_spec(own_kv() && sliding_window == 0 && !two_way && !sinks && !model.position_bias,
                 "attention whose keys are chosen has keys of its own and no window, and goes one way, without sinks "
                 "and biases of positions");
}

AttentionSpec AttentionSpec::local(Shard shard) const {
    AttentionSpec own = *this;
    own.num_heads = num_heads / shard.size;
    own.num_kv_heads = own.num_heads / local_group(*this, shard);
    if (own.indexer) own.indexer->num_heads = own.num_kv_heads;
    return own;
}

CacheSpec AttentionSpec::cache() const {
    return {.kind = own_kv() ? CacheKind::paged : CacheKind::shared,
            .num_heads = num_heads,
            .num_kv_heads = num_kv_heads,
            .head_dim = head_dim,
            .value_dim = value_dim(),
            .index_dim = indexer ? indexer->head_dim : 0,
            .top_k = indexer ? indexer->top_k : 0,
            .run_keys = indexer ? indexer->run_keys : 1,
            .sliding_window = sliding_window,
            .chunked = chunked,
            .two_way = two_way,
            .spans = spans,
            .owner = kv_owner,
            .states = {}};
}

Attention::Attention(const ModelSpec& model, const AttentionSpec& heads, BufferPlan& plan)
    : spec_(heads),
      own_{.cache = heads.cache(),
           .softmax_scale = heads.softmax_scale,
           .score_cap = heads.score_cap,
           .rope = heads.rope,
           .q_rope = heads.q_rope,
           .eps = model.rms_norm_eps},
      hidden_size_(model.hidden_size),
      in_size_(heads.inputs * model.hidden_size) {
    qkv_ = plan.add({.name = "qkv", .columns = heads.qkv_dim()});
    mixed_ = plan.add({.name = "mixed", .columns = heads.mixed_dim()});
    // Linears of GPUs write 8 columns at once.
    const bool has_gate = heads.output_gate;
    gate_ = plan.add({.name = "attention_gate", .columns = has_gate ? (heads.gate_dim() + 7) / 8 * 8 : 0});
    ungated_ = plan.add({.name = "ungated", .columns = has_gate ? heads.mixed_dim() : 0});
    const bool wide = heads.qk_norm == QkNorm::all;  // the mean is that over all ranks
    mean_squares_ = plan.add({.name = "mean_squares", .columns = wide ? 1 : 0, .rows = 2, .dtype = DType::float32});
    if (heads.indexer) indexer_.emplace(*heads.indexer, heads.rope, plan);
}

void Attention::declare(ParamTable& table) {
    declare(table, table.prefix() + "self_attn.", table.layer_spec().mixer_of<AttentionSpec>());
}

void Attention::declare(ParamTable& table, const std::string& at, const AttentionSpec& model) {
    const int64_t q_dim = model.q_dim(), kv_dim = model.kv_dim(), head_dim = model.head_dim;
    const int64_t value_dim = model.value_dim(), mixed_dim = model.mixed_dim();
    const Cut q_rows = Cut::rows(equal_parts);
    std::vector<ParamTable::Part> parts{{at + "q_proj", q_dim, q_rows}};
    if (model.own_kv())
        parts.insert(parts.end(), {{at + "k_proj", kv_dim, kv_rows(model, head_dim)},
                                   {at + "v_proj", model.v_dim(), kv_rows(model, value_dim)}});
    const bool fused = fuses_rope(model);
    table.linear(qkv_proj_, {.name = at + (model.own_kv() ? "qkv_proj" : "q_proj"),
                             .in_features = in_size_,
                             .parts = parts,
                             .timed = "qkv_proj",
                             .bias = model.qkv_bias,
                             .kind = fused ? LinearKind::qkv : LinearKind::plain,
                             .head_dim = fused ? model.head_dim : 0});
    if (model.qk_norm == QkNorm::turned_heads) {
        const auto ones = [head_dim](Backend&, const VectorWeights&) {
            return ones_like(allocate_host(DType::float32, {head_dim}));
        };
        if (spec_.rope >= 0) table.made(q_norm_, ones), table.made(k_norm_, ones);
    } else if (model.qk_norm == QkNorm::layer_of_heads) {
        const auto norm = [&](VectorWeights& weights, const char* name, int64_t num_heads, const Cut& heads) {
            table.tensor(weights, at + name, {num_heads, head_dim}, heads,
                         [](Backend& backend, const VectorWeights& loaded) {
                             return norm_weight(backend, {NormKind::layer, 0}, loaded, 1);
                         });
        };
        norm(q_norm_, "q_norm.weight", model.num_heads, q_rows);
        if (model.own_kv()) norm(k_norm_, "k_norm.weight", model.num_kv_heads, kv_rows(model, 1));
    } else if (model.qk_norm != QkNorm::none) {
        const bool all = model.qk_norm == QkNorm::all;
        table.norm(q_norm_, at + "q_norm", all ? q_dim : head_dim, all ? q_rows : Cut());
        if (model.own_kv())
            table.norm(k_norm_, at + "k_norm", all ? kv_dim : head_dim, all ? kv_rows(model, head_dim) : Cut());
    }
    if (model.v_norm)
        table.made(v_norm_, [this](Backend&, const VectorWeights&) {
            return k_norm_.prepared ? ones_like(k_norm_.prepared) : Tensor();
        });
    if (model.output_gate)
        table.linear(gate_proj_, {.name = at + "gate_proj",
                                  .in_features = in_size_,
                                  .parts = {{at + "gate_proj", model.gate_dim(), q_rows}},
                                  .timed = "qkv_proj",
                                  .bias = model.qkv_bias});
    if (indexer_)
        indexer_->declare_by_head(table, at, in_size_, model.num_kv_heads, kv_rows(model, model.indexer->head_dim));
    if (model.sinks) table.wide(sinks_, at + "sinks", model.num_heads, q_rows);
    table.linear(o_proj_, {.name = at + "o_proj",
                           .in_features = mixed_dim,
                           .parts = {{at + "o_proj", hidden_size_, Cut::columns(equal_parts)}},
                           .timed = "o_proj",
                           .bias = model.out_bias});
}

std::vector<Site> Attention::sites() const {
    const AttentionSpec& heads = spec_;
    const bool norms = heads.qk_norm == QkNorm::turned_heads ? spec_.rope >= 0 : heads.qk_norm != QkNorm::none;
    std::vector<Site> out{sites::q_proj, sites::q_rope, sites::attention};
    if (norms) out.push_back(sites::q_norm);
    if (!heads.own_kv()) return out;
    out.insert(out.end(), {sites::k_proj, sites::v_proj, sites::k_rope});
    if (norms) out.push_back(sites::k_norm);
    if (heads.v_norm) out.push_back(sites::v_norm);
    if (indexer_)
        for (const Site site : indexer_->sites()) out.push_back(site);
    return out;
}

std::vector<LinearCall> Attention::calls() const {
    std::vector<LinearCall> calls{
        {.in_features = in_size_, .out_features = std::max<int64_t>(spec_.q_dim(), spec_.kv_dim())},
        {.in_features = spec_.mixed_dim(), .out_features = hidden_size_}};
    if (!indexer_) return calls;
    for (const LinearCall& call : indexer_->calls(in_size_, 0)) calls.push_back(call);
    return calls;
}

// Norm, q, k and v, RMSNorm of their heads, RoPE; keys and values into the cache.
template <class Tap>
std::optional<RopeStoreParams> Attention::project(const Step<Tap>& s, Input in) const {
    const AttentionSpec& heads = spec_;
    if (heads.output_gate || indexer_) in = {.x = s.whole(in)};  // two linears read the norm
    if (heads.output_gate) s.linear(gate_proj_, in.x, s.view(gate_).slice(1, 0, heads.gate_dim()));
    if (indexer_) indexer_->store(s, in.x, {});
    const TensorView qkv = s.view(qkv_);
    RopeStoreParams params = rope_store(s, own_, qkv);
    params.value_dim = heads.value_dim();
    const bool wide = heads.qk_norm == QkNorm::all || heads.qk_norm == QkNorm::layer_of_heads,
               behind_rope = heads.qk_norm == QkNorm::head_behind_rope || heads.qk_norm == QkNorm::turned_heads;
    if (!wide) params.q_norm = q_norm_.prepared, params.k_norm = k_norm_.prepared;  // else norm_all_heads does it
    params.v_norm = v_norm_.prepared;
    const bool in_parts = Tap::active || wide || behind_rope;
    // Whether attention may do what is left: other work of the layer reads what the cache has, if its keys are chosen.
    const bool leaves = !in_parts && s.batch.writes_apart && !indexer_;
    if (!in_parts && heads.clip_qkv == 0 && fuses_rope(heads) && qkv_proj_.clips.empty() && qkv_proj_.beside.empty()) {
        const LinearParams linear{
            .x = in.x, .weight = *qkv_proj_.prepared, .norm = in.norm, .residual = {}, .out = qkv};
        if (!leaves || s.backend.fuses_rope_store(linear, params)) {
            ops::linear_rope_store_kv(s.backend, linear, params);
            return {};
        }
    }
    s.linear(qkv_proj_, in.x, qkv, in.norm);
    if (heads.clip_qkv > 0)
        ops::clip(s.backend, {.x = qkv, .out = qkv, .low = -heads.clip_qkv, .high = heads.clip_qkv});
    // RoPE of q alone, or beside values of another size, which no linear knows; or behind what clips, or linears that
    // are shared.
    if (leaves) return params;
    if (!in_parts) {
        ops::qk_norm_rope_store_kv(s.backend, params);
        return {};
    }

    const auto tap_heads = [&](Site site, int first, int count) {
        s.tap_own(site, of_heads(qkv, count, heads.head_dim, int64_t{first} * heads.head_dim, heads.head_dim), qkv_);
    };
    const int value_dim = heads.value_dim();
    const int64_t values_begin = int64_t{heads.q_dim()} + heads.kv_dim();
    const auto tap_q_and_k = [&](Site q, Site k) {
        tap_heads(q, 0, params.num_heads);
        if (heads.own_kv()) tap_heads(k, params.num_heads, params.num_kv_heads);
    };
    const auto tap_v = [&](Site v) {
        s.tap_own(v, of_heads(qkv, params.num_kv_heads, value_dim, values_begin, value_dim), qkv_);
    };
    tap_q_and_k(sites::q_proj, sites::k_proj);
    if (heads.own_kv()) tap_v(sites::v_proj);
    if (wide) {
        norm_all_heads(s, qkv);
        if constexpr (!Tap::active) {
            ops::qk_norm_rope_store_kv(s.backend, params);
            return {};
        }
    }
    // One op norms, turns and stores; here it does one after the other.
    const auto norm_heads = [&] {
        RopeStoreParams part = params;
        part.cos_sin = part.q_cos_sin = part.slot_mapping = {};
        if (params.q_norm) ops::qk_norm_rope_store_kv(s.backend, part);
        if (q_norm_.prepared) tap_q_and_k(sites::q_norm, sites::k_norm);
        if (params.v_norm) tap_v(sites::v_norm);
    };
    if (!behind_rope) norm_heads();
    RopeStoreParams part = params;
    part.q_norm = part.k_norm = part.v_norm = part.slot_mapping = {};
    ops::qk_norm_rope_store_kv(s.backend, part);
    tap_q_and_k(sites::q_rope, sites::k_rope);
    if (behind_rope) norm_heads();
    if (!heads.own_kv()) return {};
    part.cos_sin = part.q_cos_sin = {};
    part.slot_mapping = params.slot_mapping;
    ops::qk_norm_rope_store_kv(s.backend, part);
    return {};
}

// Where all heads are normed together, ranks have as many columns each, and each kv head as often as the others: the
// mean over all of these is that over the model's.
template <class Tap>
void Attention::norm_all_heads(const Step<Tap>& s, const TensorView& qkv) const {
    const int64_t num_tokens = s.num_tokens(), q_dim = spec_.q_dim(), kv_dim = spec_.kv_dim();
    const TensorView parts[] = {qkv.slice(1, 0, q_dim), qkv.slice(1, q_dim, q_dim + kv_dim)};
    const TensorView means = s.view(mean_squares_);
    const auto of_part = [&](int i) { return means.slice(0, i * num_tokens, (i + 1) * num_tokens); };
    const bool together = spec_.qk_norm == QkNorm::all, several = together && s.num_ranks() > 1;
    const int num_heads[] = {spec_.num_heads, spec_.num_kv_heads};
    if (several) {
        for (int i = 0; i < 2; ++i)
            ops::mean_square(
                s.backend, {.x = parts[i], .out = of_part(i), .multiplier = 1.0f / static_cast<float>(s.num_ranks())});
        s.ranks.all_reduce(means);
    }
    for (int i = 0; i < 2; ++i)
        ops::rms_norm(s.backend, {.x = parts[i],
                                  .weight = (i == 0 ? q_norm_ : k_norm_).prepared,
                                  .out = parts[i],
                                  .eps = own_.eps,
                                  .mean_square = several ? of_part(i) : TensorView(),
                                  .num_groups = together ? 1 : num_heads[i]});
}

template <class Tap>
void Attention::begin(const Step<Tap>& s, Input in) const {
    const std::optional<RopeStoreParams> store = project(s, in);
    const AttentionSpec& heads = spec_;
    const TensorView mixed = s.view(mixed_), ungated = s.view(ungated_);
    const int value_dim = heads.value_dim();
    const TensorView result = of_heads(mixed, heads.num_heads, value_dim, 0, value_dim);
    const TensorView out = ungated ? of_heads(ungated, heads.num_heads, value_dim, 0, value_dim) : result;
    if (!indexer_) attend(s, own_, s.view(qkv_), sinks_.prepared, out, {}, 0, store);
    for (int kv_head = 0; indexer_ && kv_head < heads.num_kv_heads; ++kv_head)
        attend(s, own_, s.view(qkv_), {}, out, indexer_->choose(s, kv_head), kv_head);
    if (ungated)
        ops::act_mul(s.backend, {.gate_up = s.view(gate_).slice(1, 0, heads.gate_dim()),
                                 .out = mixed,
                                 .activation = heads.softplus_gate ? Activation::softplus : Activation::sigmoid,
                                 .up = ungated});
    s.tap_own(sites::attention, result, mixed_);
}

template <class Tap>
void Attention::store(const Step<Tap>& s, Input in) const {
    project(s, in);
}

template <class Tap>
void Attention::finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const {
    s.linear(o_proj_, s.view(mixed_), out, {}, residual);
}

template void Attention::store(const Step<NoTap>&, Input) const;
template void Attention::begin(const Step<NoTap>&, Input) const;
template void Attention::begin(const Step<StepTap>&, Input) const;
template void Attention::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void Attention::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
