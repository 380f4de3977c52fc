#include "model/shard.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/error.h"

namespace infinilm {

namespace {

// The smallest of an MLP or an expert.
int least_inner(const ModelSpec& model) {
    int least = model.mlp.intermediate_size;
    for (const LayerSpec& layer : model.layers)
        if (layer.intermediate_size > 0) least = std::min(least, layer.intermediate_size);
    for (const int size : {model.experts.intermediate_size, model.experts.shared_intermediate_size})
        if (size > 0) least = std::min(least, size);
    return least;
}

bool fits(const ModelSpec& model, int size) {
    return size >= 1 && model.attention.num_heads % size == 0 && least_inner(model) >= size &&
           model.delta.num_k_heads % size == 0;
}

std::string fitting_sizes(const ModelSpec& model) {
    std::string list;
    for (int size = 1; size <= model.attention.num_heads; ++size)
        if (fits(model, size)) list += concat(list.empty() ? "" : ", ", size);
    return list;
}

// Query heads of a rank that read the same kv head: they may not cross a group of the model's.
int local_group(const AttentionSpec& model, Shard shard) {
    return std::gcd(model.num_heads / shard.size, model.num_heads / model.num_kv_heads);
}

}  // namespace

ModelSpec local_spec(const ModelSpec& model, Shard shard) {
    if (!fits(model, shard.size))
        throw ConfigError(concat(
            "tensor parallelism of ", shard.size, " does not fit a model of ", model.attention.num_heads,
            " attention heads",
            model.delta.num_k_heads > 0 ? concat(", ", model.delta.num_k_heads, " key heads of linear attention") : "",
            " and intermediate_size ", least_inner(model), "; sizes that do: ", fitting_sizes(model)));
    if (shard.rank < 0 || shard.rank >= shard.size)
        throw ConfigError(concat("rank ", shard.rank, " is not one of ", shard.size));
    ModelSpec local = model;
    local.attention.num_heads = model.attention.num_heads / shard.size;
    local.attention.num_kv_heads = local.attention.num_heads / local_group(model.attention, shard);
    for (size_t layer = 0; layer < local.layers.size(); ++layer) {
        if (int& own = local.layers[layer].cache.num_kv_heads; own > 0)
            own = local.attention.num_heads / local_group(model.attention_of(static_cast<int>(layer)), shard);
        if (int& own = local.layers[layer].intermediate_size; own > 0)
            own = static_cast<int>(inner_of(own, shard).size());
    }
    local.delta.num_k_heads = model.delta.num_k_heads / shard.size;
    local.delta.num_v_heads = model.delta.num_v_heads / shard.size;
    for (int* size :
         {&local.mlp.intermediate_size, &local.experts.intermediate_size, &local.experts.shared_intermediate_size})
        *size = static_cast<int>(inner_of(*size, shard).size());
    return local;
}

ModelSpec stage_spec(const ModelSpec& model, int stage, int num_stages) {
    if (num_stages < 1 || num_stages > model.num_layers)
        throw ConfigError(concat("a pipeline of ", num_stages, " stages does not fit a model of ", model.num_layers,
                                 " layers; a stage has at least one"));
    if (stage < 0 || stage >= num_stages) throw ConfigError(concat("stage ", stage, " is not one of ", num_stages));
    const bool reads_others = model.per_layer_size > 0 || std::ranges::any_of(model.layers, [](const LayerSpec& layer) {
                                  return layer.cache.owner >= 0;
                              });
    if (num_stages > 1 && reads_others)
        throw ConfigError(concat("a pipeline of ", num_stages,
                                 " stages does not fit a model whose layers read the keys "
                                 "and values of earlier ones, or an embedding of their own; use one stage"));
    const auto first = [&](int64_t s) {
        return static_cast<int>((model.num_layers * s + num_stages - 1) / num_stages);
    };
    ModelSpec part = model;
    part.stage = {first(stage), first(stage + 1)};
    return part;
}

std::vector<int> kv_heads_of(const AttentionSpec& model, Shard shard) {
    const int group = local_group(model, shard);
    const int num_heads = model.num_heads / shard.size;  // consecutive ones, as many on every rank
    std::vector<int> heads;
    for (int head = shard.rank * num_heads; head < (shard.rank + 1) * num_heads; head += group)
        heads.push_back(head / (model.num_heads / model.num_kv_heads));
    return heads;
}

Range inner_of(int64_t total, Shard shard) {
    const int64_t size = shard.size, rank = shard.rank;
    const auto fits = [&](int64_t unit) { return total % unit == 0 && total / unit >= size; };
    const int64_t unit = fits(32) ? 32 : fits(8) ? 8 : 1, units = total / unit;
    return {units * rank / size * unit, units * (rank + 1) / size * unit};
}

int64_t vocab_part(int64_t vocab_size, int size) { return ((vocab_size + size - 1) / size + 15) / 16 * 16; }

Range vocab_of(int64_t vocab_size, Shard shard) {
    const int64_t part = vocab_part(vocab_size, shard.size);
    return {std::min(vocab_size, shard.rank * part), std::min(vocab_size, (shard.rank + 1) * part)};
}

}  // namespace infinilm
