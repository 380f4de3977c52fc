#include "model/decoder.h"

#include <algorithm>

#include "ops/device_queue.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// A layer of several ranks is about 15 launches and copies, and a stream takes about 1000 that have not run.
constexpr int layers_apart = 16;

// Pieces of a step that an abort may fall between; the 0th is what comes before the first layer.
void begin_attention(const Batch& batch, int layer) {
    if (batch.abort) batch.abort->begin(static_cast<uint32_t>(2 * layer + 1));
}
void begin_mlp(const Batch& batch, int layer) {
    if (batch.abort) batch.abort->begin(static_cast<uint32_t>(2 * layer + 2));
}

}  // namespace

Decoder::Decoder(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, Communicator& communicator)
    : spec_(spec),
      weights_(weights),
      backend_(backend),
      communicator_(communicator),
      logits_(spec, weights, backend, communicator) {
    const int64_t half = static_cast<int64_t>(spec.rope.inv_freq.size());
    inv_freq_ = backend.allocate(DType::float32, std::array{half});
    backend.copy(TensorView(const_cast<float*>(spec.rope.inv_freq.data()), DType::float32, {half}), inv_freq_);
}

std::vector<BufferShape<Decoder::Workspace>> Decoder::workspace_shapes(const ModelSpec& spec, DType activation) {
    return {{&Workspace::x, 1, spec.hidden_size, activation},
            {&Workspace::normed, 1, spec.hidden_size, activation},
            {&Workspace::last, 1, spec.hidden_size, activation},
            {&Workspace::qkv, 1, spec.q_dim() + 2 * spec.kv_dim(), activation},
            {&Workspace::attn, 1, spec.q_dim(), activation},
            {&Workspace::inner, 1, spec.mlp.intermediate_size, activation},
            {&Workspace::cos_sin, 1, 2 * static_cast<int64_t>(spec.rope.inv_freq.size()), DType::float32}};
}

int64_t Decoder::workspace_bytes(const ModelSpec& spec, DType activation, int64_t num_tokens) {
    return buffer_bytes(workspace_shapes(spec, activation), num_tokens);
}

void Decoder::reserve_taps(int64_t num_tokens) {
    if (num_tokens <= taps_.num_tokens) return;
    const DType act = backend_.activation_dtype();
    const int64_t half = static_cast<int64_t>(spec_.rope.inv_freq.size());
    while_quiet(backend_, [&] {
        taps_ = {};
        taps_ = {.num_tokens = num_tokens,
                 .branch = backend_.allocate(act, std::array<int64_t, 2>{num_tokens, spec_.hidden_size}),
                 .gate_up = backend_.allocate(act, std::array<int64_t, 2>{num_tokens, 2 * spec_.mlp.intermediate_size}),
                 .identity = backend_.allocate(DType::float32, std::array{num_tokens, 2 * half}),
                 .no_slots = backend_.allocate(DType::int64, std::array{num_tokens})};
    });
    const Tensor identity = allocate_host(DType::float32, {num_tokens, 2 * half});
    for (int64_t t = 0; t < num_tokens; ++t) std::fill_n(identity.as<float>() + t * 2 * half, half, 1.0f);
    backend_.copy(identity, taps_.identity);
    const Tensor no_slots = allocate_host(DType::int64, {num_tokens});
    std::fill_n(no_slots.as<int64_t>(), num_tokens, -1);
    backend_.copy(no_slots, taps_.no_slots);
}

Decoder::Activations Decoder::activations(int64_t num_tokens) const {
    const AttentionSpec& attention = spec_.attention;
    auto rows = [&](const Tensor& buffer) { return buffer.slice(0, 0, num_tokens); };
    const TensorView qkv = rows(work_.qkv);
    const int64_t heads[] = {num_tokens, attention.num_heads, attention.head_dim};
    const int64_t q_strides[] = {qkv.stride(0), attention.head_dim, 1};
    return {.x = rows(work_.x),
            .normed = rows(work_.normed),
            .qkv = qkv,
            .q = TensorView(qkv.data(), qkv.dtype(), heads, q_strides, qkv.device()),
            .attn = rows(work_.attn),
            .inner = rows(work_.inner),
            .cos_sin = rows(work_.cos_sin)};
}

