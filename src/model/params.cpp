#include "model/params.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// The heads' rows or columns; neighbours as one range.
std::vector<Range> head_ranges(const std::vector<int>& heads, int64_t head_dim) {
    std::vector<Range> ranges;
    for (const int64_t head : heads) {
        const Range range{head * head_dim, (head + 1) * head_dim};
        if (!ranges.empty() && ranges.back().end == range.begin)
            ranges.back().end = range.end;
        else
            ranges.push_back(range);
    }
    return ranges;
}

}  // namespace

Params::Params(const ModelSpec& model, Shard shard) : model_(model), spec_(local_spec(model, shard)), shard_(shard) {
    const int64_t hidden = model.hidden_size, vocab = model.vocab_size;
    int of_layer = -1;  // the rows that follow

    auto row = [&](std::string name, std::vector<int64_t> shape, Cut cut, Tensor& destination) {
        by_name_[name] = rows_.size();
        rows_.push_back({std::move(name), std::move(shape), cut, &destination, of_layer});
    };
    // A linear of several checkpoint tensors: {name, out_features, cut} each.
    struct Part {
        std::string name;
        int64_t out_features;
        Cut cut;
    };
    auto linear = [&](LinearWeights& weights, const std::string& name, int64_t in_features, bool bias,
                      const std::vector<Part>& parts, bool is_never_quantised = false) {
        linears_.push_back(&weights);
        linears_by_name_[name] = &weights;
        weights.name = name;
        const bool is_vocabulary = parts[0].cut == Cut::vocab_rows;
        weights.kind = parts.size() == 3   ? LinearKind::qkv
                       : parts.size() == 2 ? LinearKind::act_mul
                                           : LinearKind::plain;
        if (weights.kind == LinearKind::qkv) weights.head_dim = model.attention_of(of_layer).head_dim;
        weights.quantization = is_never_quantised ? Quantization::none : model_.quantization;
        if (is_vocabulary && weights.quantization == Quantization::int4) weights.quantization = Quantization::int8;
        if (is_vocabulary) weights.adaptable = false;
        weights.parts.resize(parts.size());
        for (size_t i = 0; i < parts.size(); ++i) {
            const auto& [name, out_features, cut] = parts[i];
            const size_t first = rows_.size();
            row(name + ".weight", {out_features, in_features}, cut, weights.parts[i].weight);
            if (bias) row(name + ".bias", {out_features}, is_columns(cut) ? Cut::rank0 : cut, weights.parts[i].bias);
            for (size_t added = first; added < rows_.size(); ++added) {
                rows_[added].linear = &weights, rows_[added].part = i;
                weights.rows.push_back(added);
            }
        }
    };

    auto vector = [&](VectorWeights& weights, const std::string& name, int64_t size, Cut cut = Cut::whole) {
        row(name + ".weight", {size}, cut, weights.loaded);
        if (model.norm == NormKind::layer_bias) row(name + ".bias", {size}, Cut::whole, weights.bias);
    };
    auto mlp = [&](LinearWeights& gate_up, LinearWeights& down, const std::string& name, int64_t inner, bool bias) {
        if (model.mlp.gated)
            linear(gate_up, name + "gate_up_proj", hidden, bias,
                   {{name + "gate_proj", inner, Cut::inner_rows}, {name + "up_proj", inner, Cut::inner_rows}});
        else
            linear(gate_up, name + "up_proj", hidden, bias, {{name + "up_proj", inner, Cut::inner_rows}});
        linear(down, name + "down_proj", inner, bias, {{name + "down_proj", hidden, Cut::inner_columns}});
    };
    auto experts = [&](LayerWeights& w, const std::string& name) {
        const ExpertsSpec& spec = model.experts;
        if (spec.beside_mlp) {
            row(name + "gate.scale", {hidden}, Cut::whole, w.router_norm.loaded);
            row(name + "gate.per_expert_scale", {spec.count}, Cut::whole, w.expert_scales.loaded);
        }
        linear(w.router, name + "gate", hidden, spec.bias, {{name + "gate", spec.count, Cut::whole}}, true);
        w.router.adaptable = w.shared_gate.adaptable = false;
        if (spec.correction_bias)
            row(name + "gate.e_score_correction_bias", {spec.count}, Cut::whole, w.router_correction.loaded);
        w.experts_gate_up.resize(static_cast<size_t>(spec.count));
        w.experts_down.resize(static_cast<size_t>(spec.count));
        for (size_t e = 0; e < w.experts_down.size(); ++e) {
            mlp(w.experts_gate_up[e], w.experts_down[e], concat(name, "experts.", e, "."), spec.intermediate_size,
                spec.bias);
            w.experts_gate_up[e].adaptable = w.experts_down[e].adaptable = false;
        }
        if (spec.shared_intermediate_size == 0) return;
        mlp(w.gate_up_proj, w.down_proj, name + "shared_expert.", spec.shared_intermediate_size, false);
        if (spec.shared_gate)
            linear(w.shared_gate, name + "shared_expert_gate", hidden, false,
                   {{name + "shared_expert_gate", 1, Cut::whole}}, true);
    };
    auto latent_projections = [&](LayerWeights& w, const std::string& at) {
        const LatentSpec& latent = model.latent;
        const int64_t num_heads = model.attention.num_heads;
        const bool bias = model.attention.qkv_bias;
        if (latent.q_rank > 0) {
            linear(w.q_a, at + "q_a_proj", hidden, bias, {{at + "q_a_proj", latent.q_rank, Cut::whole}});
            vector(w.q_latent_norm, at + "q_a_layernorm", latent.q_rank);
        }
        const std::string q_b = at + (latent.q_rank > 0 ? "q_b_proj" : "q_proj");
        linear(w.q_b, q_b, latent.q_rank > 0 ? latent.q_rank : hidden, false,
               {{q_b, num_heads * latent.query_dim(), Cut::q_rows}});
        linear(w.kv_a, at + "kv_a_proj", hidden, bias, {{at + "kv_a_proj", latent.row_dim(), Cut::whole}});
        vector(w.latent_norm, at + "kv_a_layernorm", latent.kv_rank);
        const auto by_head = [&](LinearWeights& weights, const std::string& name, int out, int in) {
            linear(weights, name, in, false, {{name, num_heads * out, Cut::q_rows}});
            weights.kind = LinearKind::by_head;
            weights.head_dim = out;
        };
        by_head(w.k_b, at + "k_b_proj", latent.kv_rank, latent.nope_dim);
        by_head(w.v_b, at + "v_b_proj", latent.v_dim, latent.kv_rank);
    };

    linear(weights_.embed_tokens, "model.embed_tokens", hidden, false,
           {{"model.embed_tokens", vocab, Cut::vocab_rows}});
    const int64_t own_size = model.per_layer_size, all_own = own_size * model.num_layers;
    if (own_size > 0) {
        linear(weights_.embed_per_layer, "model.embed_tokens_per_layer", all_own, false,
               {{"model.embed_tokens_per_layer", model.per_layer_vocab_size, Cut::vocab_rows}});
        linear(weights_.per_layer_projection, "model.per_layer_model_projection", hidden, false,
               {{"model.per_layer_model_projection", all_own, Cut::whole}}, true);
        vector(weights_.per_layer_norm, "model.per_layer_projection_norm", own_size);
    }
    weights_.layers.resize(model.num_layers);  // destinations stay where they are from here on
    for (int i = 0; i < model.num_layers; ++i) {
        LayerWeights& w = weights_.layers[i];
        of_layer = i;
        const AttentionSpec attention = model.attention_of(i);
        const int64_t q_dim = attention.q_dim(), kv_dim = attention.kv_dim(), head_dim = attention.head_dim;
        const std::string layer = concat("model.layers.", i, ".");
        if (model.pre_norms) vector(w.attention_norm, layer + "input_layernorm", hidden);
        if (model.has_state(i)) {
            const DeltaSpec& delta = model.delta;
            const std::string at = layer + "linear_attn.";
            linear(w.delta_in, at + "in_proj", hidden, false,
                   {{at + "in_proj_qkv", delta.conv_dim(), Cut::delta_qkv_rows},
                    {at + "in_proj_z", delta.v_size(), Cut::delta_v_rows},
                    {at + "in_proj_b", delta.num_v_heads, Cut::delta_v_heads},
                    {at + "in_proj_a", delta.num_v_heads, Cut::delta_v_heads}});
            w.delta_in.seam = 2;  // publishers leave b and a unquantised
            row(at + "conv1d.weight", {delta.conv_dim(), 1, delta.conv_size}, Cut::delta_qkv_rows, w.conv.loaded);
            row(at + "A_log", {delta.num_v_heads}, Cut::delta_v_heads, w.decay_rate.loaded);
            row(at + "dt_bias", {delta.num_v_heads}, Cut::delta_v_heads, w.dt_bias.loaded);
            row(at + "norm.weight", {delta.v_dim}, Cut::whole, w.delta_norm.loaded);
            linear(w.o_proj, at + "out_proj", delta.v_size(), false, {{at + "out_proj", hidden, Cut::delta_v_columns}});
        } else if (model.has_latent(i)) {
            latent_projections(w, layer + "self_attn.");
            linear(w.o_proj, layer + "self_attn.o_proj", model.mixed_dim(i), attention.out_bias,
                   {{layer + "self_attn.o_proj", hidden, Cut::q_columns}});
        } else {
            std::vector<Part> heads{{layer + "self_attn.q_proj", q_dim, Cut::q_rows}};
            if (attention.own_kv)
                heads.insert(heads.end(), {{layer + "self_attn.k_proj", kv_dim, Cut::kv_rows},
                                           {layer + "self_attn.v_proj", kv_dim, Cut::kv_rows}});
            linear(w.qkv_proj, layer + (attention.own_kv ? "self_attn.qkv_proj" : "self_attn.q_proj"), hidden,
                   attention.qkv_bias, heads);
            if (attention.qk_norm != QkNorm::none && attention.qk_norm != QkNorm::turned_heads) {
                const bool all = attention.qk_norm == QkNorm::all;
                vector(w.q_norm, layer + "self_attn.q_norm", all ? q_dim : head_dim, all ? Cut::q_rows : Cut::whole);
                if (attention.own_kv)
                    vector(w.k_norm, layer + "self_attn.k_norm", all ? kv_dim : head_dim,
                           all ? Cut::kv_rows : Cut::whole);
            }
            if (attention.output_gate)
                linear(w.gate_proj, layer + "self_attn.gate_proj", hidden, attention.qkv_bias,
                       {{layer + "self_attn.gate_proj", q_dim, Cut::q_rows}});
            if (attention.sinks) row(layer + "self_attn.sinks", {attention.num_heads}, Cut::q_heads, w.sinks.loaded);
            linear(w.o_proj, layer + "self_attn.o_proj", q_dim, attention.out_bias,
                   {{layer + "self_attn.o_proj", hidden, Cut::q_columns}});
        }
        // Where both sublayers end with a norm, it has the name that the norm before the MLP has elsewhere.
        if (model.post_norms) vector(w.attention_post_norm, layer + "post_attention_layernorm", hidden);
        if (model.pre_norms && !model.parallel_blocks)
            vector(w.mlp_norm, layer + (model.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm"),
                   hidden);
        const bool has_experts = model.layers[static_cast<size_t>(i)].experts;
        if (has_experts) experts(w, layer + "mlp.");
        if (model.has_mlp(i))
            mlp(w.gate_up_proj, w.down_proj, layer + "mlp.", model.intermediate_size_of(i), model.mlp.bias);
        if (has_experts && model.experts.beside_mlp) {
            vector(w.mlp_own_post_norm, layer + "post_feedforward_layernorm_1", hidden);
            vector(w.experts_norm, layer + "pre_feedforward_layernorm_2", hidden);
            vector(w.experts_post_norm, layer + "post_feedforward_layernorm_2", hidden);
        }
        if (model.post_norms) vector(w.mlp_post_norm, layer + "post_feedforward_layernorm", hidden);
        if (own_size > 0) {
            linear(w.per_layer_gate, layer + "per_layer_input_gate", hidden, false,
                   {{layer + "per_layer_input_gate", own_size, Cut::whole}}, true);
            linear(w.per_layer_projection, layer + "per_layer_projection", own_size, false,
                   {{layer + "per_layer_projection", hidden, Cut::whole}}, true);
            vector(w.per_layer_post_norm, layer + "post_per_layer_input_norm", hidden);
        }
        if (model.layer_scalars) row(layer + "layer_scalar", {1}, Cut::whole, w.scalar.loaded);
    }
    of_layer = -1;
    vector(weights_.norm, "model.norm", hidden);
    if (!model.tie_word_embeddings)  // else prepare() shares embed_tokens
        linear(weights_.lm_head, "lm_head", hidden, false, {{"lm_head", vocab, Cut::vocab_rows}});
}

bool Params::is_of_stage(const ParamRow& row) const {
    if (row.layer >= 0) return spec_.own_layers().contains(row.layer);
    const bool also_lm_head = spec_.tie_word_embeddings && spec_.is_last_stage();
    if (row.linear == &weights_.embed_tokens) return spec_.is_first_stage() || also_lm_head;
    return spec_.is_last_stage();
}

std::span<LayerWeights> Params::own_layers() {
    const LayerRange own = spec_.own_layers();
    return std::span(weights_.layers).subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.size()));
}

