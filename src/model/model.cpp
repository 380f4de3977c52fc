#include "model/model.h"

#include <algorithm>

#include "model/prepare_vectors.h"

namespace infinilm {

// Each norm has the name that checkpoints give it: where o_proj and down_proj are normed before they are added, these
// norms are post_attention_layernorm and post_feedforward_layernorm, and the norm before the MLP has a name of its own.
// All are [num_tokens, hidden_size].
namespace sites {
constexpr Site input_layernorm{"input_layernorm"}, post_attention_layernorm{"post_attention_layernorm"},
    pre_feedforward_layernorm{"pre_feedforward_layernorm"}, post_feedforward_layernorm{"post_feedforward_layernorm"},
    post_laurel_norm{"post_laurel_norm"}, post_per_layer_input_norm{"post_per_layer_input_norm"};
// The residual stream behind each sublayer, and behind the layer.
constexpr Site attention_residual{"attention_residual"}, mixers_residual{"mixers_residual"},
    laurel_residual{"laurel_residual"}, mlp_residual{"mlp_residual"}, residual{"residual"};
}  // namespace sites

namespace {

constexpr float of_two_ways = 0.70710678f;  // of the stream that attention and a second way around it have joined

Body make_mixer(const ModelSpec& model, const AttentionSpec& spec, BufferPlan& plan) {
    return Attention(model, spec, plan);
}
Body make_mixer(const ModelSpec& model, const LatentSpec& spec, BufferPlan& plan) { return Latent(model, spec, plan); }
Body make_mixer(const ModelSpec& model, const DeltaSpec& spec, BufferPlan& plan) { return Delta(model, spec, plan); }
Body make_mixer(const ModelSpec& model, const ShortConvSpec& spec, BufferPlan& plan) {
    return ShortConv(model, spec, plan);
}

Body make_mixer(const ModelSpec& model, const MambaSpec& spec, BufferPlan& plan) { return Mamba(model, spec, plan); }

float out_multiplier(const MixerSpec& mixer) {
    return std::visit(
        [](const auto& own) {
            if constexpr (requires { own.out_multiplier; }) return own.out_multiplier;
            return 1.0f;
        },
        mixer);
}

Body make_feed_forward(const ModelSpec& model, const LayerSpec& layer, BufferPlan& plan) {
    if (!layer.experts) return Mlp(model, *layer.mlp, plan);
    if (!layer.mlp) return Experts(model, *layer.experts, plan);
    return MlpAndExperts(model, *layer.mlp, *layer.experts, plan);
}

// A layer's use of a block, which the first layer that uses it has made.
SharedBlockUse make_block(const ModelSpec& spec, int layer, const std::vector<Layer>& before, BufferPlan& plan) {
    const SharedBlockSpec& own = *spec.layer(layer).block;
    std::shared_ptr<SharedBlock> block;
    if (own.owner == layer)
        block = std::make_shared<SharedBlock>(spec, own, plan);
    else
        block = std::get<SharedBlockUse>(before[static_cast<size_t>(own.owner)].sublayers.front().body).block();
    return SharedBlockUse(spec, layer, std::move(block), plan);
}

// spec: as the layer sees it, see ModelSpec::around. before: the layers before it.
Layer make_layer(const ModelSpec& spec, int layer, const std::vector<Layer>& before, BufferPlan& plan) {
    const LayerSpec& own = spec.layer(layer);
    const auto pre_norm = [&](Site site) {
        return spec.pre_norms && !own.norms_behind ? std::optional(site) : std::nullopt;
    };
    const bool reads_joined = spec.is_eagle3(layer),
               post_norms = own.norms_behind || (spec.post_norms && !reads_joined);
    // Where both sublayers end with a norm, it has the name that the norm before the MLP has elsewhere.
    const Site second = post_norms ? sites::pre_feedforward_layernorm : sites::post_attention_layernorm;
    Layer out;
    const auto body = [&](const MixerSpec& mixer) {
        return std::visit([&](const auto& kind) { return make_mixer(spec, kind, plan); }, mixer);
    };
    if (own.block)
        out.sublayers.push_back({.body = make_block(spec, layer, before, plan),
                                 .norm_site = std::nullopt,
                                 .post_norm_site = sites::post_attention_layernorm,
                                 .sum_site = sites::residual});
    const Buffer given = reads_joined ? MtpHead::joined(spec, plan)
                         : own.block  ? SharedBlockUse::mixer_input(spec, plan)
                                      : Buffer();
    if (own.mixer)
        out.sublayers.push_back({.body = body(*own.mixer),
                                 .norm_site = given ? std::nullopt : pre_norm(sites::input_layernorm),
                                 .reads = given,
                                 .post_norm_site = sites::post_attention_layernorm,
                                 .sum_site = sites::attention_residual,
                                 .has_post_norm = post_norms,
                                 .multiplier = out_multiplier(*own.mixer)});
    if (own.mixer_beside)
        out.sublayers.push_back({.body = body(*own.mixer_beside),
                                 .norm_site = std::nullopt,
                                 .post_norm_site = sites::post_attention_layernorm,
                                 .sum_site = sites::mixers_residual,
                                 .is_beside = true,
                                 .multiplier = out_multiplier(*own.mixer_beside)});
    if (own.laurel)
        out.sublayers.push_back({.body = Laurel(spec, *own.laurel, plan),
                                 .norm_site = std::nullopt,
                                 .post_norm_site = sites::post_laurel_norm,
                                 .sum_site = sites::laurel_residual,
                                 .has_post_norm = true,
                                 .is_beside = true,
                                 .scale = of_two_ways});
    if (own.mlp || own.experts)
        out.sublayers.push_back(
            {.body = make_feed_forward(spec, own, plan),
             .norm_site = spec.parallel_blocks && !spec.parallel_norms ? std::nullopt : pre_norm(second),
             .post_norm_site = sites::post_feedforward_layernorm,
             .sum_site = sites::mlp_residual,
             .has_post_norm = post_norms || (own.experts && own.experts->post_norm),
             .is_beside = spec.parallel_blocks,
             .norm_multiplier = own.mlp ? own.mlp->in_multiplier : 1,
             .multiplier = own.mlp ? own.mlp->out_multiplier : own.experts->out_multiplier});
    if (spec.own_vectors)
        out.sublayers.push_back({.body = OwnVector(spec, layer, plan),
                                 .norm_site = std::nullopt,
                                 .post_norm_site = sites::post_per_layer_input_norm,
                                 .sum_site = sites::residual,
                                 .has_post_norm = true,
                                 .joins_others = spec.altup.has_value()});
    if (spec.altup) out.altup.emplace(spec, plan);
    out.sublayers.back().sum_site = sites::residual;
    for (Sublayer& sublayer : out.sublayers) sublayer.takes_place = spec.stream_norms == StreamNorms::all;
    if (layer == 0 && spec.stream_norms == StreamNorms::embedding) out.sublayers.front().takes_place = true;
    return out;
}

}  // namespace

Model::Model(const ModelSpec& spec)
    : spec(spec), stream(spec, buffers), last(buffers.add({.name = "last", .columns = spec.hidden_size})) {
    for (const RopeSpec& rope : spec.ropes)
        cos_sin.push_back(buffers.add({.name = concat("cos_sin", cos_sin.size()),
                                       .columns = 2 * static_cast<int64_t>(rope.inv_freq.size()),
                                       .dtype = DType::float32}));
    if (spec.clipped_linears) {
        int64_t most_in = spec.hidden_size, most_out = spec.hidden_size;
        for (const LayerSpec& layer : spec.layers) {
            const auto& heads = layer.mixer_of<AttentionSpec>();
            most_in = std::max<int64_t>({most_in, heads.q_dim(), layer.mlp->intermediate_size});
            most_out = std::max<int64_t>({most_out, heads.qkv_dim(), 2 * layer.mlp->intermediate_size});
        }
        clip_in = buffers.add({.name = "clip_in", .columns = most_in});
        clip_out = buffers.add({.name = "clip_out", .columns = most_out});
    }
    if (spec.has_blocks()) joined = SharedBlockUse::joined(spec, buffers);
    if (spec.own_vectors) own_vectors.emplace(spec, buffers);
    if (spec.altup) altup.emplace(spec, buffers);
    if (spec.embedding_sum) embedding_sum.emplace(spec);
    if (spec.position_bias) position_bias.emplace(spec);
    if (spec.tower) tower.emplace(spec, buffers);
    for (int layer = 0; layer < spec.num_layers; ++layer) layers.push_back(make_layer(spec, layer, layers, buffers));
    if (spec.mtp) {
        mtp.reserve(static_cast<size_t>(spec.mtp->num_modules));  // the table of parameters points into them
        for (int i = 0; i < spec.mtp->num_modules; ++i) mtp.emplace_back(spec, buffers);
        const ModelSpec around = spec.around(spec.num_layers);
        for (size_t i = 0; i < spec.mtp->layers.size(); ++i)  // those of other stages, too, so that all have one table
            layers.push_back(make_layer(around, spec.num_layers + static_cast<int>(i), layers, buffers));
    }
}

void Model::declare(ParamTable& table) {
    const ModelSpec& model = table.model();
    const int64_t hidden = model.hidden_size, vocab = model.vocab_size;
    const auto vocabulary = [&](LinearWeights& weights, const std::string& name, std::string_view timed,
                                bool bias = false) {
        table.linear(weights, {.name = name,
                               .in_features = hidden,
                               .parts = {{name, vocab, Cut::rows(vocab_parts)}},
                               .timed = timed,
                               .bias = bias,
                               .vocabulary = true});
    };
    if (tower)
        tower->declare(table);
    else
        vocabulary(embed_tokens, "model.embed_tokens",
                   model.tie_word_embeddings && model.lm_head ? "lm_head" : "embedding");
    if (own_vectors) own_vectors->declare(table);
    if (altup) altup->declare(table);
    if (embedding_sum) embedding_sum->declare(table);
    if (model.embedding_norm) table.norm(embedding_norm, "model.embed_norm", hidden);
    if (position_bias) position_bias->declare(table);
    for (size_t i = 0; i < layers.size(); ++i) {
        Layer& layer = layers[i];
        table.begin_layer(static_cast<int>(i));
        const int64_t width = i < model.layers.size() ? hidden : mtp.front().last.columns;
        const auto norm = [&](VectorWeights& weights, Site site, float multiplier = 1) {
            table.norm(weights, concat(table.prefix(), site.name), width, {}, multiplier);
        };
        if (layer.altup) layer.altup->declare(table);
        for (Sublayer& own : layer.sublayers) {
            if (own.norm_site) norm(own.norm, *own.norm_site, own.norm_multiplier);
            std::visit([&](auto& body) { body.declare(table); }, own.body);
            if (own.has_post_norm) norm(own.post_norm, own.post_norm_site);
        }
        if (model.layer_scalars)
            table.tensor(layer.scalar, table.prefix() + "layer_scalar", {1}, {},
                         [&layer](Backend& backend, const VectorWeights& scalar) {
                             layer.scale = *widened(backend, scalar.loaded).as<const float>();
                             return Tensor();  // the host reads it
                         });
        const size_t of_head = i + 1 - std::min(i + 1, model.layers.size());
        const size_t per_module = model.mtp ? static_cast<size_t>(model.mtp->layers_of_module()) : 1;
        if (of_head > 0 && of_head % per_module == 0)
            mtp[of_head / per_module - 1].declare(table);  // in its last layer
    }
    table.begin_layer(-1);
    if (!model.tower || model.tower->norm)
        table.norm(norm, "model.norm", hidden, {}, model.logit_multiplier);  // lm_head is linear
    if (!model.tie_word_embeddings)                                          // else prepare() shares embed_tokens
        vocabulary(lm_head, "lm_head", "lm_head", model.lm_head_bias);
}

void Model::prepare(Backend& backend) {
    const LayerRange own = spec.own_layers_and_head();
    for (int i = own.begin; i < own.end; ++i)
        for (Sublayer& sublayer : layers[static_cast<size_t>(i)].sublayers)
            std::visit(
                [&](auto& body) {
                    if constexpr (requires { body.prepare(backend); }) body.prepare(backend);
                },
                sublayer.body);
    if (embedding_sum) embedding_sum->prepare(backend);
    if (position_bias) position_bias->prepare(backend);
    if (tower) tower->prepare(backend);
    if (spec.tie_word_embeddings) lm_head.prepared = embed_tokens.prepared;
}

void Model::clear() {
    for (Layer& layer : layers)
        for (Sublayer& sublayer : layer.sublayers)
            std::visit(
                [](auto& body) {
                    if constexpr (requires { body.clear(); }) body.clear();
                },
                sublayer.body);
    if (embedding_sum) embedding_sum->clear();
    if (position_bias) position_bias->clear();
    if (tower) tower->clear();
    lm_head.prepared = {};  // where it is tied, the table does not have it
}

std::vector<ModelSite> Model::sites() const {
    std::vector<ModelSite> out{{sites::embedding, -1}, {sites::final_norm, -1}};
    if (spec.lm_head) out.push_back({sites::logits, -1});
    for (size_t i = 0; i < spec.layers.size(); ++i) {  // hooks see no drafts
        const auto add = [&](const std::optional<Site>& site) {
            if (site) out.push_back({*site, static_cast<int>(i)});
        };
        if (layers[i].altup) add(sites::altup_prediction);
        for (const Sublayer& own : layers[i].sublayers) {
            add(own.norm_site);
            std::visit(
                [&](const auto& body) {
                    for (const Site site : body.sites()) add(site);
                    add(body.site);
                },
                own.body);
            if (own.has_post_norm) add(own.post_norm_site);
            if (!std::holds_alternative<SharedBlockUse>(own.body)) add(own.sum_site);
        }
    }
    return out;
}

LmHead Model::end_of_draft(int module) const {
    const MtpHead& head = mtp[static_cast<size_t>(module)];
    return {head.norm, spec.mtp->lm_head_size > 0 ? head.lm_head : lm_head, spec.num_logits(true), head.stream,
            head.last};
}

LoraPlan Model::lora_plan(int64_t most_rank) const {
    int64_t widest = spec.hidden_size;
    for (const LinearCall& call : calls())
        if (call.adaptable) widest = std::max(widest, call.out_features);
    LoraPlan plan;
    plan.inner = plan.buffers.add({.name = "inner", .columns = (most_rank + 7) / 8 * 8});
    plan.delta = plan.buffers.add({.name = "delta", .columns = widest});
    return plan;
}

std::vector<LinearCall> Model::calls() const {
    std::vector<LinearCall> calls = own_vectors ? own_vectors->calls() : std::vector<LinearCall>();
    if (altup) std::ranges::copy(altup->calls(), std::back_inserter(calls));
    for (const Layer& layer : layers)
        for (const Sublayer& sublayer : layer.sublayers) {
            const auto own = std::visit([](const auto& body) { return body.calls(); }, sublayer.body);
            calls.insert(calls.end(), own.begin(), own.end());
        }
    for (const MtpHead& head : mtp) std::ranges::copy(head.calls(), std::back_inserter(calls));
    if (tower) std::ranges::copy(tower->calls(), std::back_inserter(calls));
    return calls;
}

}  // namespace infinilm