RopeStoreParams Decoder::rope_store(int layer, const Activations& a, const Batch& batch, const KvCache& cache) const {
    const LayerWeights& w = weights_.layers[layer];
    return {.qkv = a.qkv,
            .cos_sin = a.cos_sin,
            .q_norm = w.q_norm.prepared,
            .k_norm = w.k_norm.prepared,
            .slot_mapping = batch.slot_mapping,
            .k_cache = cache.k(layer),
            .v_cache = cache.v(layer),
            .num_heads = spec_.attention.num_heads,
            .num_kv_heads = spec_.attention.num_kv_heads,
            .head_dim = spec_.attention.head_dim,
            .eps = spec_.rms_norm_eps};
}

void Decoder::attend(int layer, const Activations& a, const Batch& batch, const KvCache& cache) {
    ops::paged_attention(backend_, {.q = a.q,
                                    .k_cache = cache.k(layer),
                                    .v_cache = cache.v(layer),
                                    .block_table = batch.block_table,
                                    .cu_seqlens_q = batch.cu_seqlens_q,
                                    .context_lens = batch.context_lens,
                                    .out = TensorView(a.attn.data(), a.attn.dtype(), a.q.shape(), a.attn.device()),
                                    .softmax_scale = spec_.attention.softmax_scale,
                                    .sliding_window = spec_.attention.sliding_window[layer],
                                    .max_query_len = batch.max_query_len,
                                    .max_context_len = batch.max_context_len});
}

void Decoder::run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache) {
    const LayerWeights& w = weights_.layers[layer];
    const bool last = layer + 1 == spec_.num_layers, several = num_ranks() > 1;
    // The linear at the beginning of a sublayer. Several ranks have the norm of its input from the sum before.
    auto first_linear = [&](const VectorWeights& norm, const LinearWeights& weight, const TensorView& out) {
        const NormPrologue prologue{.weight = norm.prepared, .scratch = a.normed, .eps = spec_.rms_norm_eps};
        return LinearParams{.x = several ? a.normed : a.x,
                            .weight = *weight.prepared,
                            .norm = several ? NormPrologue() : prologue,
                            .residual = {},
                            .out = out};
    };
    // The linear at its end, whose result joins the residual stream; next_norm is what the next sublayer begins with.
    auto last_linear = [&](const TensorView& x, const LinearWeights& weight, const VectorWeights& next_norm) {
        ops::linear(backend_, {.x = x,
                               .weight = *weight.prepared,
                               .norm = {},
                               .residual = several ? TensorView() : a.x,
                               .out = several ? a.normed : a.x});
        if (!several) return;
        communicator_.all_reduce_add_rms_norm(
            backend_,
            {.x = a.normed, .residual = a.x, .weight = next_norm.prepared, .out = a.normed, .eps = spec_.rms_norm_eps});
    };
    ops::linear_rope_store_kv(backend_, first_linear(w.input_layernorm, w.qkv_proj, a.qkv),
                              rope_store(layer, a, batch, cache));
    attend(layer, a, batch, cache);
    last_linear(a.attn, w.o_proj, w.post_attention_layernorm);
    begin_mlp(batch, layer);
    ops::linear(backend_, first_linear(w.post_attention_layernorm, w.gate_up_proj, a.inner));
    last_linear(a.inner, w.down_proj, last ? weights_.norm : weights_.layers[layer + 1].input_layernorm);
}