std::vector<Range> Params::ranges(const ParamRow& row) const {
    return is_of_stage(row) ? ranges(row, shard_) : std::vector<Range>();
}

std::vector<Range> Params::ranges(const ParamRow& row, Shard shard) const {
    const AttentionSpec attention = row.layer < 0 ? model_.attention : model_.attention_of(row.layer);
    const int64_t head_dim = attention.head_dim;
    const DeltaSpec& delta = model_.delta;
    const auto rows_of = [](Range heads, int64_t size) { return Range{heads.begin * size, heads.end * size}; };
    switch (row.cut) {
        case Cut::whole: break;
        case Cut::q_rows:
        case Cut::q_columns: {
            const Range heads = q_heads_of(attention, shard);
            const int64_t of_head = row.shape[is_columns(row.cut)] / attention.num_heads;
            return {{heads.begin * of_head, heads.end * of_head}};
        }
        case Cut::q_heads: return {q_heads_of(attention, shard)};
        case Cut::kv_rows: return head_ranges(kv_heads_of(attention, shard), head_dim);
        case Cut::inner_rows:
        case Cut::inner_columns: return {inner_of(row.shape[is_columns(row.cut)], shard)};
        case Cut::delta_qkv_rows: {  // q, k, v: the heads of each
            const Range k = rows_of(delta_heads_of(delta.num_k_heads, shard), delta.k_dim);
            const Range v = rows_of(delta_heads_of(delta.num_v_heads, shard), delta.v_dim);
            if (shard.size == 1) break;
            const int64_t k_size = delta.k_size();
            return {k, {k_size + k.begin, k_size + k.end}, {2 * k_size + v.begin, 2 * k_size + v.end}};
        }
        case Cut::delta_v_rows:
        case Cut::delta_v_columns: return {rows_of(delta_heads_of(delta.num_v_heads, shard), delta.v_dim)};
        case Cut::delta_v_heads: return {delta_heads_of(delta.num_v_heads, shard)};
        case Cut::vocab_rows: return {vocab_of(row.shape[0], shard)};
        case Cut::rank0:
            if (shard.rank != 0) return {};
            break;
    }
    return {{0, row.shape[0]}};
}

