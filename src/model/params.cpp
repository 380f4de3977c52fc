#include "model/params.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "model/prepare_vectors.h"
#include "ops/host_experts.h"
#include "ops/ops.h"

namespace infinilm {

Params::Params(const ModelSpec& model, Shard shard)
    : whole_(model), shard_(shard), model_(local_spec(model, shard)), table_(whole_) {
    model_.declare(table_);
    loaded_.resize(rows().size());
    for (const LinearEntry& linear : linears())
        loading_.push_back({.parts = std::vector<LinearPart>(rows()[linear.rows.back()].part + 1), .packed = {}});
}

Tensor& Params::destination(const ParamRow& row) {
    if (row.vector) return row.is_bias ? row.vector->bias : row.vector->loaded;
    LinearPart& part = loading(*row.linear).parts[row.part];
    return row.is_bias ? part.bias : part.weight;
}

bool Params::is_of_stage(const ParamRow& row) const {
    if (row.layer >= 0) return spec().own_layers_and_head().contains(row.layer);
    const bool also_last = (spec().tie_word_embeddings || spec().mtp) && spec().is_last_stage();
    if (row.linear && row.linear->weights == &model_.embed_tokens) return spec().is_first_stage() || also_last;
    return row.vector == &model_.embedding_norm ? spec().is_first_stage() : spec().is_last_stage();
}

std::vector<Range> Params::ranges(const ParamRow& row) const {
    return is_of_stage(row) ? ranges(row, shard_) : std::vector<Range>();
}

std::vector<Range> Params::ranges(const ParamRow& row, Shard shard) const {
    return row.cut.of(row.shape[row.cut.is_columns()], shard);
}

std::vector<int64_t> Params::part_shape(const ParamRow& row) const {
    std::vector<int64_t> shape = row.shape;
    int64_t size = 0;
    for (const Range& range : ranges(row)) size += range.size();
    shape[row.cut.is_columns()] = size;
    return shape;
}

Range Params::outputs(const ParamRow& row) const {
    Range outputs;
    for (const size_t index : row.linear->rows) {
        const ParamRow& other = rows()[index];
        if (other.shape.size() == 2 && other.part <= row.part)
            outputs = {outputs.end, outputs.end + part_shape(other)[0]};
    }
    return outputs;
}

int64_t Params::prepared_bytes(DType dtype) const {
    int64_t sum = 0;
    for (const ParamRow& row : rows()) sum += prepared_bytes(row, dtype);
    return sum;
}

int64_t Params::prepared_bytes(const ParamRow& row, DType dtype) const {
    if (!has_part(row)) return 0;
    const std::vector<int64_t> shape = part_shape(row);
    const Quantization quantization = row.linear && !row.is_bias ? row.linear->quantization : Quantization::none;
    const int64_t elements = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    switch (quantization) {
        case Quantization::none: break;
        case Quantization::int8:
        case Quantization::fp8: return elements + 4 * shape[0];
        case Quantization::int4: return elements / 2 + elements / 16;
    }
    return elements * size_bytes(dtype);
}

int64_t Params::column_unit(const LinearEntry& linear) const {
    int64_t unit = 0;
    for (const size_t index : linear.rows)
        if (const ParamRow& row = rows()[index]; row.shape.size() == 2 && row.cut.is_columns())
            for (int rank = 1; rank < shard_.size; ++rank)
                for (const Range& range : ranges(row, {rank, shard_.size})) unit = std::gcd(unit, range.begin);
    return unit;
}

Tensor Params::part(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const {
    std::vector<Range> wanted = ranges(row);
    if (wanted.empty()) return {};
    if (row.cut.is_columns() && blocks.bytes > 0)
        wanted[0] = {wanted[0].begin / blocks.size * blocks.bytes, wanted[0].end / blocks.size * blocks.bytes};
    if (wanted.size() == 1) return {tensor.slice(row.cut.is_columns(), wanted[0].begin, wanted[0].end), tensor.owner};
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

const ParamRow& Params::known(const std::string& name) const {
    if (const ParamRow* const row = find(name)) return *row;
    throw WeightError(concat("unknown parameter '", name, "': the model has ", rows().size(), " parameters, such as '",
                             rows()[1 % rows().size()].name, "'; param_shapes() lists them"));
}

void Params::check_update(const NamedTensors& tensors) const {
    check_complete();
    std::vector<bool> named(rows().size());
    for (const auto& [name, tensor] : tensors) {
        const ParamRow& row = known(name);
        if (named[index(row)]) throw WeightError(concat("parameter '", name, "' is named twice"));
        named[index(row)] = true;
        check_form(row, tensor, {});
    }
    for (const LinearEntry& linear : linears()) {
        const auto is_named = [&](size_t row) { return static_cast<bool>(named[row]); };
        if (linear.quantization == Quantization::none || std::ranges::none_of(linear.rows, is_named)) continue;
        for (const size_t row : linear.rows)  // a bias is kept as it was
            if (!named[row] && !rows()[row].is_bias)
                throw WeightError(concat("parameter '", rows()[row].name,
                                         "' must be named, too: it is kept in few bits together with others that are"));
    }
}

void Params::update(Backend& backend, const NamedTensors& tensors) {
    std::vector<bool> named(rows().size());
    for (const auto& [name, tensor] : tensors) named[index(known(name))] = true;
    for (const LinearEntry& linear : linears()) {
        const auto is_named = [&](size_t row) { return static_cast<bool>(named[row]); };
        if (std::ranges::none_of(linear.rows, is_named)) continue;
        for (const size_t row : linear.rows)
            if (!named[row]) destination(rows()[row]) = stored(backend, rows()[row]);
    }
    for (const auto& [name, tensor] : tensors) {
        const ParamRow& row = known(name);
        if (row.linear) loaded_[index(row)] = false;
        if (row.linear) row.linear->weights->prepared = {};
    }
    for (const auto& [name, tensor] : tensors) {
        const ParamRow& row = known(name);
        Tensor own = part(row, tensor);
        own.read_only = false;
        if (row.linear && !row.is_bias) loading(*row.linear).parts[row.part].blocks = {};
        bytes_ -= destination(row) ? destination(row).bytes() : 0;
        keep(backend, row, std::move(own));
    }
    prepared_ = false;
}

std::vector<std::string> Params::load(Backend& backend, const std::string& name, const Tensor& tensor,
                                      const Blocks& blocks) {
    const ParamRow* const found = find(name);
    if (!found) {
        const bool scales = name.ends_with(".scales");
        const LinearEntry* const linear = table_.find_linear(name.substr(0, name.rfind('.')));
        if (linear && (scales || name.ends_with(".panels"))) return keep_packed(backend, *linear, scales, tensor);
    }
    const ParamRow& row = known(name);
    check(row, tensor, blocks);
    Tensor own = part(row, tensor, blocks);
    own.read_only = tensor.read_only && own.owner == tensor.owner && blocks.type.empty();
    if (row.linear && !row.is_bias) loading(*row.linear).parts[row.part].blocks = blocks;
    return keep(backend, row, std::move(own));
}

std::vector<std::string> Params::keep(Backend& backend, const ParamRow& row, Tensor part) {
    if (part) bytes_ += part.bytes();
    destination(row) = std::move(part);
    loaded_[index(row)] = true;
    return row.linear ? prepare_if_complete(backend, *row.linear) : std::vector<std::string>();
}

std::vector<std::string> Params::prepare_if_complete(Backend& backend, const LinearEntry& linear) {
    const Loading& own = loading(linear);
    Backend& keeper = keeper_of(backend, linear.on_host);
    if (own.packed.panels || own.packed.scales) return adopt_if_complete(backend, linear);
    for (const size_t index : linear.rows)
        if (!loaded_[index]) return {};
    try {
        if (is_of_stage(rows()[linear.rows[0]]))
            linear.weights->prepared =
                ops::prepare_linear(keeper, own.parts, linear.kind, linear.head_dim, linear.quantization);
    } catch (const WeightError& error) {
        throw WeightError(concat("'", linear.name, "': ", error.what()));
    }
    std::vector<std::string> prepared;
    for (const size_t index : linear.rows) {
        const ParamRow& done = rows()[index];
        prepared.push_back(done.name);
        Tensor& tensor = destination(done);
        const bool can_unpack =
            keeper.device().kind == DeviceKind::cpu || tensor.device() != Device{} || own.parts[done.part].has_blocks();
        if (!done.is_bias && !tensor.read_only && can_unpack) tensor = {};
    }
    return prepared;
}

std::vector<std::string> Params::keep_packed(Backend& backend, const LinearEntry& linear, bool scales,
                                             const Tensor& tensor) {
    PackedTensors& packed = loading(linear).packed;
    Tensor& destination = scales ? packed.scales : packed.panels;
    if (destination || linear.weights->prepared)
        throw WeightError(concat("the packed weights of '", linear.name, "' are already loaded"));
    for (const size_t index : linear.rows)
        if (const ParamRow& row = rows()[index]; !row.is_bias && loaded_[index])
            throw WeightError(concat("parameter '", row.name, "' is already loaded"));
    destination = tensor;
    try {
        return adopt_if_complete(backend, linear);
    } catch (...) {
        destination = {};
        throw;
    }
}

std::vector<std::string> Params::adopt_if_complete(Backend& backend, const LinearEntry& linear) {
    const Tensor panels = loading(linear).packed.panels, scales = loading(linear).packed.scales;
    const bool quantised = panels && !is_floating(panels.dtype());
    if (!panels || (quantised && !scales)) return {};
    for (const size_t index : linear.rows)
        if (rows()[index].is_bias && !loaded_[index]) return {};
    try {
        for (int rank = 0; rank < shard_.size; ++rank)  // of all ranks, so that all refuse alike
            backend.check_packed(packed_source(linear, {rank, shard_.size}));
        if (is_of_stage(rows()[linear.rows[0]]))
            linear.weights->prepared = backend.adopt_linear(packed_source(linear, shard_));
    } catch (const WeightError& error) {
        throw WeightError(concat("'", linear.name, "': ", error.what()));
    }
    loading(linear).packed = {};
    for (const size_t index : linear.rows) loaded_[index] = true;
    const auto& prepared = linear.weights->prepared;
    const PackedTensors own = prepared ? prepared->tensors() : PackedTensors();
    if (own.panels) bytes_ += own.panels.bytes() + (own.scales ? own.scales.bytes() : 0);
    std::vector<std::string> copied;
    if (own.panels.owner != panels.owner) copied.push_back(linear.name + ".panels");
    if (scales && own.scales.owner != scales.owner) copied.push_back(linear.name + ".scales");
    return copied;
}

PackedSource Params::packed_source(const LinearEntry& linear, Shard shard) const {
    PackedSource source{.tensors = loading(linear).packed, .kind = linear.kind, .head_dim = linear.head_dim};
    for (const size_t index : linear.rows) {
        const ParamRow& row = rows()[index];
        if (row.is_bias) {
            source.parts[row.part].bias = destination(row);
            continue;
        }
        const Range outputs{0, row.shape[0]}, inputs{0, row.shape[1]};
        const bool columns = row.cut.is_columns();
        source.in_features = row.shape[1];
        source.columns = columns ? ranges(row, shard)[0] : inputs;
        source.parts.push_back(
            {.out_features = row.shape[0], .rows = columns ? std::vector{outputs} : ranges(row, shard), .bias = {}});
    }
    return source;
}

std::vector<std::pair<std::string, Tensor>> Params::take_packed() {
    std::vector<std::pair<std::string, Tensor>> taken;
    for (const LinearEntry& linear : linears()) {
        std::shared_ptr<PreparedLinear>& prepared = linear.weights->prepared;
        if (!prepared) continue;
        const PackedTensors tensors = prepared->tensors();
        if (!tensors.panels) continue;
        taken.emplace_back(linear.name + ".panels", tensors.panels);
        if (tensors.scales) taken.emplace_back(linear.name + ".scales", tensors.scales);
        prepared = {};
        for (const size_t index : linear.rows) destination(rows()[index]) = {}, loaded_[index] = false;
    }
    return taken;
}

void Params::load_dummy(Backend& backend, DType dtype, uint64_t seed) {
    for (const ParamRow& row : rows()) {
        if (ranges(row).empty()) {
            keep(backend, row, {});
            continue;
        }
        Backend& keeper = keeper_of(backend, row.linear && row.linear->on_host);
        Tensor part = keeper.allocate(dtype, part_shape(row));
        const bool is_norm = row.shape.size() == 1 && row.name.find("norm") != std::string::npos;
        if (is_norm || row.name.ends_with("scale") || row.name.ends_with("layer_scalar"))
            backend.copy(ones_like(part), part);
        else
            keeper.fill_random(part, seed + std::hash<std::string>{}(row.name) + static_cast<uint64_t>(shard_.rank));
        keep(backend, row, std::move(part));
    }
}

Tensor Params::stored(Backend& backend, const ParamRow& row) const {
    const Tensor& kept = destination(row);
    if (kept || !row.linear || !row.linear->weights->prepared || row.is_bias || !has_part(row)) return kept;
    return keeper_of(backend, row.linear->on_host).unpack_linear(*row.linear->weights->prepared, row.part);
}

void Params::check(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const {
    if (loaded(row) || (row.linear && loading(*row.linear).packed.panels && !row.is_bias))
        throw WeightError(concat("parameter '", row.name, "' is already loaded"));
    check_form(row, tensor, blocks);
}

void Params::check_form(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const {
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
    for (const ParamRow& row : rows())
        if (is_of_stage(row)) names.push_back(row.name);
    for (const LinearEntry& linear : linears())
        if (is_of_stage(rows()[linear.rows[0]]))
            for (const char* const part : {".panels", ".scales"}) names.push_back(linear.name + part);
    return names;
}

void Params::skip_other_stages(Backend& backend) {
    for (const ParamRow& row : rows())
        if (!is_of_stage(row)) keep(backend, row, {});
}

std::vector<std::string> Params::missing() const {
    std::vector<std::string> out;
    for (const ParamRow& row : rows())
        if (!loaded(row)) out.push_back(row.name);
    return out;
}

void Params::check_complete() const {
    if (const auto names = missing(); !names.empty()) {
        std::string list = names[0];
        for (size_t i = 1; i < std::min<size_t>(names.size(), 8); ++i) list += ", " + names[i];
        throw WeightError(concat(names.size(), " of ", rows().size(), " parameters are not loaded: ", list,
                                 names.size() > 8 ? ", ..." : ""));
    }
}

void Params::prepare(Backend& backend) {
    check_complete();
    for (const auto& [vector, layer] : table_.vectors()) {
        if (layer >= 0 && !spec().own_layers_and_head().contains(layer)) continue;
        if (const Tensor made = vector->make(backend, *vector)) vector->prepared = backend.prepare_vector(made);
    }
    model_.prepare(backend);
    prepared_ = true;
    // Dummy vectors made on a device: the prepared form is enough.
    for (const ParamRow& row : rows())
        if (destination(row).device().kind != DeviceKind::cpu) destination(row) = {};
}

void Params::clear() {
    for (const ParamRow& row : rows()) destination(row) = {}, loaded_[index(row)] = false;
    bytes_ = 0;
    for (const LinearEntry& linear : linears()) loading(linear).packed = {}, linear.weights->prepared = {};
    for (const auto& [vector, layer] : table_.vectors()) vector->prepared = {};
    model_.clear();
    prepared_ = false;
}

}  // namespace infinilm
