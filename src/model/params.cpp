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

    auto vector = [&](VectorWeights& weights, const std::string& name, int64_t size) {
        row(name + ".weight", {size}, weights.loaded);
    };

    linear(weights_.embed_tokens, hidden, false, {{"model.embed_tokens", vocab}});
    weights_.layers.resize(spec.num_layers);  // destinations stay where they are from here on
    for (int i = 0; i < spec.num_layers; ++i) {
        LayerWeights& w = weights_.layers[i];
        const std::string layer = concat("model.layers.", i, ".");
        vector(w.input_layernorm, layer + "input_layernorm", hidden);
        linear(w.qkv_proj, hidden, attention.qkv_bias,
               {{layer + "self_attn.q_proj", q_dim},
                {layer + "self_attn.k_proj", kv_dim},
                {layer + "self_attn.v_proj", kv_dim}});
        if (attention.qk_norm) {
            vector(w.q_norm, layer + "self_attn.q_norm", head_dim);
            vector(w.k_norm, layer + "self_attn.k_norm", head_dim);
        }
        linear(w.o_proj, q_dim, attention.out_bias, {{layer + "self_attn.o_proj", hidden}});
        vector(w.post_attention_layernorm, layer + "post_attention_layernorm", hidden);
        linear(w.gate_up_proj, hidden, spec.mlp.bias,
               {{layer + "mlp.gate_proj", inner}, {layer + "mlp.up_proj", inner}});
        linear(w.down_proj, inner, spec.mlp.bias, {{layer + "mlp.down_proj", hidden}});
    }
    vector(weights_.norm, "model.norm", hidden);
    if (!spec.tie_word_embeddings)  // else prepare() shares embed_tokens
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
    bytes_ += tensor.bytes();
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
    auto prepare = [&](LinearWeights& w, LinearKind kind = LinearKind::plain, int head_dim = 0) {
        w.prepared = ops::prepare_linear(backend, w.parts, kind, head_dim);
    };
    auto prepare_vector = [&](VectorWeights& w) { w.prepared = backend.prepare_vector(w.loaded); };
    prepare(weights_.embed_tokens);
    for (LayerWeights& layer : weights_.layers) {
        prepare_vector(layer.input_layernorm);
        prepare(layer.qkv_proj, LinearKind::qkv, spec_.attention.head_dim);
        prepare_vector(layer.q_norm);
        prepare_vector(layer.k_norm);
        prepare(layer.o_proj);
        prepare_vector(layer.post_attention_layernorm);
        prepare(layer.gate_up_proj, LinearKind::silu_mul);
        prepare(layer.down_proj);
    }
    prepare_vector(weights_.norm);
    if (spec_.tie_word_embeddings)
        weights_.lm_head.prepared = weights_.embed_tokens.prepared;
    else
        prepare(weights_.lm_head);
    prepared_ = true;
    // Dummy weights made on a device: the prepared form is enough. Files stay mapped, which costs nothing.
    for (const ParamRow& row : rows_)
        if (row.destination->device().kind != DeviceKind::cpu) *row.destination = {};
}

void Params::clear() {
    for (const ParamRow& row : rows_) *row.destination = {};
    bytes_ = 0;
    auto drop = [](auto& w) { w.prepared = {}; };
    drop(weights_.embed_tokens);
    for (LayerWeights& layer : weights_.layers) {
        drop(layer.input_layernorm);
        drop(layer.qkv_proj);
        drop(layer.q_norm);
        drop(layer.k_norm);
        drop(layer.o_proj);
        drop(layer.post_attention_layernorm);
        drop(layer.gate_up_proj);
        drop(layer.down_proj);
    }
    drop(weights_.norm);
    drop(weights_.lm_head);
    prepared_ = false;
}

}  // namespace infinilm
