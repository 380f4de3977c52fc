// ModelSpec: everything the decoder needs to know of a model, as plain numbers. Made in Python from a Hugging Face
// config.json (infinilm/config/families.py); families differ only here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "core/activation.h"
#include "core/dtype.h"
#include "core/scoring.h"

namespace infinilm {

// RMSNorm of q and k: of each head by itself, before RoPE or behind it, or of all heads of a token together, before it.
// turned_heads: of each head behind RoPE, without weight, in the layers that have RoPE.
enum class QkNorm : uint8_t { none, head, all, head_behind_rope, turned_heads };
constexpr std::string_view name(QkNorm norm) {
    switch (norm) {
        case QkNorm::none: return "none";
        case QkNorm::head: return "head";
        case QkNorm::all: return "all";
        case QkNorm::head_behind_rope: return "head_behind_rope";
        case QkNorm::turned_heads: return "turned_heads";
    }
    return "?";
}

// What norms are: RMSNorm, or LayerNorm, which takes off the mean first and may have a bias.
enum class NormKind : uint8_t { rms, layer, layer_bias };
constexpr std::string_view name(NormKind kind) {
    switch (kind) {
        case NormKind::rms: return "rms";
        case NormKind::layer: return "layer";
        case NormKind::layer_bias: return "layer_bias";
    }
    return "?";
}

struct AttentionSpec {
    int num_heads = 0, num_kv_heads = 0, head_dim = 0;
    float softmax_scale = 0;
    float score_cap = 0;  // scores s become score_cap * tanh(s / score_cap); 0: they stay
    bool qkv_bias = false, out_bias = false;
    bool sinks = false;        // each head has a number that joins the softmax of its scores, with no value
    bool output_gate = false;  // what attention gives is multiplied by the sigmoid of a linear of its input
    QkNorm qk_norm = QkNorm::none;
    bool v_norm = false;  // RMSNorm of each head of v, without weight
    bool own_kv = true;   // else of a layer that reads the keys and values of an earlier one: see attention_of
    int latent_dim = 0;   // of a layer with a latent cache: the elements at the end of a key that are its value

    int q_dim() const { return num_heads * head_dim; }
    int kv_dim() const { return num_kv_heads * head_dim; }
    int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }  // of a head
    int qkv_dim() const { return q_dim() + (!own_kv ? 0 : latent_dim > 0 ? 1 : 2) * kv_dim(); }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_heads", &AttentionSpec::num_heads, "");
        f("num_kv_heads", &AttentionSpec::num_kv_heads, "");
        f("head_dim", &AttentionSpec::head_dim, "");
        f("softmax_scale", &AttentionSpec::softmax_scale, "");
        f("score_cap", &AttentionSpec::score_cap, "");
        f("qkv_bias", &AttentionSpec::qkv_bias, "");
        f("out_bias", &AttentionSpec::out_bias, "");
        f("sinks", &AttentionSpec::sinks, "");
        f("output_gate", &AttentionSpec::output_gate, "");
        f("v_norm", &AttentionSpec::v_norm, "RMSNorm of each head of v, without weight.");
        f("qk_norm", &AttentionSpec::qk_norm, "");
    }
};

struct MlpSpec {
    int intermediate_size = 0;
    bool bias = false;
    bool gated = true;  // down(activation(gate) * up); else down(activation(up))
    Activation activation = Activation::silu;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("intermediate_size", &MlpSpec::intermediate_size, "");
        f("bias", &MlpSpec::bias, "");
        f("gated", &MlpSpec::gated, "");
        f("activation", &MlpSpec::activation, "");
    }
};

