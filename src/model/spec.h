// ModelSpec: everything the decoder needs to know of a model, as plain numbers. Made in Python from a Hugging Face
// config.json (infinilm/config/spec.py); families differ only here. What a kind of sublayer says of itself stands
// in its file in `sublayers`; here these are put together.
#pragma once

#include <algorithm>
#include <optional>
#include <variant>
#include <vector>

#include "core/dtype.h"
#include "model/altup_spec.h"
#include "model/embedding_sum_spec.h"
#include "model/position_bias_spec.h"
#include "model/sublayers/attention_spec.h"
#include "model/sublayers/delta_spec.h"
#include "model/sublayers/experts_spec.h"
#include "model/sublayers/latent_spec.h"
#include "model/sublayers/laurel_spec.h"
#include "model/sublayers/mamba_spec.h"
#include "model/sublayers/mlp_spec.h"
#include "model/sublayers/own_vectors_spec.h"
#include "model/sublayers/shared_block_spec.h"
#include "model/sublayers/short_conv_spec.h"
#include "model/tower_spec.h"

namespace infinilm {

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

// What is done with the weight of a norm.
struct NormForm {
    NormKind kind = NormKind::rms;
    float offset = 0;      // added to its weight
    bool weighted = true;  // else it has no weight, which counts as ones
};

// Which norms of what sublayers read take the place of the residual stream, so that results are added to them: none;
// the first, which is then a norm of the embedding, as in ModernBERT; or all, so that sums are normed, as in BERT.
enum class StreamNorms : uint8_t { none, embedding, all };
constexpr std::string_view name(StreamNorms norms) {
    switch (norms) {
        case StreamNorms::none: return "none";
        case StreamNorms::embedding: return "embedding";
        case StreamNorms::all: return "all";
    }
    return "?";
}

inline constexpr int most_axes = 4;  // of the positions of a token

struct RopeSpec {
    std::vector<float> inv_freq;  // [rotary_dim / 2]
    float attention_factor = 1;   // multiplies cosines and sines
    // Both are also multiplied by 1 + scale_beta * ln(1 + floor((position + scale_offset) / scale_positions)).
    float scale_beta = 0;
    int scale_positions = 1, scale_offset = 0;
    // [rotary_dim / 2]: which of a token's positions, such as time, row and column, each frequency turns by; empty:
    // each token has one.
    std::vector<int> axes;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("inv_freq", &RopeSpec::inv_freq, "[rotary_dim / 2]");
        f("attention_factor", &RopeSpec::attention_factor, "");
        f("scale_beta", &RopeSpec::scale_beta, "");
        f("scale_positions", &RopeSpec::scale_positions, "");
        f("scale_offset", &RopeSpec::scale_offset, "");
        f("axes", &RopeSpec::axes, "[rotary_dim / 2]: the axis of each frequency; empty: tokens have one position.");
    }
};

// Consecutive layers.
struct LayerRange {
    int begin = 0, end = 0;
    int size() const { return end - begin; }
    bool contains(int layer) const { return layer >= begin && layer < end; }
    bool operator==(const LayerRange&) const = default;
};

// What mixes a token with those before it.
using MixerSpec = std::variant<AttentionSpec, LatentSpec, DeltaSpec, ShortConvSpec, MambaSpec>;

// The sublayers of one layer: a mixer, or two of different kinds side by side, then an MLP, experts, or both side by
// side. Any of these may be absent, not all.
struct LayerSpec {
    std::optional<MixerSpec> mixer;
    std::optional<MlpSpec> mlp;
    std::optional<ExpertsSpec> experts;
    std::optional<MixerSpec> mixer_beside;  // reads the same norm as the mixer
    std::optional<LaurelSpec> laurel;       // the same
    bool norms_behind = false;  // its sublayers norm what they add, not what they read as those of other layers do
    std::optional<SharedBlockSpec> block;  // runs first: the mixer reads the stream with what the block adds to it

