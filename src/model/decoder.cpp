#include "model/decoder.h"

#include <algorithm>

#include "ops/device_queue.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// A layer of several ranks is about 15 launches and copies, and a stream takes about 1000 that have not run.
constexpr int layers_apart = 16;

}  // namespace

Decoder::Decoder(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, Communicator& communicator,
                 StageLink* stages)
    : spec_(spec),
      weights_(weights),
      backend_(backend),
      communicator_(communicator),
      stages_(stages),
      logits_(spec, weights, backend, communicator) {
    for (const RopeSpec& rope : spec.ropes) {
        const int64_t half = static_cast<int64_t>(rope.inv_freq.size());
        inv_freq_.push_back(backend.allocate(DType::float32, std::array{half}));
        backend.copy(TensorView(const_cast<float*>(rope.inv_freq.data()), DType::float32, {half}), inv_freq_.back());
    }
}

std::vector<BufferShape<Decoder::Workspace>> Decoder::workspace_shapes(const ModelSpec& spec, DType activation) {
    int64_t rotary_dims = 0;
    for (const RopeSpec& rope : spec.ropes) rotary_dims += 2 * static_cast<int64_t>(rope.inv_freq.size());
    const bool wide_norm = spec.attention.qk_norm == QkNorm::all;
    const ExpertsSpec& experts = spec.experts;
    int inner = experts.shared_intermediate_size;
    for (int layer = 0; layer < spec.num_layers; ++layer)
        if (spec.has_mlp(layer)) inner = std::max(inner, spec.intermediate_size_of(layer));
    std::vector<BufferShape<Workspace>> shapes{{&Workspace::x, 1, spec.hidden_size, activation},
                                               {&Workspace::normed, 1, spec.hidden_size, activation},
                                               {&Workspace::last, 1, spec.hidden_size, activation},
                                               {&Workspace::qkv, 1, spec.widest(&AttentionSpec::qkv_dim), activation},
                                               {&Workspace::attn, 1, spec.widest_mixed(), activation},
                                               {&Workspace::mean_squares, 2, wide_norm ? 1 : 0, DType::float32},
                                               {&Workspace::inner, 1, inner, activation},
                                               {&Workspace::cos_sin, 1, rotary_dims, DType::float32}};
    if (spec.attention.output_gate)
        shapes.push_back({&Workspace::gated, 1, 2 * spec.widest(&AttentionSpec::q_dim), activation});
    if (const LatentSpec& latent = spec.latent; latent != LatentSpec())
        shapes.insert(shapes.end(),
                      {{&Workspace::q_latent, 1, latent.q_rank, activation},
                       {&Workspace::queries, 1, spec.attention.num_heads * latent.query_dim(), activation},
                       {&Workspace::latents, 1, spec.attention.num_heads * latent.kv_rank, activation}});
    if (const DeltaSpec& delta = spec.delta; delta != DeltaSpec())
        shapes.insert(shapes.end(), {{&Workspace::delta_in, 1, delta.padded_in_dim(), activation},
                                     {&Workspace::conv, 1, delta.conv_dim(), activation},
                                     {&Workspace::delta_gates, 1, 2 * delta.num_v_heads, DType::float32}});
    if (experts.count > 0)
        shapes.insert(shapes.end(), {{&Workspace::router_logits, 1, (experts.count + 7) / 8 * 8, DType::float32},
                                     {&Workspace::expert_ids, 1, experts.top_k, DType::int32},
                                     {&Workspace::expert_weights, 1, experts.top_k, DType::float32},
                                     {&Workspace::expert_inner, experts.top_k, experts.intermediate_size, activation},
                                     {&Workspace::expert_parts, experts.top_k, spec.hidden_size, activation},
                                     {&Workspace::expert_lists, experts.top_k, expert_list_ints, DType::int32}});
    if (experts.shared_intermediate_size > 0)
        shapes.insert(shapes.end(), {{&Workspace::shared, 1, spec.hidden_size, activation},
                                     {&Workspace::shared_gate, 1, experts.shared_gate ? 8 : 0, DType::float32}});
    if (experts.beside_mlp) shapes.push_back({&Workspace::shared, 1, spec.hidden_size, activation});
    if (const int64_t size = spec.per_layer_size; size > 0)
        shapes.insert(shapes.end(), {{&Workspace::per_layer, spec.num_layers, size, activation},
                                     {&Workspace::per_layer_projected, spec.num_layers, size, activation},
                                     {&Workspace::per_layer_gate, 1, size, activation}});
    return shapes;
}