void Decoder::run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache, const HookTap& tap) {
    const LayerWeights& w = weights_.layers[layer];
    const int64_t num_tokens = a.x.shape(0), inner_size = spec_.mlp.intermediate_size;
    const int num_heads = spec_.attention.num_heads, num_kv_heads = spec_.attention.num_kv_heads;
    const float eps = spec_.rms_norm_eps;
    const TensorView branch = taps_.branch.slice(0, 0, num_tokens), gate_up = taps_.gate_up.slice(0, 0, num_tokens);
    auto at = [&](Site site, const TensorView& view, const TensorView& parent, const Tensor& owner) {
        tap(backend_, site, layer, view, Tensor(parent, owner.owner));
    };
    auto common = [&](Site site, const TensorView& view, const Tensor& owner) {
        tap_common(tap, site, layer, view, Tensor(view, owner.owner));
    };
    auto heads = [&](Site site, int first, int count) {  // of qkv
        const int64_t head_dim = spec_.attention.head_dim, shape[] = {num_tokens, count, head_dim};
        const int64_t strides[] = {a.qkv.stride(0), head_dim, 1};
        std::byte* data = a.qkv.as<std::byte>() + first * head_dim * size_bytes(a.qkv.dtype());
        at(site, TensorView(data, a.qkv.dtype(), shape, strides, a.qkv.device()), a.qkv, work_.qkv);
    };
    auto linear = [&](const TensorView& x, const LinearWeights& weight, const TensorView& out, bool apart = false) {
        ops::linear(
            backend_,
            {.x = x, .weight = *weight.prepared, .norm = {}, .residual = {}, .out = out, .gate_up_apart = apart});
    };
    auto branch_of = [&](const TensorView& x, const LinearWeights& weight, Site site) {
        linear(x, weight, branch);
        if (num_ranks() > 1) communicator_.all_reduce(branch);
        common(site, branch, taps_.branch);
        // Added to the residual stream; the norm that comes with it is overwritten.
        ops::add_rms_norm(
            backend_,
            {.x = branch, .residual = a.x, .weight = w.post_attention_layernorm.prepared, .out = branch, .eps = eps});
    };

    ops::rms_norm(backend_, {.x = a.x, .weight = w.input_layernorm.prepared, .out = a.normed, .eps = eps});
    common(Site::input_layernorm, a.normed, work_.normed);
    linear(a.normed, w.qkv_proj, a.qkv);
    heads(Site::q_proj, 0, num_heads);
    heads(Site::k_proj, num_heads, num_kv_heads);
    heads(Site::v_proj, num_heads + num_kv_heads, num_kv_heads);
    // One op norms, turns and stores. Turning by nothing and storing nowhere take it apart.
    RopeStoreParams params = rope_store(layer, a, batch, cache);
    const TensorView no_slots = taps_.no_slots.slice(0, 0, num_tokens);
    const TensorView identity = taps_.identity.slice(0, 0, num_tokens);
    params.slot_mapping = no_slots;
    if (params.q_norm) {
        params.cos_sin = identity;
        ops::qk_norm_rope_store_kv(backend_, params);
        heads(Site::q_norm, 0, num_heads);
        heads(Site::k_norm, num_heads, num_kv_heads);
    }
    params.q_norm = params.k_norm = {};
    params.cos_sin = a.cos_sin;
    ops::qk_norm_rope_store_kv(backend_, params);
    heads(Site::q_rope, 0, num_heads);
    heads(Site::k_rope, num_heads, num_kv_heads);
    params.cos_sin = identity;
    params.slot_mapping = batch.slot_mapping;
    ops::qk_norm_rope_store_kv(backend_, params);
    attend(layer, a, batch, cache);
    at(Site::attention, TensorView(a.attn.data(), a.attn.dtype(), a.q.shape(), a.attn.device()), a.attn, work_.attn);
    branch_of(a.attn, w.o_proj, Site::o_proj);
    common(Site::attention_residual, a.x, work_.x);
    begin_mlp(batch, layer);

    ops::rms_norm(backend_, {.x = a.x, .weight = w.post_attention_layernorm.prepared, .out = a.normed, .eps = eps});
    common(Site::post_attention_layernorm, a.normed, work_.normed);
    linear(a.normed, w.gate_up_proj, gate_up, true);
    at(Site::gate_proj, gate_up.slice(1, 0, inner_size), gate_up, taps_.gate_up);
    at(Site::up_proj, gate_up.slice(1, inner_size, 2 * inner_size), gate_up, taps_.gate_up);
    ops::silu_mul(backend_, {.gate_up = gate_up, .out = a.inner});
    at(Site::activation, a.inner, a.inner, work_.inner);
    branch_of(a.inner, w.down_proj, Site::down_proj);
    common(Site::residual, a.x, work_.x);
}