std::vector<int64_t> Params::part_shape(const ParamRow& row) const {
    std::vector<int64_t> shape = row.shape;
    int64_t size = 0;
    for (const Range& range : ranges(row)) size += range.size();
    shape[is_columns(row.cut)] = size;
    return shape;
}

Range Params::outputs(const ParamRow& row) const {
    Range outputs;
    for (const size_t index : row.linear->rows) {
        const ParamRow& other = rows_[index];
        if (other.shape.size() == 2 && other.part <= row.part)
            outputs = {outputs.end, outputs.end + part_shape(other)[0]};
    }
    return outputs;
}

int64_t Params::prepared_bytes(DType dtype) const {
    int64_t sum = 0;
    for (const ParamRow& row : rows_) sum += prepared_bytes(row, dtype);
    return sum;
}

int64_t Params::prepared_bytes(const ParamRow& row, DType dtype) const {
    if (!has_part(row)) return 0;
    const std::vector<int64_t> shape = part_shape(row);
    const Quantization quantization = row.linear && shape.size() == 2 ? row.linear->quantization : Quantization::none;
    const int64_t elements = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    switch (quantization) {
        case Quantization::none: break;
        case Quantization::int8:
        case Quantization::fp8: return elements + 4 * shape[0];
        case Quantization::int4: return elements / 2 + elements / 16;
    }
    return elements * size_bytes(dtype);
}

