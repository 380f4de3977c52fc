#include "engine/check_spec.h"

#include <algorithm>

#include "core/error.h"

namespace infinilm {

void validate(const ModelSpec& spec) {
    auto require = [](bool ok, auto&&... parts) {
        if (!ok) throw ConfigError(concat("model spec: ", parts...));
    };
    require(is_floating(spec.dtype), "dtype must be float32, bfloat16 or float16, got ", name(spec.dtype));
    require(spec.vocab_size > 0 && spec.hidden_size > 0 && spec.num_layers > 0 && spec.mlp.intermediate_size > 0 &&
                spec.max_model_len > 0,
            "vocab_size, hidden_size, num_layers, intermediate_size and max_model_len must be positive, got ",
            spec.vocab_size, ", ", spec.hidden_size, ", ", spec.num_layers, ", ", spec.mlp.intermediate_size, ", ",
            spec.max_model_len);
    require(spec.pre_norms || spec.post_norms, "a sublayer needs a norm before or after it");
    require(static_cast<int>(spec.layers.size()) == spec.num_layers, "layers has ", spec.layers.size(), " entries for ",
            spec.num_layers, " layers");
    const ExpertsSpec& e = spec.experts;
    const bool any_experts = std::ranges::any_of(spec.layers, &LayerSpec::experts);
    require(any_experts ? e.top_k > 0 && e.top_k <= e.count && e.intermediate_size > 0 : e.count == 0,
            "a layer with experts needs 1 to ", e.count, " experts per token and their intermediate_size, got ",
            e.top_k, " and ", e.intermediate_size, "; without such a layer there are none");
    require(!any_experts || !spec.parallel_blocks,
            "experts read a norm of their own: parallel_blocks is of models whose layers all have an MLP");
    require(e.count == 0 ||
                (e.num_groups > 0 && e.count % e.num_groups == 0 && e.top_groups > 0 && e.top_groups <= e.num_groups &&
                 e.group_best >= 1 && e.group_best <= 2 && e.top_k <= e.count / e.num_groups * e.top_groups),
            "groups of experts do not fit: ", e.count, " experts in ", e.num_groups, ", of which ", e.top_groups,
            " have the ", e.top_k, " of a token");
    require(!e.beside_mlp || (spec.pre_norms && spec.post_norms && e.shared_intermediate_size == 0),
            "experts beside an MLP need norms before and after, and none of all tokens");
    require(!spec.layer_scalars || spec.post_norms, "layer_scalars need post_norms");
    require(!spec.attention.v_norm || spec.attention.qk_norm == QkNorm::head, "v_norm needs a norm of each head of k");
    require(spec.per_layer_size == 0 || (spec.per_layer_size > 0 && spec.post_norms && spec.mlp.gated &&
                                         spec.per_layer_vocab_size >= spec.vocab_size),
            "vectors of each layer need post_norms, and a table of at least vocab_size rows; it has ",
            spec.per_layer_vocab_size);
    const int num_ropes = static_cast<int>(spec.ropes.size());
    const DeltaSpec& d = spec.delta;
    const bool delta_is_whole = d.num_k_heads > 0 && d.num_v_heads > 0 && d.num_v_heads % d.num_k_heads == 0 &&
                                d.k_dim > 0 && d.k_dim <= 256 && d.v_dim > 0 && d.conv_size > 0 && d.conv_size <= 8;
    require(spec.num_state_layers() > 0 ? delta_is_whole : d == DeltaSpec(),
            "layers with a state need heads of v in multiples of those of k, of 1 to 256 elements, and a convolution "
            "of 1 to 8 tokens; got ",
            d.num_k_heads, " and ", d.num_v_heads, " heads of ", d.k_dim, " and ", d.v_dim, " elements, and ",
            d.conv_size, " tokens; without such a layer there are none");
    const LatentSpec& l = spec.latent;
    const bool any_latent =
        std::ranges::any_of(spec.layers, [](const LayerSpec& layer) { return layer.cache.kind == CacheKind::latent; });
    const bool latent_is_whole = l.q_rank >= 0 && l.kv_rank > 0 && l.rope_dim > 0 && l.rope_dim % 2 == 0 &&
                                 l.nope_dim > 0 && l.v_dim > 0 && spec.attention.num_kv_heads == 1 &&
                                 spec.attention.head_dim == l.row_dim() && spec.attention.qk_norm == QkNorm::none &&
                                 !spec.attention.output_gate;
    require(any_latent ? latent_is_whole : l == LatentSpec(), "a latent cache needs latents of ", l.kv_rank,
            " elements, heads of ", l.rope_dim, " + ", l.nope_dim, " and ", l.v_dim,
            ", and attention with one kv head of ", l.row_dim(), "; without such a layer there is no latent");
    for (int i = 0; i < spec.num_layers; ++i) {
        const AttentionSpec a = spec.attention_of(i);
        require(a.num_heads > 0 && a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "num_heads (", a.num_heads,
                ") must be a multiple of num_kv_heads (", a.num_kv_heads, ")");
        require(a.head_dim > 0 && a.head_dim % 2 == 0, "head_dim must be positive and even, got ", a.head_dim);
        const LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
        require(layer.intermediate_size >= 0, "intermediate_size of a layer must not be negative, got ",
                layer.intermediate_size);
        if (layer.cache.kind == CacheKind::shared) {
            const int owner = layer.cache.owner;
            require(owner >= 0 && owner < i && spec.layers[static_cast<size_t>(owner)].cache.kind == CacheKind::paged,
                    "layer ", i, " reads the keys and values of layer ", owner,
                    ", which is no earlier one with its own");
            const AttentionSpec of_owner = spec.attention_of(owner);
            require(of_owner.num_kv_heads == a.num_kv_heads && of_owner.head_dim == a.head_dim, "layer ", i,
                    " reads the keys and values of layer ", owner, ", whose heads are others");
            const LayerSpec& its = spec.layers[static_cast<size_t>(owner)];
            require((its.sliding_window > 0) == (layer.sliding_window > 0), "layer ", i,
                    " reads the keys and values of layer ", owner, ": both must have a window, or neither");
        }
        require(layer.sliding_window > 0 || !layer.chunked, "a layer that is chunked needs the size as sliding_window");
        for (const int own : {layer.rope, layer.q_rope}) {
            require(own >= -1 && own < num_ropes, "a layer has rope ", own, " of ", num_ropes);
            if (own < 0) continue;
            const auto& inv_freq = spec.ropes[static_cast<size_t>(own)].inv_freq;
            require(!inv_freq.empty() && static_cast<int>(2 * inv_freq.size()) <= a.head_dim, "a rope has ",
                    inv_freq.size(), " frequencies for head_dim ", a.head_dim);
        }
    }
}

const char* only_on_cpus(const ModelSpec& spec) {
    if (spec.num_state_layers() > 0 && spec.delta.v_dim % 2 != 0) return "states of an odd number of columns";
    return nullptr;
}

}  // namespace infinilm