std::vector<BufferShape<Decoder::TapWorkspace>> Decoder::tap_shapes(const ModelSpec& spec, DType activation) {
    return {{&TapWorkspace::branch, 1, spec.hidden_size, activation},
            {&TapWorkspace::gate_up, 1, 2 * spec.widest_mlp(), activation}};
}

std::vector<BufferShape<Decoder::LoraWorkspace>> Decoder::lora_shapes(const ModelSpec& spec, DType activation,
                                                                      int64_t most_rank) {
    const LatentSpec& latent = spec.latent;
    const int widest =
        std::max({spec.hidden_size, spec.widest(&AttentionSpec::q_dim), spec.widest(&AttentionSpec::kv_dim),
                  spec.widest_mlp(), latent.q_rank, spec.attention.num_heads * latent.query_dim(), latent.row_dim(),
                  latent.v_dim, spec.delta.conv_dim(), spec.num_layers * spec.per_layer_size});
    return {{&LoraWorkspace::inner, 1, (most_rank + 7) / 8 * 8, activation},
            {&LoraWorkspace::delta, 1, widest, activation}};
}

int64_t Decoder::workspace_bytes(const ModelSpec& spec, DType activation, int64_t num_tokens, int64_t most_rank) {
    int64_t bytes = buffer_bytes(workspace_shapes(spec, activation), num_tokens);
    if (most_rank > 0)
        bytes += buffer_bytes(tap_shapes(spec, activation), num_tokens) +
                 buffer_bytes(lora_shapes(spec, activation, most_rank), num_tokens);
    return bytes;
}

void Decoder::reserve_lora(const LoraStep& step) {
    const int64_t had = lora_.inner ? lora_.inner.shape(1) : 0, most_rank = std::max(had, step.most_rank());
    const int64_t num_rows = std::max(lora_.capacity, step.num_rows());
    if (most_rank > had) lora_.capacity = 0;
    reserve(backend_, lora_, lora_shapes(spec_, backend_.activation_dtype(), most_rank), num_rows);
}

template <class Tap>
void Decoder::add_lora(const Tap& tap, const LinearWeights& weights, const TensorView& x, const TensorView& out,
                       size_t head) {
    if constexpr (Tap::active) {
        if (!tap.lora) return;
        for (const size_t row : weights.rows) {
            const LoraStep::Changes changes = tap.lora->changes(row, head);
            if (changes.parts.empty()) continue;
            ops::lora(backend_, {.x = x,
                                 .parts = changes.parts,
                                 .out = out.slice(1, changes.outputs.begin, changes.outputs.end),
                                 .inner = lora_.inner,
                                 .delta = lora_.delta,
                                 .listed = tap.lora->listed()});
        }
    }
}

template <class Tap>
void Decoder::linear(const Tap& tap, const LinearWeights& weights, TensorView x, const TensorView& out,
                     NormPrologue norm, const TensorView& residual) {
    if (Tap::active && norm.weight) {
        ops::rms_norm(backend_, {.x = x, .weight = norm.weight, .out = norm.scratch, .eps = norm.eps});
        x = norm.scratch;
        norm = {};
    }
    ops::linear(backend_, {.x = x, .weight = *weights.prepared, .norm = norm, .residual = residual, .out = out});
    add_lora(tap, weights, x, out);
}

template <class Tap>
void Decoder::head_linear(const Tap& tap, const LinearWeights& weights, const TensorView& x, const TensorView& out) {
    ops::head_linear(backend_, {.x = x, .weight = *weights.prepared, .out = out});
    if (Tap::active)
        for (int64_t head = 0; head < x.shape(1); ++head)
            add_lora(tap, weights, x.select(1, head), out.select(1, head), static_cast<size_t>(head));
}

Decoder::Activations Decoder::activations(int64_t num_tokens) const {
    auto rows = [&](const Tensor& buffer) { return buffer.slice(0, 0, num_tokens); };
    return {.x = rows(work_.x), .normed = rows(work_.normed)};
}

