// The second half of a layer: MLP, experts, or both; and the third sublayer of models with vectors of each layer.
#include <cmath>

#include "model/decoder.h"
#include "ops/ops.h"

namespace infinilm {

template <class Tap>
Decoder::Input Decoder::mlp_input(const Step& s, const Tap& tap, int layer) {
    if (spec_.parallel_blocks) return {.x = s.a.normed, .norm = {}};
    const Site site = spec_.post_norms ? Site::pre_feedforward_layernorm : Site::post_attention_layernorm;
    return normed_input(s, tap, layer, weights_.layers[layer].mlp_norm, site);
}

// Norm, gate and up, activation(gate) * up; or without gate, activation(up).
template <class Tap>
void Decoder::project_gate_up(const Step& s, const Tap& tap, int layer, const Input& in, const TensorView& inner) {
    const LinearWeights& weights = weights_.layers[layer].gate_up_proj;
    LinearParams linear{.x = in.x,
                        .weight = *weights.prepared,
                        .norm = in.norm,
                        .residual = {},
                        .out = inner,
                        .activation = spec_.mlp.activation};
    const bool gated = spec_.mlp.gated;
    if (!Tap::active && gated) return ops::linear(backend_, linear);

    const int64_t inner_size = inner.shape(1);
    const Tensor& owner = gated ? taps_.gate_up : work_.inner;
    const TensorView gate_up = gated ? part(owner, s, 2 * inner_size) : inner;
    linear.out = gate_up;
    linear.gate_up_apart = gated;
    ops::linear(backend_, linear);
    add_lora(tap, weights, in.x, gate_up);
    if (gated) tap_own(tap, Site::gate_proj, layer, gate_up.slice(1, 0, inner_size), gate_up, owner);
    const TensorView up = gated ? gate_up.slice(1, inner_size, 2 * inner_size) : gate_up;
    tap_own(tap, Site::up_proj, layer, up, gate_up, owner);
    ops::act_mul(backend_, {.gate_up = gate_up, .out = inner, .activation = spec_.mlp.activation});
    tap_own(tap, Site::activation, layer, inner, inner, work_.inner);
}

// Norm, which several ops read, and the router: the experts of each token and their weights.
template <class Tap>
void Decoder::choose_experts(const Step& s, const Tap& tap, int layer) {
    const LayerWeights& w = weights_.layers[layer];
    const bool own_norm = spec_.experts.beside_mlp;
    const auto [x, norm] =
        own_norm ? Input{.x = s.a.x,
                         .norm = {.weight = w.router_norm.prepared, .scratch = s.a.normed, .eps = spec_.rms_norm_eps}}
                 : mlp_input(s, tap, layer);
    if (norm.weight) ops::rms_norm(backend_, {.x = x, .weight = norm.weight, .out = s.a.normed, .eps = norm.eps});
    const auto rows = [&](const Tensor& buffer) { return buffer.slice(0, 0, x.shape(0)); };
    const TensorView padded = rows(work_.router_logits), logits = padded.slice(1, 0, spec_.experts.count);
    linear(tap, w.router, expert_input(s), logits);
    tap_common(tap, Site::router_logits, layer, logits, Tensor(padded, work_.router_logits.owner));
    const ExpertsSpec& experts = spec_.experts;
    ops::route(backend_, {.logits = logits,
                          .correction_bias = w.router_correction.prepared,
                          .expert_scales = w.expert_scales.prepared,
                          .ids = rows(work_.expert_ids),
                          .weights = rows(work_.expert_weights),
                          .scoring = experts.scoring,
                          .normalize = experts.norm_topk_prob,
                          .scale = experts.scale,
                          .num_groups = experts.num_groups,
                          .top_groups = experts.top_groups,
                          .group_best = experts.group_best});
    if (!own_norm) return;
    ops::rms_norm(backend_, {.x = x, .weight = w.experts_norm.prepared, .out = s.a.normed, .eps = spec_.rms_norm_eps});
    tap_common(tap, Site::pre_feedforward_layernorm_2, layer, s.a.normed, Tensor(s.a.normed, work_.normed.owner));
}

// Then the experts, that of all tokens among them. The residual may be absent; out may be the normed input.
template <class Tap>
void Decoder::run_experts(const Step& s, const Tap& tap, int layer, const TensorView& residual, const TensorView& out) {
    const LayerWeights& w = weights_.layers[layer];
    const TensorView x = expert_input(s);
    const auto rows = [&](const Tensor& buffer, int64_t of_a_token) {
        return buffer ? buffer.slice(0, 0, of_a_token * x.shape(0)) : TensorView();
    };
    const bool is_shared = spec_.experts.shared_intermediate_size > 0;
    const TensorView shared = is_shared ? rows(work_.shared, 1) : TensorView();
    const TensorView shared_gate = spec_.experts.shared_gate ? rows(work_.shared_gate, 1).slice(1, 0, 1) : TensorView();
    if (shared) {
        const TensorView inner = part(work_.inner, s, spec_.experts.shared_intermediate_size);
        Tap unhooked = tap;
        if constexpr (Tap::active) unhooked.hooks = nullptr;
        if (shared_gate) linear(tap, w.shared_gate, x, shared_gate);
        project_gate_up(s, unhooked, layer, {.x = x, .norm = {}}, inner);
        linear(tap, w.down_proj, inner, shared);
    }
    const int64_t top_k = spec_.experts.top_k;
    ops::experts(backend_, {.x = x,
                            .ids = rows(work_.expert_ids, 1),
                            .weights = rows(work_.expert_weights, 1),
                            .experts = *w.experts,
                            .activation = spec_.mlp.activation,
                            .shared = shared,
                            .shared_gate = shared_gate,
                            .residual = residual,
                            .out = out,
                            .inner = rows(work_.expert_inner, top_k),
                            .parts = rows(work_.expert_parts, top_k),
                            .lists = rows(work_.expert_lists, top_k),
                            .weigh_inputs = spec_.experts.weigh_inputs});
}

template <class Tap>
void Decoder::run_mlp_and_experts(const Step& s, const Tap& tap, int layer, const TensorView& out) {
    const LayerWeights& w = weights_.layers[layer];
    const Tensor own(work_.shared.slice(0, 0, out.shape(0)), work_.shared.owner);
    const float eps = spec_.rms_norm_eps;
    const auto finish = [&](const Tensor& branch, const VectorWeights& norm, Site site, Site norm_site) {
        if (num_ranks() > 1) communicator_.all_reduce(branch);
        tap_common(tap, site, layer, branch, branch);
        ops::rms_norm(backend_, {.x = branch, .weight = norm.prepared, .out = branch, .eps = eps});
        tap_common(tap, norm_site, layer, branch, branch);
    };
    run_experts(s, tap, layer, {}, own);  // first: out may be where what they read is
    finish(own, w.experts_post_norm, Site::experts, Site::post_feedforward_layernorm_2);
    linear(tap, w.down_proj, inner(s, layer), out);
    finish(Tensor(out, Tap::active ? taps_.branch.owner : nullptr), w.mlp_own_post_norm, Site::down_proj,
           Site::post_feedforward_layernorm_1);
    ops::add_rms_norm(backend_, {.x = own, .residual = out, .weight = {}, .out = own, .eps = eps});
}

template <class Tap>
void Decoder::embed_layers(const Step& s, const Tap& tap) {
    const int64_t num_tokens = s.a.x.shape(0), size = spec_.per_layer_size;
    const float of_table = per_layer_half * std::sqrt(static_cast<float>(size));
    const TensorView vectors = work_.per_layer.slice(0, 0, num_tokens * spec_.num_layers);  // [.., per_layer_size]
    const TensorView projected = work_.per_layer_projected.slice(0, 0, vectors.shape(0));
    const auto of_tokens = [&](const TensorView& view) { return view.reshape({num_tokens, spec_.num_layers * size}); };
    embed(s.batch.input_ids, weights_.embed_per_layer, spec_.per_layer_vocab_size, of_table, of_tokens(vectors));
    linear(tap, weights_.per_layer_projection, s.a.x, of_tokens(projected));
    // The linear's result times hidden_size^-0.5 is what is normed: that changes eps alone.
    ops::rms_norm(backend_, {.x = projected,
                             .weight = weights_.per_layer_norm.prepared,
                             .out = projected,
                             .eps = spec_.rms_norm_eps * static_cast<float>(spec_.hidden_size)});
    ops::add_rms_norm(backend_, {.x = projected, .residual = vectors, .weight = {}, .out = projected, .eps = 0});
}

template <class Tap>
void Decoder::read_own_vector(const Step& s, const Tap& tap, int layer, const TensorView& out) {
    const LayerWeights& w = weights_.layers[layer];
    const int64_t size = spec_.per_layer_size;
    const TensorView gate = part(work_.per_layer_gate, s, size);
    const TensorView own = part(work_.per_layer, s, spec_.num_layers * size).slice(1, layer * size, (layer + 1) * size);
    linear(tap, w.per_layer_gate, s.a.x, gate);
    ops::act_mul(backend_, {.gate_up = gate, .out = gate, .activation = spec_.mlp.activation, .up = own});
    tap_common(tap, Site::per_layer_input, layer, gate, Tensor(gate, work_.per_layer_gate.owner));
    linear(tap, w.per_layer_projection, gate, out);
}

#define INFINILM_FOR_TAP(Tap)                                                                               \
    template Decoder::Input Decoder::mlp_input(const Step&, const Tap&, int);                               \
    template void Decoder::project_gate_up(const Step&, const Tap&, int, const Input&, const TensorView&);  \
    template void Decoder::choose_experts(const Step&, const Tap&, int);                                    \
    template void Decoder::run_experts(const Step&, const Tap&, int, const TensorView&, const TensorView&); \
    template void Decoder::run_mlp_and_experts(const Step&, const Tap&, int, const TensorView&);            \
    template void Decoder::embed_layers(const Step&, const Tap&);                                           \
    template void Decoder::read_own_vector(const Step&, const Tap&, int, const TensorView&);
INFINILM_FOR_TAP(NoTap)
INFINILM_FOR_TAP(StepTap)
#undef INFINILM_FOR_TAP

}  // namespace infinilm
