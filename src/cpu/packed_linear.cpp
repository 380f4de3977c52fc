#include "cpu/packed_linear.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace infinilm::cpu {

namespace {

Format format_of(std::span<const LinearPart> parts, Quantization quantization) {
    if (quantization == Quantization::int8) return Format::int8;
    if (quantization == Quantization::int4) return Format::int4;
    const DType dtype = parts[0].weight.dtype();
    for (const LinearPart& part : parts)
        if (part.weight.dtype() != dtype) return Format::f32;
    switch (dtype) {
        case DType::bfloat16: return Format::bf16;
        case DType::float16: return Format::f16;
        default: return Format::f32;
    }
}

// The one that tensors of these dtypes have, of those with panels of this dtype the first one otherwise.
std::optional<Format> format_of_tensors(const PackedTensors& tensors) {
    std::optional<Format> found;
    for (const Format format :
         {Format::f32, Format::bf16, Format::f16, Format::int8, Format::int4, Format::q8_0, Format::q4_0}) {
        const PackedShapes shapes = packed_shapes(format, LinearKind::plain, 0, 0);
        if (shapes.panels.dtype != tensors.panels.dtype()) continue;
        if (!found || (tensors.scales && shapes.scales.dtype == tensors.scales.dtype())) found = format;
    }
    return found;
}

int64_t panels_of(int64_t rows) { return (rows + panel_outputs - 1) / panel_outputs; }
int64_t panels_of(LinearKind kind, int64_t out_features) {
    const int64_t panels = panels_of(out_features);
    return kind == LinearKind::act_mul ? 2 * panels : (panels + 1) / 2 * 2;
}

// What a rank has of a packed linear: panels, in this order, and of them groups of 32 k.
struct PackedCut {
    std::vector<Range> panels;
    Range groups;
};

PackedCut cut_of(const PackedSource& source) {
    const bool pairs = source.kind == LinearKind::act_mul;
    std::vector<Range> rows;  // of the parts joined, or of gate, which are those of up
    int64_t before = 0;
    for (const PackedSource::Part& part : source.parts) {
        for (const Range& range : part.rows) {
            if (range.size() == 0) continue;
            if (!rows.empty() && rows.back().end == before + range.begin)
                rows.back().end = before + range.end;
            else
                rows.push_back({before + range.begin, before + range.end});
        }
        if (pairs) break;
        before += part.out_features;
    }
    PackedCut cut;
    const auto& [begin, end] = source.columns;
    bool fits = begin % group_size == 0 && (end % group_size == 0 || end == source.in_features);
    for (size_t i = 0; i < rows.size(); ++i) {
        fits = fits && rows[i].begin % panel_outputs == 0 && (i + 1 == rows.size() || rows[i].end % panel_outputs == 0);
        const int64_t turns = pairs ? 2 : 1;
        cut.panels.push_back({turns * (rows[i].begin / panel_outputs), turns * panels_of(rows[i].end)});
    }
    if (!fits)
        throw WeightError(
            concat("packed weights are cut for ranks at multiples of ", panel_outputs, " outputs and ", group_size,
                   " inputs, which do not fit these ranks; use another tensor_parallel_size, or the checkpoint that "
                   "the weights were packed from"));
    cut.groups = {begin / group_size, begin / group_size + num_groups(end - begin)};
    return cut;
}

// The rank's panels of a tensor, filled up with panels that nobody reads to the shape that it has then; in the memory
// of the whole where they are one piece of it.
Tensor cut_out(const Tensor& whole, const PackedCut& cut, const PackedShape& shape, bool has_groups, int64_t groups) {
    if (shape.shape.empty()) return {};
    const int64_t lines = has_groups ? whole.shape(1) / groups : 0;  // of a group
    const bool all_groups = !has_groups || cut.groups.size() == groups;
    if (cut.panels.size() == 1 && all_groups && cut.panels[0].begin + shape.shape[0] <= whole.shape(0)) {
        Tensor piece{whole.slice(0, cut.panels[0].begin, cut.panels[0].begin + shape.shape[0]), whole.owner};
        piece.read_only = whole.read_only;
        if (reinterpret_cast<uintptr_t>(piece.data()) % line_bytes == 0) return piece;
    }
    Tensor out = allocate_packed(shape);
    int64_t to = 0;
    for (const Range& range : cut.panels)
        for (int64_t panel = range.begin; panel < range.end; ++panel, ++to) {
            TensorView piece = whole.select(0, panel);
            if (has_groups) piece = piece.slice(0, cut.groups.begin * lines, cut.groups.end * lines);
            std::memcpy(out.select(0, to).data(), piece.data(), static_cast<size_t>(piece.bytes()));
        }
    return out;
}

void check_shape(const char* name, const TensorView& tensor, const PackedShape& expected) {
    if (expected.shape.empty() && !tensor) return;
    const bool fits = tensor && !expected.shape.empty() && tensor.dtype() == expected.dtype && tensor.is_contiguous() &&
                      std::ranges::equal(tensor.shape(), expected.shape);
    if (fits) return;
    const auto describe = [](DType dtype, std::span<const int64_t> shape) {
        return concat(infinilm::name(dtype), " ", shape_string(shape));
    };
    throw WeightError(concat("packed ", name, ": expected ",
                             expected.shape.empty() ? "none" : describe(expected.dtype, expected.shape), ", got ",
                             tensor ? describe(tensor.dtype(), tensor.shape()) : "none"));
}

// Checks the tensors against the whole linear, and returns their format.
Format checked_format(const PackedSource& source) {
    const std::optional<Format> format = format_of_tensors(source.tensors);
    if (!format)
        throw WeightError(concat("packed panels: expected float32, bfloat16, float16, int8 or uint8 (int4), got ",
                                 name(source.tensors.panels.dtype())));
    int64_t out_features = 0;
    for (const PackedSource::Part& part : source.parts) {
        out_features += part.out_features;
        if (source.kind == LinearKind::act_mul) break;
    }
    const PackedShapes shapes = packed_shapes(*format, source.kind, out_features, source.in_features);
    check_shape("panels", source.tensors.panels, shapes.panels);
    check_shape("scales", source.tensors.scales, shapes.scales);
    return *format;
}

}  // namespace

