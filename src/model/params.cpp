#include "model/params.h"

#include <algorithm>

#include "ops/ops.h"

namespace infinilm {

Params::Params(const ModelSpec& spec) : spec_(spec) {
    const int64_t hidden = spec.hidden_size, inner = spec.mlp.intermediate_size, vocab = spec.vocab_size;
    const int64_t q_dim = spec.q_dim(), kv_dim = spec.kv_dim(), head_dim = spec.attention.head_dim;
    const AttentionSpec& attention = spec.attention;

    auto row = [this](std::string name, std::vector<int64_t> shape, Tensor& destination) {
        by_name_[name] = rows_.size();
        rows_.push_back({std::move(name), std::move(shape), &destination});
    };
    // A linear of several checkpoint tensors: {name, out_features} each.
    struct Part {
        std::string name;
        int64_t out_features;
    };
    auto linear = [&](LinearWeights& weights, int64_t in_features, bool bias, const std::vector<Part>& parts) {
        weights.parts.resize(parts.size());
        for (size_t i = 0; i < parts.size(); ++i) {
            row(parts[i].name + ".weight", {parts[i].out_features, in_features}, weights.parts[i].weight);
            if (bias) row(parts[i].name + ".bias", {parts[i].out_features}, weights.parts[i].bias);
        }
    };

    row("model.embed_tokens.weight", {vocab, hidden}, weights_.embed_tokens);
    weights_.layers.resize(spec.num_layers);  // destinations stay where they are from here on
    for (int i = 0; i < spec.num_layers; ++i) {
        LayerWeights& w = weights_.layers[i];
        const std::string layer = concat("model.layers.", i, ".");
        row(layer + "input_layernorm.weight", {hidden}, w.input_layernorm);
        linear(w.qkv_proj, hidden, attention.qkv_bias,
               {{layer + "self_attn.q_proj", q_dim},
                {layer + "self_attn.k_proj", kv_dim},
                {layer + "self_attn.v_proj", kv_dim}});
        if (attention.qk_norm) {
            row(layer + "self_attn.q_norm.weight", {head_dim}, w.q_norm);
            row(layer + "self_attn.k_norm.weight", {head_dim}, w.k_norm);
        }
        linear(w.o_proj, q_dim, attention.out_bias, {{layer + "self_attn.o_proj", hidden}});
        row(layer + "post_attention_layernorm.weight", {hidden}, w.post_attention_layernorm);
        linear(w.gate_up_proj, hidden, spec.mlp.bias,
               {{layer + "mlp.gate_proj", inner}, {layer + "mlp.up_proj", inner}});
        linear(w.down_proj, inner, spec.mlp.bias, {{layer + "mlp.down_proj", hidden}});
    }
    row("model.norm.weight", {hidden}, weights_.norm);
    if (spec.tie_word_embeddings)
        weights_.lm_head.parts.resize(1);  // takes embed_tokens in prepare()
    else
        linear(weights_.lm_head, hidden, false, {{"lm_head", vocab}});
}

void Params::load(const std::string& name, Tensor tensor) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end())
        throw WeightError(concat("unknown parameter '", name, "': the model has ", rows_.size(),
                                 " parameters, such as '", rows_[1 % rows_.size()].name,
                                 "'; param_shapes() lists them"));
    const ParamRow& row = rows_[found->second];
    if (*row.destination) throw WeightError(concat("parameter '", name, "' is already loaded"));
    if (!std::ranges::equal(tensor.shape(), row.shape))
        throw WeightError(concat("parameter '", name, "': expected shape ", shape_string(row.shape), ", got ",
                                 shape_string(tensor.shape())));
    if (!is_floating(tensor.dtype()))
        throw WeightError(concat("parameter '", name, "': expected float32, bfloat16 or float16, got ",
                                 infinilm::name(tensor.dtype())));
    if (!tensor.is_contiguous())
        throw WeightError(concat("parameter '", name, "': expected a contiguous tensor; pass a contiguous copy"));
    *row.destination = std::move(tensor);
}

std::vector<std::string> Params::missing() const {
    std::vector<std::string> out;
    for (const ParamRow& row : rows_)
        if (!*row.destination) out.push_back(row.name);
    return out;
}

void Params::prepare(Backend& backend) {
    if (const auto names = missing(); !names.empty()) {
        std::string list = names[0];
        for (size_t i = 1; i < std::min<size_t>(names.size(), 8); ++i) list += ", " + names[i];
        throw WeightError(concat(names.size(), " of ", rows_.size(), " parameters are not loaded: ", list,
                                 names.size() > 8 ? ", ..." : ""));
    }
    auto prepare = [&](LinearWeights& w, LinearKind kind = LinearKind::plain) {
        w.prepared = ops::prepare_linear(backend, w.parts, kind);
    };
    for (LayerWeights& layer : weights_.layers) {
        prepare(layer.qkv_proj);
        prepare(layer.o_proj);
        prepare(layer.gate_up_proj, LinearKind::silu_mul);
        prepare(layer.down_proj);
    }
    if (spec_.tie_word_embeddings) weights_.lm_head.parts[0].weight = weights_.embed_tokens;
    prepare(weights_.lm_head);
    prepared_ = true;
}

int64_t Params::bytes() const {
    int64_t total = 0;
    for (const ParamRow& row : rows_)
        if (*row.destination) total += row.destination->bytes();
    return total;
}

void Params::clear() {
    for (const ParamRow& row : rows_) *row.destination = {};
    auto drop = [](LinearWeights& w) { w.prepared.reset(); };
    for (LayerWeights& layer : weights_.layers) {
        drop(layer.qkv_proj);
        drop(layer.o_proj);
        drop(layer.gate_up_proj);
        drop(layer.down_proj);
    }
    drop(weights_.lm_head);
    if (spec_.tie_word_embeddings) weights_.lm_head.parts[0] = {};
    prepared_ = false;
}

}  // namespace infinilm