// Rows of a layer that is narrower than the widest are neighbours, too.
TensorView Decoder::part(const Tensor& buffer, const Step& s, int64_t columns) {
    return {buffer.data(), buffer.dtype(), {s.a.x.shape(0), columns}, buffer.device()};
}
TensorView Decoder::qkv(const Step& s, int layer) const {
    return part(work_.qkv, s, spec_.attention_of(layer).qkv_dim());
}
TensorView Decoder::attn(const Step& s, int layer) const { return part(work_.attn, s, spec_.mixed_dim(layer)); }
TensorView Decoder::gated(const Step& s, int layer) const {
    return part(work_.gated, s, 2 * spec_.attention_of(layer).q_dim());
}
TensorView Decoder::inner(const Step& s, int layer) const {
    return part(work_.inner, s, spec_.intermediate_size_of(layer));
}

TensorView Decoder::cos_sin(int64_t num_tokens, int rope) const {
    float* table = work_.cos_sin.as<float>();  // the tables of all ropes, one behind the other
    for (int before = 0; before < rope; ++before)
        table += 2 * num_tokens * inv_freq_[static_cast<size_t>(before)].numel();
    return {table, DType::float32, {num_tokens, 2 * inv_freq_[static_cast<size_t>(rope)].numel()}, backend_.device()};
}

RopeStoreParams Decoder::rope_store(const Step& s, int layer) const {
    const LayerWeights& w = weights_.layers[layer];
    const LayerSpec& spec = spec_.layers[static_cast<size_t>(layer)];
    const AttentionSpec attention = spec_.attention_of(layer);
    const bool wide = attention.qk_norm == QkNorm::all;  // done before
    const auto own = [&](const TensorView& of_kv) { return attention.own_kv ? of_kv : TensorView(); };
    return {.qkv = qkv(s, layer),
            .cos_sin = spec.rope < 0 ? TensorView() : cos_sin(s.a.x.shape(0), spec.rope),
            .q_cos_sin = spec.q_rope < 0 ? TensorView() : cos_sin(s.a.x.shape(0), spec.q_rope),
            .q_turned = {},
            .q_norm = wide ? TensorView() : TensorView(w.q_norm.prepared),
            .k_norm = wide ? TensorView() : TensorView(w.k_norm.prepared),
            .v_norm = w.v_norm.prepared,
            .slot_mapping = own(s.batch.slot_mapping.select(0, s.cache.group(layer))),
            .k_cache = own(s.cache.k(layer)),
            .v_cache = own(s.cache.v(layer)),
            .k_scales = own(s.cache.k_scales(layer)),
            .v_scales = own(s.cache.v_scales(layer)),
            .num_heads = attention.num_heads,
            .num_kv_heads = attention.own_kv ? attention.num_kv_heads : 0,
            .head_dim = attention.head_dim,
            .eps = spec_.rms_norm_eps};
}

// One layer, read from top to bottom. A helper does with one op what several make where no hook looks in between.
template <class Tap>
void Decoder::run_layer(const Step& s, const Tap& tap, int layer) {
    const LayerWeights& w = weights_.layers[layer];
    const bool last = layer + 1 == spec_.num_layers;
    const TensorView after = (last ? weights_.norm : weights_.layers[layer + 1].attention_norm).prepared;
    begin_attention(s.batch, layer);
    if (layer > 0 && layer % layers_apart == 0) keep_together();
    if (spec_.has_state(layer)) {
        run_delta_rule(s, tap, layer);
    } else {
        spec_.has_latent(layer) ? project_latent(s, tap, layer) : project_qkv(s, tap, layer);
        attend(s, tap, layer);
    }
    const auto gate_up = [&] { project_gate_up(s, tap, layer, mlp_input(s, tap, layer), inner(s, layer)); };
    if (spec_.parallel_blocks) gate_up();  // while what both read is there
    add_branch(s, tap, layer,
               {.post_norm = w.attention_post_norm,
                .next_norm = w.mlp_norm.prepared,
                .branch_site = Site::o_proj,
                .norm_site = Site::post_attention_layernorm,
                .sum_site = Site::attention_residual},
               [&](const TensorView& residual, const TensorView& out) {
                   linear(tap, w.o_proj, attn(s, layer), out, {}, residual);
               });
    begin_mlp(s.batch, layer);
    const bool has_mlp = spec_.has_mlp(layer), two = w.experts && has_mlp, three = spec_.per_layer_size > 0;
    if (has_mlp && !spec_.parallel_blocks) gate_up();
    if (w.experts) choose_experts(s, tap, layer);
    add_branch(s, tap, layer,
               {.post_norm = w.mlp_post_norm,
                .next_norm = three ? TensorView() : after,
                .branch_site = two ? std::nullopt : std::optional(w.experts ? Site::experts : Site::down_proj),
                .norm_site = Site::post_feedforward_layernorm,
                .sum_site = three ? Site::mlp_residual : Site::residual,
                .is_whole = two,
                .scale = three ? 1 : w.scale},
               [&](const TensorView& residual, const TensorView& out) {
                   if (two) return run_mlp_and_experts(s, tap, layer, out);
                   if (w.experts) return run_experts(s, tap, layer, residual, out);
                   linear(tap, w.down_proj, inner(s, layer), out, {}, residual);
               });
    if (!three) return;
    add_branch(s, tap, layer,
               {.post_norm = w.per_layer_post_norm,
                .next_norm = after,
                .branch_site = Site::per_layer_projection,
                .norm_site = Site::post_per_layer_input_norm,
                .sum_site = Site::residual,
                .is_whole = true,
                .scale = w.scale},
               [&](const TensorView&, const TensorView& out) { read_own_vector(s, tap, layer, out); });
}