int64_t Params::column_unit(const LinearWeights& linear) const {
    int64_t unit = 0;
    for (const size_t index : linear.rows)
        if (const ParamRow& row = rows_[index]; row.shape.size() == 2 && is_columns(row.cut))
            for (int rank = 1; rank < shard_.size; ++rank)
                for (const Range& range : ranges(row, {rank, shard_.size})) unit = std::gcd(unit, range.begin);
    return unit;
}

Tensor Params::part(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const {
    std::vector<Range> wanted = ranges(row);
    if (wanted.empty()) return {};
    if (is_columns(row.cut) && blocks.bytes > 0)
        wanted[0] = {wanted[0].begin / blocks.size * blocks.bytes, wanted[0].end / blocks.size * blocks.bytes};
    if (wanted.size() == 1) return {tensor.slice(is_columns(row.cut), wanted[0].begin, wanted[0].end), tensor.owner};
    std::vector<int64_t> shape(tensor.shape().begin(), tensor.shape().end());
    shape[0] = part_shape(row)[0];
    const Tensor copy = allocate_host(tensor.dtype(), shape);  // rows, contiguous
    std::byte* out = copy.as<std::byte>();
    for (const Range& range : wanted) {
        const TensorView rows = tensor.slice(0, range.begin, range.end);
        std::memcpy(out, rows.data(), static_cast<size_t>(rows.bytes()));
        out += rows.bytes();
    }
    return copy;
}

const ParamRow* Params::find(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &rows_[found->second];
}

std::vector<std::string> Params::load(Backend& backend, const std::string& name, const Tensor& tensor,
                                      const Blocks& blocks) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) {
        const bool scales = name.ends_with(".scales");
        const auto linear = linears_by_name_.find(name.substr(0, name.rfind('.')));
        if (linear != linears_by_name_.end() && (scales || name.ends_with(".panels")))
            return keep_packed(backend, *linear->second, scales, tensor);
        throw WeightError(concat("unknown parameter '", name, "': the model has ", rows_.size(),
                                 " parameters, such as '", rows_[1 % rows_.size()].name,
                                 "'; param_shapes() lists them"));
    }
    ParamRow& row = rows_[found->second];
    check(row, tensor, blocks);
    Tensor own = part(row, tensor, blocks);
    own.read_only = tensor.read_only && own.owner == tensor.owner && blocks.type.empty();
    if (row.linear && row.shape.size() == 2) row.linear->parts[row.part].blocks = blocks;
    return keep(backend, row, std::move(own));
}

