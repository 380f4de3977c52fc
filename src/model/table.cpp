#include "model/table.h"

#include "model/prepare_vectors.h"

namespace infinilm {

void ParamTable::add(ParamRow row) {
    by_name_[row.name] = rows_.size();
    row.layer = layer_;
    rows_.push_back(std::move(row));
}

void ParamTable::linear(LinearWeights& weights, const Linear& linear) {
    const bool of_head = layer_ >= model_.num_layers;
    Quantization quantization = !linear.quantised ? Quantization::none
                                : of_head         ? model_.mtp->quantization
                                                  : model_.quantization;
    if (linear.vocabulary && quantization == Quantization::int4) quantization = Quantization::int8;
    LinearEntry& entry = linears_.emplace_back(LinearEntry{.name = linear.name,
                                                           .kind = linear.kind,
                                                           .head_dim = linear.head_dim,
                                                           .quantization = quantization,
                                                           .adaptable = linear.adaptable && !linear.vocabulary,
                                                           .on_host = linear.on_host,
                                                           .timed = linear.timed,
                                                           .rows = {},
                                                           .index = linears_.size(),
                                                           .weights = &weights});
    linears_by_name_[entry.name] = &entry;
    weights.first_row = rows_.size();
    for (size_t i = 0; i < linear.parts.size(); ++i) {
        const auto& [name, out_features, cut] = linear.parts[i];
        const auto add_part = [&](const char* suffix, std::vector<int64_t> shape, const Cut& of_rank, bool is_bias) {
            entry.rows.push_back(rows_.size());
            add({.name = name + suffix,
                 .shape = std::move(shape),
                 .cut = of_rank,
                 .linear = &entry,
                 .part = i,
                 .is_bias = is_bias});
        };
        add_part(".weight", {out_features, linear.in_features}, cut, false);
        if (linear.bias) add_part(".bias", {out_features}, cut.is_columns() ? Cut::rank0() : cut, true);
    }
    weights.end_row = rows_.size();
    if (model_.clipped_linears && layer_ >= 0) clips(weights, linear);
}

void ParamTable::clips(LinearWeights& weights, const Linear& linear) {
    weights.clips.resize(linear.parts.size());
    for (size_t i = 0; i < linear.parts.size(); ++i) {
        Clip& own = weights.clips[i];
        own.outputs = linear.parts[i].out_features;
        float* const bounds[] = {&own.input.low, &own.input.high, &own.output.low, &own.output.high};
        const char* const names[] = {"input_min", "input_max", "output_min", "output_max"};
        for (size_t j = 0; j < std::size(names); ++j)
            tensor(own.loaded[j], concat(linear.parts[i].name, "_clip.", names[j]), {1}, {},
                   [to = bounds[j]](Backend& backend, const VectorWeights& bound) {
                       *to = *widened(backend, bound.loaded).as<const float>();
                       return Tensor();
                   });
    }
}

void ParamTable::norm(VectorWeights& weights, const std::string& name, int64_t size, Cut cut, float multiplier) {
    norm(weights, name, size, NormForm{model_.norm, model_.norm_offset, model_.norm_weights}, std::move(cut),
         multiplier);
}

void ParamTable::norm(VectorWeights& weights, const std::string& name, int64_t size, NormForm form, Cut cut,
                      float multiplier) {
    if (!form.weighted)
        return made(weights, [form, size, multiplier](Backend& backend, const VectorWeights&) {
            const VectorWeights ones{
                .loaded = ones_like(allocate_host(DType::float32, {size})), .bias = {}, .prepared = {}};
            return norm_weight(backend, form, ones, multiplier);
        });
    tensor(weights, name + ".weight", {size}, std::move(cut),
           [form, multiplier](Backend& backend, const VectorWeights& norm) {
               return norm_weight(backend, form, norm, multiplier);
           });
    if (form.kind == NormKind::layer_bias)
        add({.name = name + ".bias", .shape = {size}, .cut = {}, .vector = &weights, .is_bias = true});
}

void ParamTable::wide(VectorWeights& weights, const std::string& name, int64_t size, Cut cut, float multiplier) {
    tensor(weights, name, {size}, std::move(cut), [multiplier](Backend& backend, const VectorWeights& vector) {
        return widened(backend, vector.loaded, multiplier);
    });
}

void ParamTable::tensor(VectorWeights& weights, const std::string& name, std::vector<int64_t> shape, Cut cut,
                        std::function<Tensor(Backend&, const VectorWeights&)> make) {
    made(weights, [make = std::move(make)](Backend& backend, const VectorWeights& vector) {
        return vector.loaded ? make(backend, vector) : Tensor();
    });
    add({.name = name, .shape = std::move(shape), .cut = std::move(cut), .vector = &weights});
}

void ParamTable::made(VectorWeights& weights, std::function<Tensor(Backend&, const VectorWeights&)> make) {
    weights.make = std::move(make);
    vectors_.emplace_back(&weights, layer_);
}

const ParamRow* ParamTable::find(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &rows_[found->second];
}

const LinearEntry* ParamTable::find_linear(const std::string& name) const {
    const auto found = linears_by_name_.find(name);
    return found == linears_by_name_.end() ? nullptr : found->second;
}

}  // namespace infinilm