// The norm at the beginning of a sublayer, if it has one, is left to its first linear, is there already, or, for hooks,
// is done here.
template <class Tap>
Decoder::Input Decoder::normed_input(const Step& s, const Tap& tap, int layer, const VectorWeights& norm, Site site) {
    const float eps = spec_.rms_norm_eps;
    if (!norm.prepared) return {.x = s.a.x, .norm = {}};
    if constexpr (Tap::active) {
        ops::rms_norm(backend_, {.x = s.a.x, .weight = norm.prepared, .out = s.a.normed, .eps = eps});
        tap_common(tap, site, layer, s.a.normed, Tensor(s.a.normed, work_.normed.owner));
        return {.x = s.a.normed, .norm = {}};
    }
    if (normed_ahead()) return {.x = s.a.normed, .norm = {}};
    return {.x = s.a.x, .norm = {.weight = norm.prepared, .scratch = s.a.normed, .eps = eps}};
}

// Norm, q, k and v, RMSNorm of their heads, RoPE; keys and values into the cache.
template <class Tap>
void Decoder::project_qkv(const Step& s, const Tap& tap, int layer) {
    const LayerWeights& w = weights_.layers[layer];
    auto [x, norm] = normed_input(s, tap, layer, w.attention_norm, Site::input_layernorm);
    if (spec_.attention.output_gate) {  // two linears read the norm
        if (norm.weight) {
            ops::rms_norm(backend_, {.x = x, .weight = norm.weight, .out = s.a.normed, .eps = norm.eps});
            x = s.a.normed;
            norm = {};
        }
        linear(tap, w.gate_proj, x, gated(s, layer).slice(1, 0, spec_.attention_of(layer).q_dim()));
    }
    const RopeStoreParams params = rope_store(s, layer);
    const TensorView qkv = params.qkv;
    const AttentionSpec attention = spec_.attention_of(layer);
    const bool wide = attention.qk_norm == QkNorm::all,
               behind_rope = attention.qk_norm == QkNorm::head_behind_rope || attention.qk_norm == QkNorm::turned_heads;
    const bool in_parts = Tap::active || wide || behind_rope;
    if (!in_parts && attention.own_kv)
        return ops::linear_rope_store_kv(
            backend_, {.x = x, .weight = *w.qkv_proj.prepared, .norm = norm, .residual = {}, .out = qkv}, params);
    linear(tap, w.qkv_proj, x, qkv, norm);
    if (!in_parts) return ops::qk_norm_rope_store_kv(backend_, params);  // of q alone, of which no linear knows

    const int num_heads = params.num_heads, num_kv_heads = params.num_kv_heads;
    const int64_t head_dim = attention.head_dim;
    auto tap_heads = [&](Site site, int first, int count) {  // of qkv
        const int64_t shape[] = {x.shape(0), count, head_dim}, strides[] = {qkv.stride(0), head_dim, 1};
        std::byte* data = qkv.as<std::byte>() + first * head_dim * size_bytes(qkv.dtype());
        tap_own(tap, site, layer, TensorView(data, qkv.dtype(), shape, strides, qkv.device()), qkv, work_.qkv);
    };
    auto tap_q_and_k = [&](Site q, Site k) {
        tap_heads(q, 0, num_heads);
        if (attention.own_kv) tap_heads(k, num_heads, num_kv_heads);
    };
    auto tap_v = [&](Site v) { tap_heads(v, num_heads + num_kv_heads, num_kv_heads); };
    tap_q_and_k(Site::q_proj, Site::k_proj);
    if (attention.own_kv) tap_v(Site::v_proj);
    if (wide) {
        norm_all_heads(s, layer);
        if constexpr (!Tap::active) return ops::qk_norm_rope_store_kv(backend_, params);
    }
    // One op norms, turns and stores; here it does one after the other.
    const auto norm_heads = [&] {
        RopeStoreParams part = params;
        part.cos_sin = part.q_cos_sin = part.slot_mapping = {};
        if (params.q_norm) ops::qk_norm_rope_store_kv(backend_, part);
        if (w.q_norm.prepared) tap_q_and_k(Site::q_norm, Site::k_norm);
        if (params.v_norm) tap_v(Site::v_norm);
    };
    if (!behind_rope) norm_heads();
    RopeStoreParams part = params;
    part.q_norm = part.k_norm = part.v_norm = part.slot_mapping = {};
    ops::qk_norm_rope_store_kv(backend_, part);
    tap_q_and_k(Site::q_rope, Site::k_rope);
    if (behind_rope) norm_heads();
    if (!attention.own_kv) return;
    part.cos_sin = part.q_cos_sin = {};
    part.slot_mapping = params.slot_mapping;
    ops::qk_norm_rope_store_kv(backend_, part);
}