std::vector<std::string> Params::keep(Backend& backend, ParamRow& row, Tensor part) {
    if (part) bytes_ += part.bytes();
    *row.destination = std::move(part);
    row.loaded = true;
    return row.linear ? prepare_if_complete(backend, *row.linear) : std::vector<std::string>();
}

std::vector<std::string> Params::prepare_if_complete(Backend& backend, LinearWeights& linear) {
    if (linear.packed.panels || linear.packed.scales) return adopt_if_complete(backend, linear);
    for (const size_t index : linear.rows)
        if (!rows_[index].loaded) return {};
    if (is_of_stage(rows_[linear.rows[0]]))
        linear.prepared = ops::prepare_linear(backend, linear.parts, linear.kind, linear.head_dim, linear.quantization);
    std::vector<std::string> prepared;
    for (const size_t index : linear.rows) {
        const ParamRow& done = rows_[index];
        prepared.push_back(done.name);
        const bool can_unpack = backend.device().kind == DeviceKind::cpu || done.destination->device() != Device{} ||
                                linear.parts[done.part].has_blocks();
        if (done.shape.size() == 2 && !done.destination->read_only && can_unpack) *done.destination = {};
    }
    return prepared;
}

std::vector<std::string> Params::keep_packed(Backend& backend, LinearWeights& linear, bool scales,
                                             const Tensor& tensor) {
    Tensor& destination = scales ? linear.packed.scales : linear.packed.panels;
    if (destination || linear.prepared)
        throw WeightError(concat("the packed weights of '", linear.name, "' are already loaded"));
    for (const size_t index : linear.rows)
        if (const ParamRow& row = rows_[index]; row.shape.size() == 2 && row.loaded)
            throw WeightError(concat("parameter '", row.name, "' is already loaded"));
    destination = tensor;
    try {
        return adopt_if_complete(backend, linear);
    } catch (...) {
        destination = {};
        throw;
    }
}