void Decoder::tap_common(const HookTap& tap, Site site, int layer, const TensorView& view, const Tensor& parent) {
    tap(backend_, site, layer, view, parent);
    if (num_ranks() > 1 && tap.wanted_anywhere(site, layer)) communicator_.broadcast(parent, 0);
}

void Decoder::keep_together() {
    if (num_ranks() > 1 && communicator_.capturable()) communicator_.barrier();
}

void Decoder::embed(const Batch& batch, const TensorView& x) {
    EmbeddingParams params{.ids = batch.input_ids, .table = *weights_.embed_tokens.prepared, .out = x};
    if (num_ranks() > 1)
        params.first_id =
            static_cast<int32_t>(vocab_of(spec_.vocab_size, {communicator_.rank(), communicator_.size()}).begin);
    ops::embedding(backend_, params);
    keep_together();
    if (num_ranks() > 1) communicator_.all_reduce(x);
}

template <class Tap>
Tensor Decoder::forward(const Batch& batch, const KvCache& cache, const Tap& tap) {
    const int64_t num_tokens = batch.input_ids.shape(0), num_rows = batch.logits_rows.shape(0);
    reserve(backend_, work_, workspace_shapes(spec_, backend_.activation_dtype()), std::max(num_tokens, num_rows));
    const Activations a = activations(num_tokens);
    embed(batch, a.x);
    ops::rope_table(backend_, {.positions = batch.positions,
                               .inv_freq = inv_freq_,
                               .attention_factor = spec_.rope.attention_factor,
                               .cos_sin = a.cos_sin});
    if constexpr (Tap::active) {
        reserve_taps(num_tokens);
        tap_common(tap, Site::embedding, -1, a.x, Tensor(a.x, work_.x.owner));
    } else if (num_ranks() > 1) {  // what the first layer finds there, as each later one does
        ops::rms_norm(backend_, {.x = a.x,
                                 .weight = weights_.layers[0].input_layernorm.prepared,
                                 .out = a.normed,
                                 .eps = spec_.rms_norm_eps});
    }
    for (int layer = 0; layer < spec_.num_layers; ++layer) {
        begin_attention(batch, layer);
        if (layer > 0 && layer % layers_apart == 0) keep_together();
        if constexpr (Tap::active)
            run_layer(layer, a, batch, cache, tap);
        else
            run_layer(layer, a, batch, cache);
    }

    if (num_rows == 0) return {};              // a prefill chunk that is not the last
    begin_attention(batch, spec_.num_layers);  // that is, the logits
    // Only the rows whose logits are wanted go through the final norm and the vocabulary.
    const TensorView last = work_.last.slice(0, 0, num_rows);
    ops::gather_rows(backend_, {.x = a.x, .rows = batch.logits_rows, .out = last});
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
    begin_mlp(batch, spec_.num_layers);
    return logits_.sample(batch, logits);
}

template Tensor Decoder::forward(const Batch&, const KvCache&, const NoTap&);
template Tensor Decoder::forward(const Batch&, const KvCache&, const HookTap&);

}  // namespace infinilm