    // Calls f(sublayer) for the specification of each.
    template <class F>
    void visit(F f) const {
        for (const auto* own : {&mixer, &mixer_beside})
            if (*own) std::visit(f, **own);
        if (laurel) f(*laurel);
        if (block) f(*block);
        if (mlp) f(*mlp);
        if (experts) f(*experts);
    }
    // The mixer of a kind that the layer has.
    template <class Spec>
    const Spec& mixer_of() const {
        const bool is_first = mixer && std::holds_alternative<Spec>(*mixer);
        return std::get<Spec>(*(is_first ? mixer : mixer_beside));
    }
    CacheSpec cache() const;
    CostSpec cost() const;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("mixer", &LayerSpec::mixer, "What mixes a token with those before it.");
        f("mlp", &LayerSpec::mlp, "");
        f("experts", &LayerSpec::experts, "In place of the MLP, or beside it.");
        f("mixer_beside", &LayerSpec::mixer_beside, "A mixer of another kind, which reads the same norm.");
        f("laurel", &LayerSpec::laurel, "A second way around the mixer, which reads the same norm.");
        f("norms_behind", &LayerSpec::norms_behind,
          "Its sublayers norm what they add, not what they read as those of other layers do.");
        f("block", &LayerSpec::block, "A block that several layers share, whose result the mixer reads, too.");
    }
};

// The MTP head, which drafts; see MtpHead. A draft needs no exactness, so the head may keep its weights in fewer bits
// than the model, and have its own copy of the lm_head.
//
// With `taps` it is one of EAGLE-3: it reads the residual stream at the beginning of these layers (num_layers: behind
// the last) in place of the model's last hidden state, and its attention reads the embedding beside that.
//
// With a `hidden_size` it is a drafter such as Gemma 4's: layers of that width between two projections, which mostly
// read the keys and values of layers of the model (AttentionSpec::kv_owner).
struct MtpSpec {
    std::vector<LayerSpec> layers;  // They count as those behind the last.
    Quantization quantization = Quantization::none;
    // Outputs of the head's own lm_head, which are the first ids of the vocabulary; 0: the model's makes its logits.
    int lm_head_size = 0;
    std::vector<int> taps;              // in ascending order
    bool norm_before_residual = false;  // with taps: what it reads is normed before it becomes its residual stream
    int hidden_size = 0;                // of its layers; 0: that of the model, without projections
    // Modules that draft in turn, each of which has its part of the layers and all that a head has besides.
    int num_modules = 1;
    bool before_norm = false;  // what it reads of the model, and what a module leaves to the next, is not normed

    bool is_eagle3() const { return !taps.empty(); }
    int layers_of_module() const { return static_cast<int>(layers.size()) / num_modules; }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("layers", &MtpSpec::layers, "They count as those behind the last.");
        f("quantization", &MtpSpec::quantization, "How the linears of the head are kept.");
        f("lm_head_size", &MtpSpec::lm_head_size,
          "Outputs of the head's own lm_head, which are the first ids of the vocabulary; 0: it uses the model's.");
        f("taps", &MtpSpec::taps,
          "Layers at whose beginning an EAGLE-3 head reads the residual stream; empty: it reads the last norm.");
        f("norm_before_residual", &MtpSpec::norm_before_residual,
          "With taps: what it reads is normed before it becomes its residual stream.");
        f("hidden_size", &MtpSpec::hidden_size,
          "Of its layers, between projections from and to that of the model; 0: it is that of the model.");
        f("num_modules", &MtpSpec::num_modules,
          "Modules that draft in turn: each has an equal part of the layers, and reads what the one before has left.");
        f("before_norm", &MtpSpec::before_norm,
          "It reads hidden states that no norm has changed, of the model and of itself; else those behind the last "
          "norm.");
    }
};