std::vector<std::string> Params::adopt_if_complete(Backend& backend, LinearWeights& linear) {
    const Tensor panels = linear.packed.panels, scales = linear.packed.scales;
    const bool quantised = panels && !is_floating(panels.dtype());
    if (!panels || (quantised && !scales)) return {};
    for (const size_t index : linear.rows)
        if (rows_[index].shape.size() == 1 && !rows_[index].loaded) return {};
    try {
        for (int rank = 0; rank < shard_.size; ++rank)  // of all ranks, so that all refuse alike
            backend.check_packed(packed_source(linear, {rank, shard_.size}));
        if (is_of_stage(rows_[linear.rows[0]])) linear.prepared = backend.adopt_linear(packed_source(linear, shard_));
    } catch (const WeightError& error) {
        throw WeightError(concat("'", linear.name, "': ", error.what()));
    }
    linear.packed = {};
    for (const size_t index : linear.rows) rows_[index].loaded = true;
    const PackedTensors own = linear.prepared ? linear.prepared->tensors() : PackedTensors();
    if (own.panels) bytes_ += own.panels.bytes() + (own.scales ? own.scales.bytes() : 0);
    std::vector<std::string> copied;
    if (own.panels.owner != panels.owner) copied.push_back(linear.name + ".panels");
    if (scales && own.scales.owner != scales.owner) copied.push_back(linear.name + ".scales");
    return copied;
}

PackedSource Params::packed_source(const LinearWeights& linear, Shard shard) const {
    PackedSource source{.tensors = linear.packed, .kind = linear.kind, .head_dim = linear.head_dim};
    for (const size_t index : linear.rows) {
        const ParamRow& row = rows_[index];
        if (row.shape.size() == 1) {
            source.parts[row.part].bias = *row.destination;
            continue;
        }
        const Range outputs{0, row.shape[0]}, inputs{0, row.shape[1]};
        const bool columns = is_columns(row.cut);
        source.in_features = row.shape[1];
        source.columns = columns ? ranges(row, shard)[0] : inputs;
        source.parts.push_back(
            {.out_features = row.shape[0], .rows = columns ? std::vector{outputs} : ranges(row, shard), .bias = {}});
    }
    return source;
}