// What the layers that have experts have in place of the MLP: each token goes to top_k of them. How these are chosen
// and weighed: see RouteParams.
struct ExpertsSpec {
    int count = 0, top_k = 0;          // count 0: no layer has any
    int intermediate_size = 0;         // of each expert
    int shared_intermediate_size = 0;  // of one that all tokens go to; 0: there is none
    bool shared_gate = false;          // its result is multiplied by the sigmoid of a logit of the token
    bool bias = false;                 // of the router and of each expert
    Scoring scoring = Scoring::softmax;
    bool correction_bias = false;  // each expert has a number that is added to its score for the choice alone
    bool norm_topk_prob = false;   // the weights of a token's experts add up to 1, before they are scaled
    float scale = 1;
    int num_groups = 1, top_groups = 1;  // a token's experts are those of its best groups
    int group_best = 2;                  // so many experts together say how good a group is: 1 or 2
    // As in Gemma 4: the layer has its MLP, too. MLP, router and experts read the residual stream through norms of
    // their own, that of the router times hidden_size^-0.5; what MLP and experts give is normed before it is added up.
    // Each expert has a number that multiplies its weights.
    bool beside_mlp = false;
    bool weigh_inputs = false;  // an expert reads the token times its weight, and what it gives counts whole

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("count", &ExpertsSpec::count, "0: no layer has any.");
        f("top_k", &ExpertsSpec::top_k, "");
        f("intermediate_size", &ExpertsSpec::intermediate_size, "Of each expert.");
        f("shared_intermediate_size", &ExpertsSpec::shared_intermediate_size,
          "Of one that all tokens go to; 0: there is none.");
        f("shared_gate", &ExpertsSpec::shared_gate, "Its result is weighed by the sigmoid of a logit.");
        f("bias", &ExpertsSpec::bias, "Of the router and of each expert.");
        f("scoring", &ExpertsSpec::scoring, "");
        f("correction_bias", &ExpertsSpec::correction_bias, "Added to scores for the choice alone.");
        f("norm_topk_prob", &ExpertsSpec::norm_topk_prob, "");
        f("scale", &ExpertsSpec::scale, "Of a token's weights.");
        f("num_groups", &ExpertsSpec::num_groups, "");
        f("top_groups", &ExpertsSpec::top_groups, "A token's experts are those of its best groups.");
        f("group_best", &ExpertsSpec::group_best, "Experts of a group that say how good it is.");
        f("beside_mlp", &ExpertsSpec::beside_mlp, "The layer has its MLP, too; each of the two has its norms.");
        f("weigh_inputs", &ExpertsSpec::weigh_inputs, "An expert reads the token times its weight.");
    }
};

// What layers with a state have in place of attention: a causal convolution of q, k and v, then the gated delta rule,
// which reads q and updates a state with k and v. See CausalConvParams and DeltaRuleParams.
struct DeltaSpec {
    int num_k_heads = 0, num_v_heads = 0;  // of q and k, and of v
    int k_dim = 0, v_dim = 0;              // of a head
    int conv_size = 0;                     // tokens that the convolution sees

    int k_size() const { return num_k_heads * k_dim; }
    int v_size() const { return num_v_heads * v_dim; }
    int conv_dim() const { return 2 * k_size() + v_size(); }
    int in_dim() const { return conv_dim() + v_size() + 2 * num_v_heads; }  // with z, b and a
    int padded_in_dim() const { return (in_dim() + 7) / 8 * 8; }            // GPUs write 8 at a time
    bool operator==(const DeltaSpec&) const = default;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_k_heads", &DeltaSpec::num_k_heads, "");
        f("num_v_heads", &DeltaSpec::num_v_heads, "");
        f("k_dim", &DeltaSpec::k_dim, "");
        f("v_dim", &DeltaSpec::v_dim, "");
        f("conv_size", &DeltaSpec::conv_size, "Tokens that the convolution sees.");
    }
};

// What layers with a latent cache have in place of q, k and v (DeepSeek-AI 2024, arXiv:2405.04434). The keys and values
// of all heads are made of one latent of each token, and of one short key that RoPE turns; the cache has these two.
// Instead of each key, its query is brought to the latent, and instead of each value, what attention gives: all heads
// read the same row, [rope_dim + kv_rank], and as values its last kv_rank elements. AttentionSpec is of that.
struct LatentSpec {
    int q_rank = 0;                  // of the latent that queries are made of; 0: they are made of the hidden state
    int kv_rank = 0;                 // of the cached latent
    int rope_dim = 0, nope_dim = 0;  // elements of a query that RoPE turns, and others
    int v_dim = 0;                   // of a head's values
    float norm_eps = 0;              // of the norms of latents

    int query_dim() const { return rope_dim + nope_dim; }
    int row_dim() const { return rope_dim + kv_rank; }
    bool operator==(const LatentSpec&) const = default;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("q_rank", &LatentSpec::q_rank, "0: queries are made of the hidden state.");
        f("kv_rank", &LatentSpec::kv_rank, "");
        f("rope_dim", &LatentSpec::rope_dim, "");
        f("nope_dim", &LatentSpec::nope_dim, "");
        f("v_dim", &LatentSpec::v_dim, "Of a head.");
        f("norm_eps", &LatentSpec::norm_eps, "Of the norms of latents.");
    }
};