// Ranks have as many columns each, and each kv head as often as the others: the mean over all of these is that over the
// model's.
void Decoder::norm_all_heads(const Step& s, int layer) {
    const LayerWeights& w = weights_.layers[layer];
    const TensorView qkv = this->qkv(s, layer);
    const int64_t num_tokens = qkv.shape(0), q_dim = spec_.attention_of(layer).q_dim(),
                  kv_dim = spec_.attention_of(layer).kv_dim();
    const TensorView parts[] = {qkv.slice(1, 0, q_dim), qkv.slice(1, q_dim, q_dim + kv_dim)};
    const TensorView means = work_.mean_squares.slice(0, 0, 2 * num_tokens);
    const auto of_part = [&](int i) { return means.slice(0, i * num_tokens, (i + 1) * num_tokens); };
    const bool several = num_ranks() > 1;
    if (several) {
        for (int i = 0; i < 2; ++i)
            ops::mean_square(backend_,
                             {.x = parts[i], .out = of_part(i), .multiplier = 1.0f / static_cast<float>(num_ranks())});
        communicator_.all_reduce(means);
    }
    for (int i = 0; i < 2; ++i)
        ops::rms_norm(backend_, {.x = parts[i],
                                 .weight = (i == 0 ? w.q_norm : w.k_norm).prepared,
                                 .out = parts[i],
                                 .eps = spec_.rms_norm_eps,
                                 .mean_square = several ? of_part(i) : TensorView()});
}