std::vector<std::pair<std::string, Tensor>> Params::take_packed() {
    std::vector<std::pair<std::string, Tensor>> taken;
    for (LinearWeights* linear : linears_) {
        if (!linear->prepared) continue;
        const PackedTensors tensors = linear->prepared->tensors();
        if (!tensors.panels) continue;
        taken.emplace_back(linear->name + ".panels", tensors.panels);
        if (tensors.scales) taken.emplace_back(linear->name + ".scales", tensors.scales);
        linear->prepared = {};
        for (const size_t index : linear->rows) *rows_[index].destination = {}, rows_[index].loaded = false;
    }
    return taken;
}

void Params::load_dummy(Backend& backend, DType dtype, uint64_t seed) {
    for (ParamRow& row : rows_) {
        if (ranges(row).empty()) {
            keep(backend, row, {});
            continue;
        }
        Tensor part = backend.allocate(dtype, part_shape(row));
        const bool is_norm = row.shape.size() == 1 && row.name.find("norm") != std::string::npos;
        if (is_norm || row.name.ends_with("scale") || row.name.ends_with("layer_scalar"))
            backend.copy(ones_like(part), part);
        else
            backend.fill_random(part, seed + std::hash<std::string>{}(row.name) + static_cast<uint64_t>(shard_.rank));
        keep(backend, row, std::move(part));
    }
}

Tensor Params::stored(Backend& backend, const ParamRow& row) const {
    if (*row.destination || !row.linear || !row.linear->prepared || row.shape.size() != 2 || !has_part(row))
        return *row.destination;
    return backend.unpack_linear(*row.linear->prepared, row.part);
}