struct RopeSpec {
    std::vector<float> inv_freq;  // [rotary_dim / 2]
    float attention_factor = 1;   // multiplies cosines and sines
    // Both are also multiplied by 1 + scale_beta * ln(1 + floor((position + scale_offset) / scale_positions)).
    float scale_beta = 0;
    int scale_positions = 1, scale_offset = 0;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("inv_freq", &RopeSpec::inv_freq, "[rotary_dim / 2]");
        f("attention_factor", &RopeSpec::attention_factor, "");
        f("scale_beta", &RopeSpec::scale_beta, "");
        f("scale_positions", &RopeSpec::scale_positions, "");
        f("scale_offset", &RopeSpec::scale_offset, "");
    }
};

// What a layer keeps of the tokens before.
enum class CacheKind : uint8_t {
    paged,   // the keys and values of each, in the blocks of its sequence
    shared,  // nothing: it reads the keys and values of an earlier layer
    latent,  // a row of each, of which all heads make their keys and values. See LatentSpec
    state,   // what the gated delta rule has made of all: of one size, whatever their number. See DeltaSpec
};
constexpr std::string_view name(CacheKind kind) {
    switch (kind) {
        case CacheKind::paged: return "paged";
        case CacheKind::shared: return "shared";
        case CacheKind::latent: return "latent";
        case CacheKind::state: return "state";
    }
    return "?";
}

// The cache of one layer.
struct CacheSpec {
    CacheKind kind = CacheKind::paged;
    int num_kv_heads = 0, head_dim = 0;  // of paged or shared ones; 0: as ModelSpec::attention has them
    int owner = -1;                      // of shared ones: the layer whose they are, a paged one before this
    bool operator==(const CacheSpec&) const = default;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("kind", &CacheSpec::kind, "");
        f("num_kv_heads", &CacheSpec::num_kv_heads, "0: as the model has them.");
        f("head_dim", &CacheSpec::head_dim, "0: as the model has it.");
        f("owner", &CacheSpec::owner, "Of a shared one: the earlier layer whose keys and values these are.");
    }
};

// Consecutive layers.
struct LayerRange {
    int begin = 0, end = 0;
    int size() const { return end - begin; }
    bool contains(int layer) const { return layer >= begin && layer < end; }
    bool operator==(const LayerRange&) const = default;
};

// What differs from layer to layer.
struct LayerSpec {
    int sliding_window = 0;  // 0: the layer sees everything
    bool chunked = false;    // the window does not slide: it begins where the position is a multiple of its size
    int rope = 0;            // which of ModelSpec::ropes turns its q and k; -1: none
    int q_rope = -1;         // which turns q, where that is another, or k is not turned; else -1
    bool experts = false;    // it has ModelSpec::experts in place of the MLP, or beside it
    CacheSpec cache = {};
    int intermediate_size = 0;  // of the MLP; 0: as ModelSpec::mlp has it

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("sliding_window", &LayerSpec::sliding_window, "0: the layer sees everything.");
        f("chunked", &LayerSpec::chunked, "The window begins at multiples of its size, and does not slide.");
        f("rope", &LayerSpec::rope, "Which of `ropes` turns its q and k; -1: none.");
        f("q_rope", &LayerSpec::q_rope, "Which turns q, where that is another; else -1.");
        f("experts", &LayerSpec::experts, "It has experts in place of the MLP, or beside it.");
        f("cache", &LayerSpec::cache, "");
        f("intermediate_size", &LayerSpec::intermediate_size, "Of the MLP; 0: as the model has it.");
    }
};