Element element(DType dtype) {
    switch (dtype) {
        case DType::bfloat16: return Element::bf16;
        case DType::float16: return Element::f16;
        case DType::int8: return Element::int8;
        default: return Element::f32;
    }
}

PackedShapes packed_shapes(Format format, LinearKind kind, int64_t out_features, int64_t in_features) {
    const int64_t panels = panels_of(kind, out_features), groups = num_groups(in_features);
    const int64_t lines = groups * (group_size / k_per_line(format));
    switch (format) {
        case Format::bf16: return {{DType::bfloat16, {panels, lines, panel_outputs, 2}}, {}};
        case Format::f16: return {{DType::float16, {panels, lines, 2, panel_outputs}}, {}};
        case Format::int8:
            return {{DType::int8, {panels, lines, panel_outputs, 4}}, {DType::float32, {panels, panel_outputs}}};
        case Format::int4:
            return {{DType::uint8, {panels, lines, panel_outputs, 4}},
                    {DType::bfloat16, {panels, groups, panel_outputs}}};
        case Format::q8_0:
            return {{DType::int8, {panels, lines, panel_outputs, 4}},
                    {DType::float16, {panels, groups, panel_outputs}}};
        case Format::q4_0:
            return {{DType::uint8, {panels, lines, panel_outputs, 4}},
                    {DType::float16, {panels, groups, panel_outputs}}};
        default: return {{DType::float32, {panels, lines, panel_outputs}}, {}};
    }
}

// Most of the time that packing takes is spent on the page faults of small pages.
Tensor allocate_packed(const PackedShape& shape) {
    if (shape.shape.empty()) return {};
    Tensor tensor = allocate_host(shape.dtype, shape.shape);
    if (tensor.bytes() >= 2 << 20) prefer_huge_pages(tensor);
    return tensor;
}

void PackedLinear::add_part(int64_t rows) {
    part_rows_.push_back(rows);
    if (kind != LinearKind::act_mul || part_rows_.size() == 1) out_features += rows;
}

void PackedLinear::set_packed(Format format) {
    packed_ = {.panels = tensors_.panels.data(),
               .scales = tensors_.scales.data(),
               .format = format,
               .in_features = in_features,
               .num_panels = tensors_.panels.shape(0)};
}

void PackedLinear::set_bias(size_t part, const TensorView& bias) {
    if (!bias) return;
    bias_.resize(static_cast<size_t>(packed_.num_panels * panel_outputs));
    for (int64_t row = 0; row < part_rows_[part]; ++row)
        visit_floating(bias.dtype(), [&](auto tag) {
            bias_[static_cast<size_t>(packed_row(part, row))] =
                to_float(bias.as<const decltype(tag)>()[row * bias.stride(0)]);
        });
}

PackedLinear::PackedLinear(std::span<const LinearPart> parts, LinearKind kind, Quantization quantization,
                           const Pack& pack) {
    this->kind = kind;
    in_features = parts[0].weight.shape(1);
    std::vector<PackSource> sources;
    for (const LinearPart& part : parts) {
        sources.push_back({.weight = part.weight.data(),
                           .weight_stride = part.weight.stride(0),
                           .element = element(part.weight.dtype()),
                           .out_features = part.weight.shape(0)});
        add_part(part.weight.shape(0));
    }
    const Format format = format_of(parts, quantization);
    const PackedShapes shapes = packed_shapes(format, kind, out_features, in_features);
    tensors_ = {allocate_packed(shapes.panels), allocate_packed(shapes.scales)};
    set_packed(format);
    pack({.sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .pairs = kind == LinearKind::act_mul,
          .in_features = in_features,
          .num_panels = packed_.num_panels,
          .format = format,
          .panels = tensors_.panels.data(),
          .scales = tensors_.scales.data()});
    for (size_t p = 0; p < parts.size(); ++p) set_bias(p, parts[p].bias);
}

void PackedLinear::check(const PackedSource& source) {
    checked_format(source);
    cut_of(source);
}

PackedLinear::PackedLinear(const PackedSource& source) {
    const Format format = checked_format(source);
    const PackedCut cut = cut_of(source);
    kind = source.kind;
    in_features = source.columns.size();
    for (const PackedSource::Part& part : source.parts) {
        int64_t rows = 0;
        for (const Range& range : part.rows) rows += range.size();
        add_part(rows);
    }
    const PackedShapes shapes = packed_shapes(format, kind, out_features, in_features);
    const int64_t groups = num_groups(source.in_features);
    tensors_ = {cut_out(source.tensors.panels, cut, shapes.panels, true, groups),
                cut_out(source.tensors.scales, cut, shapes.scales, scale_bytes_of_group(format) > 0, groups)};
    set_packed(format);
    for (size_t p = 0; p < source.parts.size(); ++p) set_bias(p, source.parts[p].bias);
}

int64_t PackedLinear::packed_row(size_t part, int64_t row) const {
    if (kind == LinearKind::act_mul)
        return (row / panel_outputs * 2 + static_cast<int64_t>(part)) * panel_outputs + row % panel_outputs;
    for (size_t before = 0; before < part; ++before) row += part_rows_[before];
    return row;
}

}  // namespace infinilm::cpu