void Params::check(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const {
    if (row.loaded || (row.linear && row.linear->packed.panels && row.shape.size() == 2))
        throw WeightError(concat("parameter '", row.name, "' is already loaded"));
    std::vector<int64_t> shape = row.shape;
    if (!blocks.type.empty()) {
        if (!row.linear || shape.size() != 2)
            throw WeightError(concat("parameter '", row.name, "': only weights of linears are kept in blocks"));
        if (shape[1] % blocks.size != 0 || column_unit(*row.linear) % blocks.size != 0)
            throw WeightError(concat("parameter '", row.name, "': ", shape[1], " columns of ", shard_.size,
                                     " ranks are not cut at multiples of the ", blocks.size, " weights of a block of ",
                                     blocks.type));
        shape[1] = shape[1] / blocks.size * blocks.bytes;
    }
    if (!std::ranges::equal(tensor.shape(), shape))
        throw WeightError(concat("parameter '", row.name, "': expected shape ", shape_string(shape), ", got ",
                                 shape_string(tensor.shape())));
    if (!blocks.type.empty() ? tensor.dtype() != DType::uint8 : !is_floating(tensor.dtype()))
        throw WeightError(concat("parameter '", row.name, "': expected ",
                                 blocks.type.empty() ? "float32, bfloat16 or float16" : "uint8", ", got ",
                                 infinilm::name(tensor.dtype())));
    if (!tensor.is_contiguous())
        throw WeightError(concat("parameter '", row.name, "': expected a contiguous tensor; pass a contiguous copy"));
}

std::vector<std::string> Params::names_of_stage() const {
    std::vector<std::string> names;
    for (const ParamRow& row : rows_)
        if (is_of_stage(row)) names.push_back(row.name);
    for (const LinearWeights* linear : linears_)
        if (is_of_stage(rows_[linear->rows[0]]))
            for (const char* const part : {".panels", ".scales"}) names.push_back(linear->name + part);
    return names;
}

void Params::skip_other_stages(Backend& backend) {
    for (ParamRow& row : rows_)
        if (!is_of_stage(row)) keep(backend, row, {});
}

std::vector<std::string> Params::missing() const {
    std::vector<std::string> out;
    for (const ParamRow& row : rows_)
        if (!row.loaded) out.push_back(row.name);
    return out;
}

void Params::check_complete() const {
    if (const auto names = missing(); !names.empty()) {
        std::string list = names[0];
        for (size_t i = 1; i < std::min<size_t>(names.size(), 8); ++i) list += ", " + names[i];
        throw WeightError(concat(names.size(), " of ", rows_.size(), " parameters are not loaded: ", list,
                                 names.size() > 8 ? ", ..." : ""));
    }
}

void Params::prepare(Backend& backend) {
    check_complete();
    auto prepare_vector = [&](VectorWeights& w, float multiplier) {
        w.prepared = backend.prepare_vector(norm_weight(backend, spec_, w, multiplier));
    };
    for (LayerWeights& layer : own_layers()) layer.for_norms([&](VectorWeights& w) { prepare_vector(w, 1); });
    prepare_vector(weights_.norm, spec_.logit_multiplier);  // lm_head is linear
    prepare_vector(weights_.per_layer_norm, per_layer_half);
    const auto prepare_wide = [&](VectorWeights& vector, float multiplier) {
        if (!vector.loaded) return;
        const Tensor wide = allocate_host(DType::float32, vector.loaded.shape());
        fill_from(backend, vector.loaded, 0, multiplier, wide);
        vector.prepared = backend.prepare_vector(wide);
    };
    for (LayerWeights& layer : own_layers()) {
        for (VectorWeights* vector : {&layer.sinks, &layer.router_correction, &layer.expert_scales})
            prepare_wide(*vector, 1);
        prepare_wide(layer.router_norm, 1 / std::sqrt(static_cast<float>(spec_.hidden_size)));
        if (spec_.attention.v_norm && layer.k_norm.prepared)
            layer.v_norm.prepared = backend.prepare_vector(ones_like(layer.k_norm.prepared));
        const auto number = static_cast<size_t>(&layer - weights_.layers.data());
        if (spec_.attention.qk_norm == QkNorm::turned_heads && spec_.layers[number].rope >= 0) {
            const Tensor ones = allocate_host(DType::float32, {spec_.attention.head_dim});
            layer.q_norm.prepared = layer.k_norm.prepared = backend.prepare_vector(ones_like(ones));
        }
        if (layer.scalar.loaded) {
            const Tensor number = allocate_host(DType::float32, {1});
            fill_from(backend, layer.scalar.loaded, 0, 1, number);
            layer.scale = *number.as<const float>();
        }
        if (layer.conv.loaded) prepare_delta(backend, layer);
    }
    const auto prepared = [](const std::vector<LinearWeights>& linears) {
        Backend::SharedLinears out;
        for (const LinearWeights& linear : linears) out.push_back(linear.prepared);
        return out;
    };
    for (LayerWeights& layer : own_layers())
        if (!layer.experts_down.empty())
            layer.experts =
                ops::prepare_experts(backend, prepared(layer.experts_gate_up), prepared(layer.experts_down));
    if (spec_.tie_word_embeddings) weights_.lm_head.prepared = weights_.embed_tokens.prepared;
    prepared_ = true;
    // Dummy vectors made on a device: the prepared form is enough.
    for (const ParamRow& row : rows_)
        if (row.destination->device().kind != DeviceKind::cpu) *row.destination = {};
}

void Params::clear() {
    for (ParamRow& row : rows_) {
        *row.destination = {};
        row.loaded = false;
    }
    bytes_ = 0;
    for (LinearWeights* linear : linears_) linear->packed = {}, linear->prepared = {};
    weights_.lm_head.prepared = {};  // where it is tied, it is none of them
    auto drop = [](VectorWeights& w) { w.prepared = {}; };
    for (LayerWeights& layer : weights_.layers) {
        layer.for_norms(drop);
        for (VectorWeights* own : {&layer.sinks, &layer.router_correction, &layer.router_norm, &layer.expert_scales,
                                   &layer.v_norm, &layer.conv, &layer.decay_rate, &layer.dt_bias, &layer.delta_norm})
            drop(*own);
        layer.experts = {};
    }
    drop(weights_.norm);
    drop(weights_.per_layer_norm);
    prepared_ = false;
}

}  // namespace infinilm