template <class Tap>
void Decoder::attend(const Step& s, const Tap& tap, int layer) {
    const AttentionSpec attention = spec_.attention_of(layer);
    const TensorView qkv = this->qkv(s, layer), attn = this->attn(s, layer);
    const int64_t heads[] = {qkv.shape(0), attention.num_heads, attention.head_dim};
    const int64_t q_strides[] = {qkv.stride(0), attention.head_dim, 1};
    const TensorView q(qkv.data(), qkv.dtype(), heads, q_strides, qkv.device());
    const TensorView result = attn.reshape({heads[0], heads[1], attn.shape(1) / heads[1]});
    TensorView out = result, both;
    if (spec_.has_latent(layer))
        out = work_.latents.slice(0, 0, heads[0]).reshape({heads[0], heads[1], attention.latent_dim});
    if (attention.output_gate) {
        both = gated(s, layer);
        const int64_t strides[] = {both.stride(0), attention.head_dim, 1};
        const TensorView behind = both.slice(1, attention.q_dim(), 2 * attention.q_dim());
        out = TensorView(behind.data(), behind.dtype(), heads, strides, behind.device());
    }
    const LayerSpec& spec = spec_.layers[static_cast<size_t>(layer)];
    const auto& lists = s.batch.attention_lists;
    const auto list = std::ranges::find(lists, AttentionLayer{spec.sliding_window, heads_of(attention), spec.chunked},
                                        &AttentionList::layer);
    ops::paged_attention(backend_, {.q = q,
                                    .k_cache = s.cache.k(layer),
                                    .v_cache = s.cache.v(layer),
                                    .k_scales = s.cache.k_scales(layer),
                                    .v_scales = s.cache.v_scales(layer),
                                    .block_table = s.batch.block_table.select(0, s.cache.group(layer)),
                                    .cu_seqlens_q = s.batch.cu_seqlens_q,
                                    .context_lens = s.batch.context_lens,
                                    .out = out,
                                    .sinks = weights_.layers[layer].sinks.prepared,
                                    .softmax_scale = attention.softmax_scale,
                                    .score_cap = attention.score_cap,
                                    .sliding_window = spec.sliding_window,
                                    .chunked = spec.chunked,
                                    .max_query_len = s.batch.max_query_len,
                                    .work = s.batch.attention_work,
                                    .list = static_cast<int>(list - lists.begin()),
                                    .known = list == lists.end() ? AttentionList() : *list,
                                    .workspace = s.cache.workspace()});
    if (spec_.has_latent(layer)) head_linear(tap, weights_.layers[layer].v_b, out, result);
    if (both) ops::act_mul(backend_, {.gate_up = both, .out = attn, .activation = Activation::sigmoid});
    if constexpr (Tap::active) tap_own(tap, Site::attention, layer, result, attn, work_.attn);
}

// What a sublayer ends with joins the residual stream: project(residual, out), where the residual may be absent.
template <class Tap, class Project>
void Decoder::add_branch(const Step& s, const Tap& tap, int layer, const Branch& b, Project project) {
    const TensorView x = s.a.x, branch = Tap::active ? taps_.branch.slice(0, 0, x.shape(0)) : s.a.normed;
    const Tensor branch_owner(branch, Tap::active ? taps_.branch.owner : nullptr);
    if (!Tap::active && !normed_ahead()) return project(x, x);
    project(TensorView(), branch);
    AddRmsNormParams sum{.x = branch,
                         .residual = x,
                         .weight = b.next_norm,
                         .out = branch,
                         .eps = spec_.rms_norm_eps,
                         .multiplier = spec_.residual_multiplier,
                         .scale = b.scale};
    if (!Tap::active && !b.post_norm.prepared) return communicator_.all_reduce_add_rms_norm(backend_, sum);
    if (num_ranks() > 1 && !b.is_whole) communicator_.all_reduce(branch);
    if (b.branch_site) tap_common(tap, *b.branch_site, layer, branch, branch_owner);
    if (b.post_norm.prepared) {
        ops::rms_norm(backend_, {.x = branch, .weight = b.post_norm.prepared, .out = branch, .eps = sum.eps});
        tap_common(tap, b.norm_site, layer, branch, branch_owner);
    }
    // The next sublayer reads the sum, or norms it when hooks have seen it: see normed_input.
    if (Tap::active || !spec_.pre_norms) sum.weight = {};
    ops::add_rms_norm(backend_, sum);
    tap_common(tap, b.sum_site, layer, x, Tensor(x, work_.x.owner));
}

void Decoder::keep_together() {
    if (num_ranks() > 1 && communicator_.capturable()) communicator_.barrier();
}

void Decoder::embed(const TensorView& ids, const LinearWeights& table, int64_t vocab_size, float multiplier,
                    const TensorView& out) {
    EmbeddingParams params{.ids = ids, .table = *table.prepared, .out = out, .multiplier = multiplier};
    if (num_ranks() > 1)
        params.first_id =
            static_cast<int32_t>(vocab_of(vocab_size, {communicator_.rank(), communicator_.size()}).begin);
    ops::embedding(backend_, params);
    keep_together();
    if (num_ranks() > 1) communicator_.all_reduce(out);
}