struct ModelSpec {
    DType dtype = DType::float32;  // what the engine computes in
    // Of the linears' weights. The embedding and the lm_head, which lose more by it, are int8 where this is int4.
    Quantization quantization = Quantization::none;
    int vocab_size = 0, hidden_size = 0, num_layers = 0, max_model_len = 0;
    float rms_norm_eps = 0;
    NormKind norm = NormKind::rms;
    // Which norms a sublayer has: of what it reads, and of what it adds to the residual stream.
    bool pre_norms = true, post_norms = false;
    bool parallel_blocks = false;    // attention and MLP read the same norm
    float norm_offset = 0;           // added to every norm weight
    float embedding_multiplier = 1;  // of the embedding
    float residual_multiplier = 1;   // of what a sublayer adds to the residual stream
    float logit_multiplier = 1;
    float logit_cap = 0;  // logits l become logit_cap * tanh(l / logit_cap); 0: they stay
    bool tie_word_embeddings = false;
    bool layer_scalars = false;  // each layer has a number that multiplies the residual stream it leaves
    // With per_layer_size each token has a vector of that size for each layer, from a table of its own and from its
    // embedding, and each layer a third sublayer, which reads it. See OwnVectors.
    int per_layer_size = 0, per_layer_vocab_size = 0;
    AttentionSpec attention;
    MlpSpec mlp;
    ExpertsSpec experts;
    DeltaSpec delta;
    LatentSpec latent;
    std::vector<RopeSpec> ropes;
    std::vector<LayerSpec> layers;  // [num_layers]
    LayerRange stage = {};          // of a stage of a pipeline, which it has; empty: all. See stage_spec

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("dtype", &ModelSpec::dtype, "");
        f("quantization", &ModelSpec::quantization, "");
        f("vocab_size", &ModelSpec::vocab_size, "");
        f("hidden_size", &ModelSpec::hidden_size, "");
        f("num_layers", &ModelSpec::num_layers, "");
        f("max_model_len", &ModelSpec::max_model_len, "");
        f("rms_norm_eps", &ModelSpec::rms_norm_eps, "");
        f("norm", &ModelSpec::norm, "");
        f("pre_norms", &ModelSpec::pre_norms, "");
        f("post_norms", &ModelSpec::post_norms, "");
        f("parallel_blocks", &ModelSpec::parallel_blocks, "");
        f("norm_offset", &ModelSpec::norm_offset, "");
        f("embedding_multiplier", &ModelSpec::embedding_multiplier, "");
        f("residual_multiplier", &ModelSpec::residual_multiplier, "");
        f("logit_multiplier", &ModelSpec::logit_multiplier, "");
        f("logit_cap", &ModelSpec::logit_cap, "");
        f("tie_word_embeddings", &ModelSpec::tie_word_embeddings, "");
        f("layer_scalars", &ModelSpec::layer_scalars, "Each layer multiplies the residual stream it leaves.");
        f("per_layer_size", &ModelSpec::per_layer_size, "Of a token's vector for each layer; 0: it has none.");
        f("per_layer_vocab_size", &ModelSpec::per_layer_vocab_size, "");
        f("attention", &ModelSpec::attention, "");
        f("mlp", &ModelSpec::mlp, "");
        f("experts", &ModelSpec::experts, "");
        f("delta", &ModelSpec::delta, "");
        f("latent", &ModelSpec::latent, "");
        f("ropes", &ModelSpec::ropes, "");
        f("layers", &ModelSpec::layers, "[num_layers]");
    }

    // A stage is a run of layers, with the embedding before the first one of the model, and the final norm and the
    // lm_head behind the last one.
    LayerRange own_layers() const { return stage.size() > 0 ? stage : LayerRange{0, num_layers}; }
    bool is_first_stage() const { return own_layers().begin == 0; }
    bool is_last_stage() const { return own_layers().end == num_layers; }
    // With the sizes of one layer.
    AttentionSpec attention_of(int layer) const {
        AttentionSpec own = attention;
        const CacheSpec& cache = layers[static_cast<size_t>(layer)].cache;
        if (cache.num_kv_heads > 0) own.num_kv_heads = cache.num_kv_heads;
        if (cache.head_dim > 0) own.head_dim = cache.head_dim;
        own.own_kv = cache.kind != CacheKind::shared;
        if (cache.kind == CacheKind::latent) own.latent_dim = latent.kv_rank;
        return own;
    }
    int intermediate_size_of(int layer) const {
        const int own = layers[static_cast<size_t>(layer)].intermediate_size;
        return own > 0 ? own : mlp.intermediate_size;
    }
    bool has_state(int layer) const { return layers[static_cast<size_t>(layer)].cache.kind == CacheKind::state; }
    // Whether it reads no more keys and values than its window, and nobody more of those it has.
    bool has_window(int layer) const {
        const LayerSpec& own = layers[static_cast<size_t>(layer)];
        const auto owner = static_cast<size_t>(own.cache.kind == CacheKind::shared ? own.cache.owner : layer);
        return layers[owner].sliding_window > 0 && !has_state(layer);
    }
    bool has_latent(int layer) const { return layers[static_cast<size_t>(layer)].cache.kind == CacheKind::latent; }
    int num_state_layers() const {
        return static_cast<int>(
            std::ranges::count_if(layers, [](const LayerSpec& layer) { return layer.cache.kind == CacheKind::state; }));
    }
    // The largest of all layers with attention: of q_dim, for instance.
    template <class Size>
    int widest(Size size) const {
        int most = 0;
        for (int layer = 0; layer < num_layers; ++layer)
            if (!has_state(layer)) most = std::max(most, std::invoke(size, attention_of(layer)));
        return most;
    }
};

}  // namespace infinilm
