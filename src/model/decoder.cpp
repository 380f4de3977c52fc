#include "model/decoder.h"

#include <algorithm>

#include "ops/ops.h"

namespace infinilm {

Decoder::Decoder(const ModelSpec& spec, const ModelWeights& weights, Backend& backend)
    : spec_(spec), weights_(weights), backend_(backend) {
    const int64_t half = static_cast<int64_t>(spec.rope.inv_freq.size());
    inv_freq_ = backend.allocate(DType::float32, std::array{half});
    backend.copy(TensorView(const_cast<float*>(spec.rope.inv_freq.data()), DType::float32, {half}), inv_freq_);
}

void Decoder::reserve(int64_t num_tokens) {
    if (num_tokens <= work_.num_tokens) return;
    const DType act = backend_.activation_dtype();
    auto buffer = [&](int64_t width, DType dtype) { return backend_.allocate(dtype, std::array{num_tokens, width}); };
    work_ = {};  // give back before asking for more
    work_ = {.num_tokens = num_tokens,
             .x = buffer(spec_.hidden_size, act),
             .normed = buffer(spec_.hidden_size, act),
             .last = buffer(spec_.hidden_size, act),
             .qkv = buffer(spec_.q_dim() + 2 * spec_.kv_dim(), act),
             .attn = buffer(spec_.q_dim(), act),
             .inner = buffer(spec_.mlp.intermediate_size, act),
             .cos_sin = buffer(2 * static_cast<int64_t>(spec_.rope.inv_freq.size()), DType::float32),
             .ids = backend_.allocate(DType::int32, std::array{num_tokens})};
}

StepOutput Decoder::forward(const Batch& batch, const KvCache& cache) {
    const AttentionSpec& attention = spec_.attention;
    const int64_t num_tokens = batch.input_ids.shape(0), num_rows = batch.logits_rows.shape(0);
    const float eps = spec_.rms_norm_eps;
    reserve(std::max(num_tokens, num_rows));
    auto rows = [&](const Tensor& buffer) { return buffer.slice(0, 0, num_tokens); };
    const TensorView x = rows(work_.x), normed = rows(work_.normed), qkv = rows(work_.qkv), attn = rows(work_.attn);
    const TensorView inner = rows(work_.inner), cos_sin = rows(work_.cos_sin);
    auto norm = [&](const VectorWeights& w) {
        return NormPrologue{.weight = w.prepared, .scratch = normed, .eps = eps};
    };
    const int64_t heads[] = {num_tokens, attention.num_heads, attention.head_dim};
    const int64_t q_strides[] = {qkv.stride(0), attention.head_dim, 1};
    const TensorView q(qkv.data(), qkv.dtype(), heads, q_strides, qkv.device());  // the first part of qkv
    const TensorView attn_heads(attn.data(), attn.dtype(), heads, attn.device());

    ops::embedding(backend_, {.ids = batch.input_ids, .table = *weights_.embed_tokens.prepared, .out = x});
    ops::rope_table(backend_, {.positions = batch.positions,
                               .inv_freq = inv_freq_,
                               .attention_factor = spec_.rope.attention_factor,
                               .cos_sin = cos_sin});

    for (int i = 0; i < spec_.num_layers; ++i) {
        const LayerWeights& w = weights_.layers[i];
        ops::linear_rope_store_kv(
            backend_,
            {.x = x, .weight = *w.qkv_proj.prepared, .norm = norm(w.input_layernorm), .residual = {}, .out = qkv},
            {.qkv = qkv,
             .cos_sin = cos_sin,
             .q_norm = w.q_norm.prepared,
             .k_norm = w.k_norm.prepared,
             .slot_mapping = batch.slot_mapping,
             .k_cache = cache.k(i),
             .v_cache = cache.v(i),
             .num_heads = attention.num_heads,
             .num_kv_heads = attention.num_kv_heads,
             .head_dim = attention.head_dim,
             .eps = eps});
        ops::paged_attention(backend_, {.q = q,
                                        .k_cache = cache.k(i),
                                        .v_cache = cache.v(i),
                                        .block_table = batch.block_table,
                                        .cu_seqlens_q = batch.cu_seqlens_q,
                                        .context_lens = batch.context_lens,
                                        .out = attn_heads,
                                        .softmax_scale = attention.softmax_scale,
                                        .sliding_window = attention.sliding_window[i],
                                        .max_query_len = batch.max_query_len,
                                        .max_context_len = batch.max_context_len});
        ops::linear(backend_, {.x = attn, .weight = *w.o_proj.prepared, .norm = {}, .residual = x, .out = x});
        ops::linear(backend_, {.x = x,
                               .weight = *w.gate_up_proj.prepared,
                               .norm = norm(w.post_attention_layernorm),
                               .residual = {},
                               .out = inner});
        ops::linear(backend_, {.x = inner, .weight = *w.down_proj.prepared, .norm = {}, .residual = x, .out = x});
    }

    if (num_rows == 0) return {};  // a prefill chunk that is not the last
    // Only the rows whose logits are wanted go through the final norm and the vocabulary.
    const TensorView last = work_.last.slice(0, 0, num_rows);
    ops::gather_rows(backend_, {.x = x, .rows = batch.logits_rows, .out = last});
    StepOutput output;
    if (batch.return_logits || !logits_ || logits_.shape(0) < num_rows)
        output.logits =
            backend_.allocate(DType::float32, std::array<int64_t, 2>{num_rows, (spec_.vocab_size + 7) / 8 * 8});
    else
        output.logits = Tensor(logits_.slice(0, 0, num_rows), logits_.owner);
    const TensorView logits = output.logits.slice(1, 0, spec_.vocab_size);
    ops::linear(backend_,
                {.x = last,
                 .weight = *weights_.lm_head.prepared,
                 .norm = {.weight = weights_.norm.prepared, .scratch = work_.normed.slice(0, 0, num_rows), .eps = eps},
                 .residual = {},
                 .out = logits});
    if (batch.temperature) {
        output.ids = Tensor(work_.ids.slice(0, 0, num_rows), work_.ids.owner);
        ops::sample(backend_, {.logits = logits,
                               .temperature = batch.temperature,
                               .top_k = batch.top_k,
                               .top_p = batch.top_p,
                               .min_p = batch.min_p,
                               .random_val = batch.random_val,
                               .ids = output.ids});
    }
    if (!batch.return_logits) logits_ = std::exchange(output.logits, {});  // the buffer serves the next step
    return output;
}

}  // namespace infinilm