struct ModelSpec {
    DType dtype = DType::float32;  // what the engine computes in
    // How linears keep their weights. With int4, the embedding and the lm_head are int8, since they lose more by it.
    Quantization quantization = Quantization::none;
    bool fp8_inputs = false;  // linears of FP8 weights round what they read to FP8, too: on GPUs
    int vocab_size = 0, hidden_size = 0, num_layers = 0, max_model_len = 0;
    float rms_norm_eps = 0;
    NormKind norm = NormKind::rms;
    bool norm_weights = true;  // else norms have neither weights nor biases
    // Whether a sublayer norms its input, and whether it norms its result before that joins the residual stream.
    bool pre_norms = true, post_norms = false;
    StreamNorms stream_norms = StreamNorms::none;
    bool parallel_blocks = false;    // attention and MLP read the same residual stream
    bool parallel_norms = false;     // with parallel_blocks: each has a norm of its own, else both read one
    float norm_offset = 0;           // added to every norm weight
    float embedding_multiplier = 1;  // of the embedding
    float residual_multiplier = 1;   // of what a sublayer adds to the residual stream
    float logit_multiplier = 1;
    float logit_cap = 0;  // logits l become logit_cap * tanh(l / logit_cap); 0: they stay
    bool lm_head = true;  // rows that are asked for give logits; else what the last norm makes of them, as encoders do
    bool lm_head_bias = false;
    bool tie_word_embeddings = false;
    // Linears of layers clip what they read and what they give, each tensor by numbers of its own: see Clip.
    bool clipped_linears = false;
    bool layer_scalars = false;  // each layer has a number that multiplies the residual stream it leaves
    std::optional<OwnVectorsSpec> own_vectors;
    std::optional<AltUpSpec> altup;  // several residual streams; vectors of each layer join the others of them
    std::optional<EmbeddingSumSpec> embedding_sum;
    bool embedding_norm = false;     // the embedding is normed, and the norms of what sublayers read are others
    std::optional<TowerSpec> tower;  // it embeds patches of images, and gives rows that stand for some of them each
    std::vector<RopeSpec> ropes;
    std::optional<PositionBiasSpec> position_bias;  // of the scores of all layers
    // Levels of embeddings that steps are given in place of those of token ids: the first is the embedding, and each
    // other one is added to what a layer leaves, from the first layer on. 0: steps are given none. See Given.
    int given_levels = 0;
    std::vector<LayerSpec> layers;  // [num_layers]
    std::optional<MtpSpec> mtp;     // the MTP head
    LayerRange stage = {};          // of a stage of a pipeline, which it has; empty: all. See stage_spec

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("dtype", &ModelSpec::dtype, "What the engine computes in.");
        f("quantization", &ModelSpec::quantization, "");
        f("fp8_inputs", &ModelSpec::fp8_inputs, "Linears of FP8 weights round what they read to FP8, too: on GPUs.");
        f("vocab_size", &ModelSpec::vocab_size, "");
        f("hidden_size", &ModelSpec::hidden_size, "");
        f("num_layers", &ModelSpec::num_layers, "");
        f("max_model_len", &ModelSpec::max_model_len, "");
        f("rms_norm_eps", &ModelSpec::rms_norm_eps, "");
        f("norm", &ModelSpec::norm, "");
        f("norm_weights", &ModelSpec::norm_weights, "Norms have weights; else they have neither weights nor biases.");
        f("pre_norms", &ModelSpec::pre_norms, "A norm for the input of each sublayer.");
        f("post_norms", &ModelSpec::post_norms, "A norm for what each sublayer adds to the residual stream.");
        f("stream_norms", &ModelSpec::stream_norms,
          "Which norms take the place of the residual stream: none, embedding (the first) or all, as in BERT.");
        f("parallel_blocks", &ModelSpec::parallel_blocks, "Attention and MLP read the same residual stream.");
        f("parallel_norms", &ModelSpec::parallel_norms, "Each of them has a norm of its own; else both read one.");
        f("norm_offset", &ModelSpec::norm_offset, "Added to every norm weight.");
        f("embedding_multiplier", &ModelSpec::embedding_multiplier, "");
        f("residual_multiplier", &ModelSpec::residual_multiplier, "Multiplies what a sublayer adds.");
        f("logit_multiplier", &ModelSpec::logit_multiplier, "");
        f("logit_cap", &ModelSpec::logit_cap, "Logits l become logit_cap * tanh(l / logit_cap); 0: they stay.");
        f("lm_head", &ModelSpec::lm_head,
          "Rows that are asked for give logits; else what the last norm makes of them.");
        f("lm_head_bias", &ModelSpec::lm_head_bias, "");
        f("tie_word_embeddings", &ModelSpec::tie_word_embeddings, "");
        f("layer_scalars", &ModelSpec::layer_scalars, "Each layer multiplies the residual stream it leaves.");
        f("clipped_linears", &ModelSpec::clipped_linears, "Linears of layers clip what they read and give.");
        f("own_vectors", &ModelSpec::own_vectors, "");
        f("altup", &ModelSpec::altup, "Several residual streams, which alternating updates mix.");
        f("embedding_sum", &ModelSpec::embedding_sum, "What is added to the embedding.");
        f("embedding_norm", &ModelSpec::embedding_norm, "The embedding is normed, beside the norms of sublayers.");
        f("tower", &ModelSpec::tower, "An encoder of images: what it has besides its layers.");
        f("ropes", &ModelSpec::ropes, "");
        f("position_bias", &ModelSpec::position_bias, "What is added to scores by the distance of a key.");
        f("given_levels", &ModelSpec::given_levels,
          "Levels of embeddings that steps are given: the embedding, then what is added behind layers; 0: none.");
        f("layers", &ModelSpec::layers, "[num_layers]");
        f("mtp", &ModelSpec::mtp, "The MTP head, which drafts.");
    }

    // A stage is a run of layers, with the embedding before the first one of the model, and the final norm and the
    // lm_head behind the last one.
    LayerRange own_layers() const { return stage.size() > 0 ? stage : LayerRange{0, num_layers}; }
    bool is_first_stage() const { return own_layers().begin == 0; }
    bool is_last_stage() const { return own_layers().end == num_layers; }
    // The same with the layers of the MTP head: all that have weights and a cache.
    LayerRange own_layers_and_head() const {
        LayerRange own = own_layers();
        if (mtp && is_last_stage()) own.end += static_cast<int>(mtp->layers.size());
        return own;
    }
    const LayerSpec& layer(int index) const {
        return index < num_layers ? layers[static_cast<size_t>(index)]
                                  : mtp->layers[static_cast<size_t>(index - num_layers)];
    }
    bool has_blocks() const {
        return std::ranges::any_of(layers, [](const LayerSpec& layer) { return layer.block.has_value(); });
    }
    bool has_experts_on_host() const {
        return std::ranges::any_of(layers, [](const LayerSpec& own) { return own.experts && own.experts->on_host; });
    }
    bool is_eagle3(int index) const { return index >= num_layers && mtp->is_eagle3(); }
    // Logits of a row: of the model, or of its MTP head. 0: it has no lm_head.
    int num_logits(bool of_head) const {
        return !lm_head ? 0 : of_head && mtp->lm_head_size > 0 ? mtp->lm_head_size : vocab_size;
    }
    // Positions of each token on different axes that ropes turn by; 0: they turn by its one position.
    int num_axes() const {
        int most = 0;
        for (const RopeSpec& rope : ropes)
            for (const int axis : rope.axes) most = std::max(most, axis + 1);
        return most;
    }
    std::vector<CacheSpec> caches() const;  // [num_layers], and those of the MTP head
    // The model as a layer of this index sees it: those of an MTP head may have another width, and have no vectors of
    // their own.
    ModelSpec around(int index) const;
};

// What a model must be to run, asked once, when an engine is made. ConfigError: sizes that contradict each other.
void validate(const ModelSpec& spec);

// What a model has that GPUs have no kernels for; null: nothing.
const char* only_on_cpus(const ModelSpec& spec);

// The spec of one rank: its part of each sublayer; all else is the model's, vocab_size too, or that of its stage.
// ConfigError: a size of tensor parallelism that does not fit the model, with those that do.
ModelSpec local_spec(const ModelSpec& model, Shard shard);

// The spec of one stage: the model's, but for ModelSpec::stage. num_layers: of each stage; empty: equally many, and of
// those that are left the first stages have one more each, since the last one has the lm_head. ConfigError: more stages
// than layers, or other numbers of layers.
ModelSpec stage_spec(const ModelSpec& model, int stage, int num_stages, const std::vector<int>& num_layers = {});

}  // namespace infinilm
