#include "model/spec.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "model/cut.h"

namespace infinilm {

CacheSpec LayerSpec::cache() const {
    CacheSpec all = block ? block->attention.cache() : CacheSpec{.kind = CacheKind::none, .states = {}};
    for (const auto* mixer : {&this->mixer, &mixer_beside}) {
        if (!*mixer) continue;
        CacheSpec own = std::visit([](const auto& spec) { return spec.cache(); }, **mixer);
        if (own.has_rows()) std::swap(all, own);  // of two mixers one has rows and one has a state: see check_layer
        all.states.insert(all.states.end(), own.states.begin(), own.states.end());
        all.log_columns += own.log_columns;
    }
    return all;
}

CostSpec LayerSpec::cost() const {
    CostSpec sum = block ? block->attention.cost() : CostSpec();
    for (const auto* mixer : {&this->mixer, &mixer_beside}) {
        if (!*mixer) continue;
        const CostSpec own = std::visit([](const auto& spec) { return spec.cost(); }, **mixer);
        sum.of_pair += own.of_pair, sum.of_token += own.of_token;
    }
    return sum;
}

std::vector<CacheSpec> ModelSpec::caches() const {
    std::vector<CacheSpec> all;
    for (const LayerSpec& layer : layers) all.push_back(layer.cache());
    if (mtp)
        for (const LayerSpec& layer : mtp->layers) all.push_back(layer.cache());
    return all;
}

ModelSpec ModelSpec::around(int index) const {
    ModelSpec own = *this;
    if (index < num_layers) return own;
    own.own_vectors.reset();
    if (mtp->hidden_size > 0) own.hidden_size = mtp->hidden_size;
    return own;
}

void check_rope(const ModelSpec& model, int rope, int head_dim) {
    const int num_ropes = static_cast<int>(model.ropes.size());
    require_spec(rope >= -1 && rope < num_ropes, "a layer has rope ", rope, " of ", num_ropes);
    if (rope < 0) return;
    const auto& inv_freq = model.ropes[static_cast<size_t>(rope)].inv_freq;
    require_spec(!inv_freq.empty() && static_cast<int>(2 * inv_freq.size()) <= head_dim, "a rope has ", inv_freq.size(),
                 " frequencies for head_dim ", head_dim);
}

namespace {

// A layer that reads the keys and values of an earlier one.
void check_owner(int layer, const std::vector<CacheSpec>& caches) {
    const CacheSpec& own = caches[static_cast<size_t>(layer)];
    if (own.kind != CacheKind::shared) return;
    require_spec(own.owner >= 0 && own.owner < layer && caches[static_cast<size_t>(own.owner)].kind == CacheKind::paged,
                 "layer ", layer, " reads the keys and values of layer ", own.owner,
                 ", which is no earlier one with its own");
    const CacheSpec& its = caches[static_cast<size_t>(own.owner)];
    require_spec(its.num_kv_heads == own.num_kv_heads && its.head_dim == own.head_dim && its.value_dim == own.value_dim,
                 "layer ", layer, " reads the keys and values of layer ", own.owner, ", whose heads are others");
    require_spec((its.sliding_window > 0) == (own.sliding_window > 0), "layer ", layer,
                 " reads the keys and values of layer ", own.owner, ": both must have a window, or neither");
}

void check_layer(const ModelSpec& model, const LayerSpec& layer) {
    layer.visit([&](const auto& own) { own.check(model); });
    require_spec(layer.mixer || layer.mlp || layer.experts, "a layer needs a mixer, an MLP or experts");
    require_spec(!layer.mixer_beside || layer.mixer, "mixer_beside: expected a mixer that it is beside");
    require_spec(
        (layer.mixer && (layer.mlp || layer.experts) && !layer.mixer_beside) ||
            (model.pre_norms && !model.post_norms && !model.parallel_blocks && model.stream_norms == StreamNorms::none),
        "layers of other sublayers than a mixer and an MLP or experts need norms before them alone");
    if (layer.mixer_beside) {
        const auto cache = [](const MixerSpec& mixer) {
            return std::visit([](const auto& own) { return own.cache(); }, mixer);
        };
        require_spec(cache(*layer.mixer).has_rows() != cache(*layer.mixer_beside).has_rows(),
                     "two mixers side by side: expected one that keeps keys and values, and one that keeps a state");
    }
    require_spec(
        !layer.norms_behind || (model.pre_norms && !model.post_norms && !model.parallel_blocks &&
                                model.stream_norms == StreamNorms::none && layer.mixer && layer.mlp && !layer.experts &&
                                !layer.mixer_beside && !layer.block),
        "norms behind the sublayers of a layer are of one with a mixer and an MLP, in a model with norms before "
        "the others");
    require_spec(!layer.laurel || (layer.mixer && !layer.mixer_beside),
                 "a learned residual layer is the second way around one mixer");
    require_spec(!(layer.mlp && layer.experts) || (model.pre_norms && model.post_norms && !model.parallel_blocks &&
                                                   !layer.experts->shared && layer.experts->out_multiplier == 1),
                 "experts beside an MLP need norms before and after, and have neither one of all tokens nor a "
                 "multiplier of what they add");
}

std::vector<LayerSpec> layers_and_head(const ModelSpec& model) {
    std::vector<LayerSpec> all = model.layers;
    if (model.mtp) all.insert(all.end(), model.mtp->layers.begin(), model.mtp->layers.end());
    return all;
}

// What ranks divide, each kind once: of those that are no heads the least.
std::vector<Divided> divided(const ModelSpec& model) {
    std::vector<Divided> all;
    for (const LayerSpec& layer : layers_and_head(model))
        layer.visit([&](const auto& sublayer) {
            for (const Divided& own : sublayer.divided()) {
                const auto known = std::ranges::find_if(all, [&](const Divided& other) {
                    return other.what == own.what && (!own.equally || other.count == own.count);
                });
                if (known == all.end())
                    all.push_back(own);
                else
                    known->count = std::min(known->count, own.count);
            }
        });
    std::ranges::stable_sort(all, std::greater<>(), &Divided::equally);
    return all;
}

bool fits(const std::vector<Divided>& all, int size) {
    return size >= 1 && std::ranges::all_of(all, [&](const Divided& own) { return own.fits(size); });
}

std::string fitting_sizes(const std::vector<Divided>& all) {
    std::string list;
    int most = all.empty() ? 0 : all[0].count;
    for (const Divided& own : all) most = std::min(most, own.count);
    for (int size = 1; size <= most; ++size)
        if (fits(all, size)) list += concat(list.empty() ? "" : ", ", size);
    return list;
}

}  // namespace

// Layers that share a block have it under the name of the first of them.
static void check_blocks(const ModelSpec& spec) {
    int num_uses = 0;
    for (int layer = 0; layer < spec.num_layers; ++layer) {
        const auto& own = spec.layer(layer).block;
        if (!own) continue;
        require_spec(
            own->owner >= 0 && own->owner <= layer && spec.layer(own->owner).block &&
                spec.layer(own->owner).block->owner == own->owner && own->use == num_uses++,
            "layer ", layer, " shares the block of layer ", own->owner, ", and is use ", own->use,
            " of all; expected that layer or an earlier one which has its own, and uses in the order of layers");
        const LayerSpec& layer_spec = spec.layer(layer);
        require_spec(layer_spec.mixer && std::holds_alternative<MambaSpec>(*layer_spec.mixer) &&
                         !layer_spec.mixer_beside && !layer_spec.mlp && !layer_spec.experts &&
                         spec.norm == NormKind::rms && !spec.mtp,
                     "a shared block is of layers of Mamba alone, in a model with RMSNorm and "
                     "without an MTP head");
    }
}

// Layers that read the keys which the layer before chose have such a layer before them, in their stage of a pipeline.
static void check_indexers(const ModelSpec& spec) {
    const auto shares = [&](const LayerSpec& layer) {
        const auto* latent = layer.mixer ? std::get_if<LatentSpec>(&*layer.mixer) : nullptr;
        return latent && latent->indexer && latent->indexer->shared;
    };
    const int first = spec.own_layers().begin;
    require_spec(!shares(spec.layers.front()), "layer 0 reads the keys that the layer before it chose; there is none");
    require_spec(!shares(spec.layer(first)), "layer ", first, ", the first of a stage of a pipeline, reads the keys ",
                 "that the layer before it chose; choose other stages");
    require_spec(!spec.mtp || std::ranges::none_of(spec.mtp->layers, shares),
                 "an MTP head needs an indexer of its own");
}

static void check_position_bias(const ModelSpec& spec) {
    const auto num_heads = [](const LayerSpec& layer) {
        const auto* attention = layer.mixer ? std::get_if<AttentionSpec>(&*layer.mixer) : nullptr;
        return attention && !layer.mixer_beside ? attention->num_heads : 0;
    };
    const int of_first = num_heads(spec.layers.front());
    require_spec(of_first > 0 && std::ranges::all_of(layers_and_head(spec),
                                                     [&](const LayerSpec& own) { return num_heads(own) == of_first; }),
                 "a position bias is shared by all layers, which are attention with as many heads each");
    spec.position_bias->check(of_first, spec.max_model_len);
}

void validate(const ModelSpec& spec) {
    require_spec(is_floating(spec.dtype), "dtype must be float32, bfloat16 or float16, got ", name(spec.dtype));
    require_spec(spec.vocab_size > 0 && spec.hidden_size > 0 && spec.num_layers > 0 && spec.max_model_len > 0,
                 "vocab_size, hidden_size, num_layers and max_model_len must be positive, got ", spec.vocab_size, ", ",
                 spec.hidden_size, ", ", spec.num_layers, ", ", spec.max_model_len);
    require_spec(spec.pre_norms || spec.post_norms, "a sublayer needs a norm before or after it");
    require_spec(spec.norm_weights || (spec.norm != NormKind::layer_bias && spec.norm_offset == 0),
                 "norms without weights have neither biases nor an offset of their weights");
    require_spec(spec.stream_norms == StreamNorms::none || (spec.pre_norms && !spec.parallel_blocks),
                 "stream_norms are norms of what each sublayer reads alone");
    require_spec(spec.lm_head || (spec.tie_word_embeddings && !spec.mtp),
                 "without an lm_head there is none to be loaded, and nothing that an MTP head could draft");
    require_spec(!spec.parallel_norms || spec.parallel_blocks, "parallel_norms are norms of parallel_blocks");
    require_spec(!spec.lm_head_bias || (spec.lm_head && !spec.tie_word_embeddings && spec.logit_multiplier == 1),
                 "lm_head_bias is of an lm_head that is no embedding, and whose logits are not multiplied");
    require_spec(!spec.embedding_norm || !(spec.mtp || spec.tower || spec.own_vectors),
                 "embedding_norm: an MTP head, a tower and vectors of each layer read an embedding that is not normed");
    if (spec.embedding_sum) spec.embedding_sum->check(spec.max_model_len);
    require_spec(static_cast<int>(spec.layers.size()) == spec.num_layers, "layers has ", spec.layers.size(),
                 " entries for ", spec.num_layers, " layers");
    require_spec(!spec.layer_scalars || spec.post_norms, "layer_scalars need post_norms");
    if (spec.own_vectors) spec.own_vectors->check(spec);
    if (spec.altup) spec.altup->check(spec);
    if (spec.tower) spec.tower->check(spec);
    for (const RopeSpec& rope : spec.ropes) {
        require_spec(rope.axes.empty() || rope.axes.size() == rope.inv_freq.size(), "a rope has ", rope.axes.size(),
                     " axes for ", rope.inv_freq.size(), " frequencies");
        require_spec(std::ranges::all_of(rope.axes, [](int axis) { return axis >= 0 && axis < most_axes; }),
                     "an axis of a rope is a number below ", most_axes);
    }
    require_spec(spec.given_levels >= 0 && spec.given_levels <= spec.num_layers + 1, "given_levels is ",
                 spec.given_levels, ", with ", spec.num_layers, " layers");
    for (const LayerSpec& layer : spec.layers)
        require_spec(!spec.clipped_linears || (spec.post_norms && layer.mlp && !layer.experts && !layer.mixer_beside &&
                                               layer.mixer && std::holds_alternative<AttentionSpec>(*layer.mixer)),
                     "linears clip in layers of attention and an MLP alone, each with a norm behind it");
    for (const LayerSpec& layer : layers_and_head(spec)) check_layer(spec, layer);
    if (spec.position_bias) check_position_bias(spec);
    if (spec.mtp) {
        const int width = spec.mtp->hidden_size;
        require_spec(
            !spec.mtp->layers.empty() && std::ranges::all_of(spec.mtp->layers,
                                                             [&](const LayerSpec& layer) {
                                                                 const CacheSpec own = layer.cache();
                                                                 return own.has_rows() && !own.has_state() &&
                                                                        own.owner < spec.num_layers;
                                                             }),
            "layers of an MTP head need attention with keys and values of their own, or of layers of the model");
        const int num_modules = spec.mtp->num_modules;
        require_spec(num_modules >= 1 && std::ssize(spec.mtp->layers) % num_modules == 0 &&
                         ((num_modules == 1 && !spec.mtp->before_norm) || (width == 0 && !spec.mtp->is_eagle3())),
                     "modules of an MTP head that draft in turn, or read what no norm has changed, have an equal part "
                     "of its layers each, the width of the model and no taps, got ",
                     num_modules, " with ", spec.mtp->layers.size(), " layers");
        require_spec(width >= 0 && (width == 0 || (spec.mtp->lm_head_size > 0 && !spec.mtp->is_eagle3())),
                     "an MTP head of another width than the model needs an lm_head of its own, and has no taps");
        require_spec(spec.mtp->lm_head_size >= 0 && spec.mtp->lm_head_size <= spec.vocab_size,
                     "the lm_head of an MTP head has up to ", spec.vocab_size,
                     " outputs, as many as the vocabulary, got ", spec.mtp->lm_head_size);
        const std::vector<int>& taps = spec.mtp->taps;
        require_spec(std::ranges::is_sorted(taps, std::less_equal<>()) &&
                         (taps.empty() || (taps.front() >= 0 && taps.back() <= spec.num_layers)),
                     "taps of an EAGLE-3 head are layers in ascending order, from 0 to ", spec.num_layers);
        require_spec(taps.empty() || (spec.norm == NormKind::rms && spec.pre_norms && !spec.parallel_blocks &&
                                      spec.residual_multiplier == 1),
                     "an EAGLE-3 head needs a model whose sublayers begin with an RMSNorm of their own, and add to the "
                     "residual stream what they give");
        require_spec(width > 0 || (!spec.own_vectors && !spec.layer_scalars),
                     "an MTP head has no vectors or scalars of its own, which all layers of this model have");
    }
    const std::vector<CacheSpec> caches = spec.caches();
    check_blocks(spec);
    check_indexers(spec);
    const auto chosen = std::ranges::find_if(caches, [](const CacheSpec& own) { return own.top_k > 0; });
    require_spec(std::ranges::all_of(chosen, caches.end(),
                                     [&](const CacheSpec& own) {
                                         return own.top_k == 0 ||
                                                (own.top_k == chosen->top_k && own.run_keys == chosen->run_keys);
                                     }),
                 "tokens choose as many keys in all layers in which they choose, in runs of one size");
    for (size_t layer = 0; layer < caches.size(); ++layer) check_owner(static_cast<int>(layer), caches);
}

const char* only_on_cpus(const ModelSpec& spec) {
    for (const LayerSpec& layer : layers_and_head(spec)) {
        const char* refused = nullptr;
        layer.visit([&](const auto& own) {
            if constexpr (requires { own.only_on_cpus(); }) refused = own.only_on_cpus();
        });
        if (refused) return refused;
    }
    return nullptr;
}

ModelSpec local_spec(const ModelSpec& model, Shard shard) {
    const std::vector<Divided> all = divided(model);
    if (!fits(all, shard.size)) {
        std::string list;
        for (size_t i = 0; i < all.size(); ++i)
            list += all[i].equally ? concat(i == 0 ? "" : ", ", all[i].count, " ", all[i].what)
                                   : concat(" and ", all[i].what, " ", all[i].count);
        throw ConfigError(concat("tensor parallelism of ", shard.size, " does not fit a model of ", list,
                                 "; sizes that do: ", fitting_sizes(all)));
    }
    if (shard.rank < 0 || shard.rank >= shard.size)
        throw ConfigError(concat("rank ", shard.rank, " is not one of ", shard.size));
    if (shard.size > 1 && model.clipped_linears)
        throw ConfigError("linears that clip what they read and give run on one rank");
    ModelSpec local = model;
    const auto divide = [shard](LayerSpec& layer) {
        for (auto* mixer : {&layer.mixer, &layer.mixer_beside})
            if (*mixer) std::visit([&](auto& own) { own = own.local(shard); }, **mixer);
        if (layer.block) *layer.block = layer.block->local(shard);
        if (layer.mlp) *layer.mlp = layer.mlp->local(shard);
        if (layer.experts) *layer.experts = layer.experts->local(shard);
    };
    std::ranges::for_each(local.layers, divide);
    if (local.mtp) std::ranges::for_each(local.mtp->layers, divide);
    if (local.position_bias) {
        std::vector<float>& slopes = local.position_bias->slopes;
        const Range own = equal_parts(static_cast<int64_t>(slopes.size()), shard).front();
        slopes = std::vector(slopes.begin() + own.begin, slopes.begin() + own.end);
    }
    return local;
}

ModelSpec stage_spec(const ModelSpec& model, int stage, int num_stages, const std::vector<int>& num_layers) {
    if (num_stages < 1 || num_stages > model.num_layers)
        throw ConfigError(concat("a pipeline of ", num_stages, " stages does not fit a model of ", model.num_layers,
                                 " layers; a stage has at least one"));
    if (stage < 0 || stage >= num_stages) throw ConfigError(concat("stage ", stage, " is not one of ", num_stages));
    const bool reads_others =
        model.own_vectors || model.altup || model.embedding_sum || model.tower || model.has_blocks() ||
        std::ranges::any_of(model.caches(), [](const CacheSpec& cache) { return cache.owner >= 0; });
    if (num_stages > 1 && reads_others)
        throw ConfigError(
            concat("a pipeline of ", num_stages,
                   " stages does not fit a model whose layers read the keys and values of earlier ones, or share "
                   "weights with them, that adds other rows to its embedding, or that has several residual streams; "
                   "use one stage"));
    const bool fits = std::ranges::all_of(num_layers, [](int count) { return count > 0; }) &&
                      std::accumulate(num_layers.begin(), num_layers.end(), int64_t{0}) == model.num_layers &&
                      num_layers.size() == static_cast<size_t>(num_stages);
    if (!num_layers.empty() && !fits)
        throw ConfigError(concat("the layers of the stages must be ", num_stages, " positive numbers whose sum is the ",
                                 model.num_layers, " layers of the model"));
    const auto first = [&](int64_t s) {
        if (!num_layers.empty()) return std::accumulate(num_layers.begin(), num_layers.begin() + s, 0);
        return static_cast<int>((model.num_layers * s + num_stages - 1) / num_stages);
    };
    ModelSpec part = model;
    part.stage = {first(stage), first(stage + 1)};
    // The head is in the last stage, with an embedding of its own.
    const int begin_of_last = first(num_stages - 1);
    if (model.mtp && !model.mtp->taps.empty() && model.mtp->taps.front() < begin_of_last)
        throw ConfigError(concat("the head that drafts reads what layer ", model.mtp->taps.front(),
                                 " begins with, and is with the last layers, from ", begin_of_last,
                                 " on: put all of these layers there, use one stage, or leave the head out"));
    check_indexers(part);
    return part;
}

}  // namespace infinilm
