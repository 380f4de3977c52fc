// What some layers have in place of q, k and v: a latent cache, see LatentSpec, or a state, see DeltaSpec.
#include "model/decoder.h"
#include "ops/ops.h"

namespace infinilm {

// Norm, the latents that queries are made of, queries; the row of the cache, [the key that RoPE turns, latent]. Queries
// are brought to such rows: what RoPE turns of them, then the product of the rest with what made keys of latents.
template <class Tap>
void Decoder::project_latent(const Step& s, const Tap& tap, int layer) {
    const LayerWeights& w = weights_.layers[layer];
    const LatentSpec& latent = spec_.latent;
    const int64_t num_tokens = s.a.x.shape(0), num_heads = spec_.attention.num_heads;
    const int64_t row_dim = latent.row_dim(), rope_dim = latent.rope_dim;
    auto [x, norm] = normed_input(s, tap, layer, w.attention_norm, Site::input_layernorm);
    if (norm.weight) {  // two linears read the norm
        ops::rms_norm(backend_, {.x = x, .weight = norm.weight, .out = s.a.normed, .eps = norm.eps});
        x = s.a.normed;
    }
    // [num_tokens, num_heads, size] of rows that have `dim` of each head.
    const auto of_heads = [&](const TensorView& rows, int64_t dim, int64_t begin, int64_t size) {
        const int64_t shape[] = {num_tokens, num_heads, size}, strides[] = {rows.stride(0), dim, 1};
        return TensorView(rows.as<std::byte>() + begin * size_bytes(rows.dtype()), rows.dtype(), shape, strides,
                          rows.device());
    };

    const TensorView queries = part(work_.queries, s, num_heads * latent.query_dim());
    if (latent.q_rank > 0) {
        const TensorView q_latent = part(work_.q_latent, s, latent.q_rank);
        linear(tap, w.q_a, x, q_latent);
        linear(tap, w.q_b, q_latent, queries,
               {.weight = w.q_latent_norm.prepared, .scratch = q_latent, .eps = latent.norm_eps});
    } else {
        linear(tap, w.q_b, x, queries);
    }
    tap_own(tap, Site::q_proj, layer, of_heads(queries, latent.query_dim(), 0, latent.query_dim()), queries,
            work_.queries);

    const TensorView qkv = this->qkv(s, layer);  // heads of queries, then the row
    const TensorView row = qkv.slice(1, num_heads * row_dim, (num_heads + 1) * row_dim);
    const auto tap_row = [&](Site site) {
        const int64_t shape[] = {num_tokens, 1, row_dim}, strides[] = {row.stride(0), row_dim, 1};
        tap_own(tap, site, layer, TensorView(row.data(), row.dtype(), shape, strides, row.device()), qkv, work_.qkv);
    };
    linear(tap, w.kv_a, x, row);
    tap_row(Site::k_proj);
    const TensorView cached = row.slice(1, rope_dim, row_dim);
    ops::rms_norm(backend_, {.x = cached, .weight = w.latent_norm.prepared, .out = cached, .eps = latent.norm_eps});
    head_linear(tap, w.k_b, of_heads(queries, latent.query_dim(), rope_dim, latent.nope_dim),
                of_heads(qkv, row_dim, rope_dim, latent.kv_rank));

    RopeStoreParams params = rope_store(s, layer);
    params.q_turned = of_heads(queries, latent.query_dim(), 0, rope_dim);
    if constexpr (!Tap::active) return ops::qk_norm_rope_store_kv(backend_, params);
    RopeStoreParams turn = params, store = params;
    turn.slot_mapping = {};
    ops::qk_norm_rope_store_kv(backend_, turn);
    tap_own(tap, Site::q_rope, layer, of_heads(qkv, row_dim, 0, row_dim), qkv, work_.qkv);
    tap_row(Site::k_rope);
    store.cos_sin = store.q_turned = {};
    ops::qk_norm_rope_store_kv(backend_, store);
}

// Norm, q, k and v, which a convolution mixes with those of the tokens before, and the gated delta rule.
template <class Tap>
void Decoder::run_delta_rule(const Step& s, const Tap& tap, int layer) {
    const LayerWeights& w = weights_.layers[layer];
    const DeltaSpec& delta = spec_.delta;
    const auto [x, norm] = normed_input(s, tap, layer, w.attention_norm, Site::input_layernorm);
    const TensorView in = part(work_.delta_in, s, delta.padded_in_dim()).slice(1, 0, delta.in_dim());
    const TensorView conv = part(work_.conv, s, delta.conv_dim());
    const int64_t z = delta.conv_dim(), b = z + delta.v_size(), a = b + delta.num_v_heads;
    linear(tap, w.delta_in, x, in, norm);
    const StateSteps sequences{
        .cu_seqlens_q = s.batch.cu_seqlens_q, .state_in = s.batch.state_in, .state_out = s.batch.state_out};
    ops::causal_conv(backend_, {.x = in.slice(1, 0, z),
                                .weight = w.conv.prepared,
                                .state = s.cache.conv_state(layer),
                                .sequences = sequences,
                                .out = conv});
    tap_own(tap, Site::conv, layer, conv, conv, work_.conv);
    const TensorView out = attn(s, layer);
    ops::delta_rule(backend_, {.qkv = conv,
                               .z = in.slice(1, z, b),
                               .a = in.slice(1, a, a + delta.num_v_heads),
                               .b = in.slice(1, b, a),
                               .decay_rate = w.decay_rate.prepared,
                               .dt_bias = w.dt_bias.prepared,
                               .norm = w.delta_norm.prepared,
                               .state = s.cache.delta_state(layer),
                               .sequences = sequences,
                               .gates = part(work_.delta_gates, s, 2 * delta.num_v_heads),
                               .out = out,
                               .num_k_heads = delta.num_k_heads,
                               .eps = spec_.rms_norm_eps});
    const int64_t heads[] = {x.shape(0), delta.num_v_heads, delta.v_dim};
    tap_own(tap, Site::attention, layer, TensorView(out.data(), out.dtype(), heads, out.device()), out, work_.attn);
}

template void Decoder::project_latent(const Step&, const NoTap&, int);
template void Decoder::project_latent(const Step&, const StepTap&, int);
template void Decoder::run_delta_rule(const Step&, const NoTap&, int);
template void Decoder::run_delta_rule(const Step&, const StepTap&, int);

}  // namespace infinilm