template <class Tap>
Tensor Decoder::forward(const Batch& batch, const KvCache& cache, const Tap& tap) {
    const LayerRange layers = spec_.own_layers();
    const int64_t num_tokens = batch.input_ids.shape(0), num_rows = batch.logits_rows.shape(0);
    reserve(backend_, work_, workspace_shapes(spec_, backend_.activation_dtype()), std::max(num_tokens, num_rows));
    if constexpr (Tap::active) {
        reserve(backend_, taps_, tap_shapes(spec_, backend_.activation_dtype()), num_tokens);
        if (tap.lora) reserve_lora(*tap.lora);
    }
    const Step s{.a = activations(num_tokens), .batch = batch, .cache = cache};
    if (spec_.is_first_stage())
        embed(batch.input_ids, weights_.embed_tokens, spec_.vocab_size, spec_.embedding_multiplier, s.a.x);
    else if (!stages_->receive(s.a.x))
        throw StepAborted();
    for (size_t rope = 0; rope < inv_freq_.size(); ++rope)
        ops::rope_table(backend_, {.positions = batch.positions,
                                   .inv_freq = inv_freq_[rope],
                                   .attention_factor = spec_.ropes[rope].attention_factor,
                                   .scale_beta = spec_.ropes[rope].scale_beta,
                                   .scale_positions = spec_.ropes[rope].scale_positions,
                                   .scale_offset = spec_.ropes[rope].scale_offset,
                                   .cos_sin = cos_sin(num_tokens, static_cast<int>(rope))});
    if (spec_.is_first_stage()) tap_common(tap, Site::embedding, -1, s.a.x, Tensor(s.a.x, work_.x.owner));
    if (spec_.per_layer_size > 0) embed_layers(s, tap);
    if (!Tap::active && normed_ahead() && spec_.pre_norms)  // what the first layer finds there, as each later one does
        ops::rms_norm(backend_, {.x = s.a.x,
                                 .weight = weights_.layers[layers.begin].attention_norm.prepared,
                                 .out = s.a.normed,
                                 .eps = spec_.rms_norm_eps});
    for (int layer = layers.begin; layer < layers.end; ++layer) run_layer(s, tap, layer);
    if (!spec_.is_last_stage()) {
        stages_->send(s.a.x);
        return {};
    }

    if (num_rows == 0) return {};              // a prefill chunk that is not the last
    begin_attention(batch, spec_.num_layers);  // that is, the logits
    // Only the rows whose logits are wanted go through the final norm and the vocabulary.
    const TensorView last = work_.last.slice(0, 0, num_rows);
    ops::gather_rows(backend_, {.x = s.a.x, .rows = batch.logits_rows, .out = last});
    NormPrologue norm{
        .weight = weights_.norm.prepared, .scratch = work_.normed.slice(0, 0, num_rows), .eps = spec_.rms_norm_eps};
    if constexpr (Tap::active) {
        ops::rms_norm(backend_, {.x = last, .weight = norm.weight, .out = last, .eps = norm.eps});
        tap_common(tap, Site::final_norm, -1, last, Tensor(last, work_.last.owner));
        norm = {};
    }
    const Tensor logits = logits_.compute(batch, last, norm, Tap::active);
    if constexpr (Tap::active) tap_common(tap, Site::logits, -1, logits.slice(1, 0, spec_.vocab_size), logits);
    return logits;
}

Tensor Decoder::sample(const Batch& batch, const Tensor& logits) {
    if (!spec_.is_last_stage()) return {};
    begin_mlp(batch, spec_.num_layers);
    return logits_.sample(batch, logits);
}

// What decoder_mixing.cpp and decoder_mlp.cpp call, and the engine.
#define INFINILM_FOR_TAP(Tap)                                                                                        \
    template Decoder::Input Decoder::normed_input(const Step&, const Tap&, int, const VectorWeights&, Site);         \
    template void Decoder::add_lora(const Tap&, const LinearWeights&, const TensorView&, const TensorView&, size_t); \
    template void Decoder::head_linear(const Tap&, const LinearWeights&, const TensorView&, const TensorView&);      \
    template void Decoder::linear(const Tap&, const LinearWeights&, TensorView, const TensorView&, NormPrologue,     \
                                  const TensorView&);                                                                \
    template Tensor Decoder::forward(const Batch&, const KvCache&, const Tap&);
INFINILM_FOR_TAP(NoTap)
INFINILM_FOR_TAP(StepTap)
#undef INFINILM_FOR_TAP

}  // namespace infinilm
