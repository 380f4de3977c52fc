#include "cpu/packed_linear.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "cpu/gguf_panels.h"
#include "ops/args.h"

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

// The one whose panels are stored as this dtype.
std::optional<Format> format_of_panels(DType dtype) {
    for (const Format format : {Format::f32, Format::bf16, Format::f16, Format::int8, Format::int4})
        if (packed_shapes(format, LinearKind::plain, 0, 0).panels.dtype == dtype) return format;
    return std::nullopt;
}

int64_t panels_of(int64_t rows) { return (rows + panel_outputs - 1) / panel_outputs; }
int64_t panels_of_head(int64_t head_dim) { return (panels_of(head_dim) + 1) / 2 * 2; }
int64_t panels_of(LinearKind kind, int64_t out_features, int64_t head_dim) {
    if (kind == LinearKind::by_head) return out_features / head_dim * panels_of_head(head_dim);
    const int64_t panels = panels_of(out_features);
    return kind == LinearKind::act_mul ? 2 * panels : (panels + 1) / 2 * 2;
}

// What a rank has of a packed linear: panels, in this order, and of them groups of 32 k.
struct PackedCut {
    std::vector<Range> panels;
    Range groups;
};

PackedCut cut_of(const PackedSource& source) {
    if (source.kind == LinearKind::by_head) {  // whole heads of one part
        const Range rows = source.parts[0].rows[0];
        const int64_t of_head = panels_of_head(source.head_dim);
        return {{{rows.begin / source.head_dim * of_head, rows.end / source.head_dim * of_head}},
                {0, num_groups(source.in_features)}};
    }
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

// The rank's panels of a tensor, filled up to the shape of such a part with panels that no kernel reads; in the memory
// of the whole where they are one piece of it.
Tensor cut_out(PackedMemory& memory, const Tensor& whole, const PackedCut& cut, const PackedShape& shape,
               bool has_groups, int64_t groups) {
    if (shape.shape.empty()) return {};
    const int64_t lines = has_groups ? whole.shape(1) / groups : 0;  // of a group
    const bool all_groups = !has_groups || cut.groups.size() == groups;
    if (cut.panels.size() == 1 && all_groups && cut.panels[0].begin + shape.shape[0] <= whole.shape(0)) {
        Tensor piece{whole.slice(0, cut.panels[0].begin, cut.panels[0].begin + shape.shape[0]), whole.owner};
        piece.read_only = whole.read_only;
        if (reinterpret_cast<uintptr_t>(piece.data()) % line_bytes == 0) return piece;
    }
    Tensor out = memory.allocate(shape.dtype, shape.shape);
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
    const std::optional<Format> format = format_of_panels(source.tensors.panels.dtype());
    if (!format)
        throw WeightError(concat("packed panels: expected float32, bfloat16, float16, int8 or uint8 (int4), got ",
                                 name(source.tensors.panels.dtype())));
    int64_t out_features = 0;
    for (const PackedSource::Part& part : source.parts) {
        out_features += part.out_features;
        if (source.kind == LinearKind::act_mul) break;
    }
    const PackedShapes shapes = packed_shapes(*format, source.kind, out_features, source.in_features, source.head_dim);
    check_shape("panels", source.tensors.panels, shapes.panels);
    check_shape("scales", source.tensors.scales, shapes.scales);
    return *format;
}

}  // namespace

PackedShapes packed_shapes(Format format, LinearKind kind, int64_t out_features, int64_t in_features,
                           int64_t head_dim) {
    const int64_t panels = panels_of(kind, out_features, head_dim), groups = num_groups(in_features);
    const int64_t lines = groups * lines_of_group(format);
    switch (format) {
        case Format::f32: return {{DType::float32, {panels, lines, panel_outputs}}, {}};
        case Format::bf16: return {{DType::bfloat16, {panels, lines, panel_outputs, 2}}, {}};
        case Format::f16: return {{DType::float16, {panels, lines, 2, panel_outputs}}, {}};
        case Format::int8:
            return {{DType::int8, {panels, lines, panel_outputs, 4}}, {DType::float32, {panels, panel_outputs}}};
        case Format::int4:
            return {{DType::uint8, {panels, lines, panel_outputs, 4}},
                    {DType::bfloat16, {panels, groups, panel_outputs}}};
        default:
            return {{DType::uint8, {panels, panel_bytes(format, in_features)}},
                    {DType::uint8, {panels, scale_bytes_of_panel(format, in_features)}}};
    }
}

// Absent where the shape is empty.
static Tensor make_tensor(PackedMemory& memory, const PackedShape& shape) {
    return shape.shape.empty() ? Tensor() : memory.allocate(shape.dtype, shape.shape);
}

// A piece of parts of so many rows, without tensors.
PackedPiece& PackedLinear::add_piece(Format format, std::span<const int64_t> rows) {
    const bool pairs = kind == LinearKind::act_mul;
    PackedPiece piece{.tensors = {}, .first_output = out_features};
    for (const int64_t of_part : rows) {
        parts_.push_back({of_part, pieces_.size(), pairs ? 0 : piece.out_features});
        if (!pairs || piece.out_features == 0) piece.out_features += of_part;
    }
    out_features += piece.out_features;
    piece.weight.format = format;
    return pieces_.emplace_back(std::move(piece));
}

void PackedLinear::set_tensors(PackedPiece& piece, PackedTensors tensors) const {
    piece.tensors = std::move(tensors);
    piece.weight = {.panels = piece.tensors.panels.data(),
                    .scales = piece.tensors.scales.data(),
                    .values = values_of(piece.weight.format),
                    .format = piece.weight.format,
                    .in_features = in_features,
                    .num_panels = piece.tensors.panels.shape(0)};
}

void PackedLinear::allocate(PackedMemory& memory, PackedPiece& piece) const {
    const PackedShapes shapes = packed_shapes(piece.weight.format, kind, piece.out_features, in_features);
    set_tensors(piece, {make_tensor(memory, shapes.panels), make_tensor(memory, shapes.scales)});
}

void PackedLinear::set_bias(size_t part, const TensorView& bias) {
    if (!bias) return;
    PackedPiece& piece = pieces_[parts_[part].piece];
    piece.bias.resize(static_cast<size_t>(piece.weight.num_panels * panel_outputs));
    for (int64_t row = 0; row < parts_[part].rows; ++row)
        visit_floating(bias.dtype(), [&](auto tag) {
            piece.bias[static_cast<size_t>(place(part, row).row)] =
                to_float(bias.as<const decltype(tag)>()[row * bias.stride(0)]);
        });
}

// Pieces of each head's rows of tensors that have those of all.
void PackedLinear::add_heads(Format format, int64_t num_heads, const PackedTensors& all) {
    const int64_t panels = panels_of_head(head_dim_);
    const auto of_head = [&](const Tensor& tensor, int64_t head) {
        return tensor ? Tensor{tensor.slice(0, head * panels, (head + 1) * panels), tensor.owner} : Tensor();
    };
    for (int64_t head = 0; head < num_heads; ++head)
        set_tensors(add_piece(format, {{head_dim_}}), {of_head(all.panels, head), of_head(all.scales, head)});
    parts_ = {{num_heads * head_dim_, 0, 0}};
    all_heads_ = all;
}

PackedLinear::PackedLinear(PackedMemory& memory, std::span<const LinearPart> parts, LinearKind kind, int head_dim,
                           Quantization quantization, const Pack& pack, const Split& split) {
    this->kind = kind;
    in_features = parts[0].in_features();
    if (kind == LinearKind::by_head) {
        head_dim_ = head_dim;
        const Format format = format_of(parts, quantization);
        const int64_t rows = parts[0].weight.shape(0);
        const PackedShapes shapes = packed_shapes(format, kind, rows, in_features, head_dim_);
        add_heads(format, rows / head_dim_, {make_tensor(memory, shapes.panels), make_tensor(memory, shapes.scales)});
        for (size_t head = 0; head < pieces_.size(); ++head) {
            const auto first = static_cast<int64_t>(head) * head_dim_;
            const LinearPart of_head{{parts[0].weight.slice(0, first, first + head_dim_), nullptr}, {}};
            pack_piece(pieces_[head], {&of_head, 1}, pack);
        }
        return;
    }
    for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
        while (end < parts.size() && parts[end].blocks.type == parts[begin].blocks.type) ++end;
        const std::span of_piece = parts.subspan(begin, end - begin);
        if (parts[begin].has_blocks())
            pack_blocks(memory, of_piece, split);
        else
            pack_numbers(memory, of_piece, quantization, pack);
    }
    for (size_t p = 0; p < parts.size(); ++p) set_bias(p, parts[p].bias);
}

void PackedLinear::pack_numbers(PackedMemory& memory, std::span<const LinearPart> parts, Quantization quantization,
                                const Pack& pack) {
    std::vector<int64_t> rows;
    for (const LinearPart& part : parts) rows.push_back(part.weight.shape(0));
    PackedPiece& piece = add_piece(format_of(parts, quantization), rows);
    allocate(memory, piece);
    pack_piece(piece, parts, pack);
}

void PackedLinear::pack_piece(const PackedPiece& piece, std::span<const LinearPart> parts, const Pack& pack) const {
    std::vector<PackSource> sources;
    for (const LinearPart& part : parts)
        sources.push_back({.weight = part.weight.data(),
                           .weight_stride = part.weight.stride(0),
                           .element = element(part.weight.dtype()),
                           .out_features = part.weight.shape(0)});
    pack({.sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .pairs = kind == LinearKind::act_mul,
          .in_features = in_features,
          .num_panels = piece.weight.num_panels,
          .format = piece.weight.format,
          .panels = piece.tensors.panels.data(),
          .scales = piece.tensors.scales.data()});
}

void PackedLinear::pack_blocks(PackedMemory& memory, std::span<const LinearPart> parts, const Split& split) {
    std::vector<gguf::Rows> sources;
    std::vector<int64_t> rows;
    for (const LinearPart& part : parts) {
        sources.push_back({.type = *gguf::find_type(part.blocks.type),
                           .data = part.weight.as<const std::byte>(),
                           .row_stride = part.weight.stride(0),
                           .num_rows = part.weight.shape(0),
                           .num_columns = in_features});
        rows.push_back(part.weight.shape(0));
    }
    PackedPiece& piece = add_piece(*format_of_blocks(parts[0].blocks.type), rows);
    allocate(memory, piece);
    split(piece.weight.num_panels, piece.weight.num_panels * panel_outputs * in_features, [&](Range panels) {
        cpu::pack_blocks(sources, kind == LinearKind::act_mul, piece.tensors.panels.as<std::byte>(),
                         piece.tensors.scales.as<std::byte>(), panels);
    });
}

// What a file can hold: a linear of one piece whose format is one of a packed checkpoint.
PackedTensors PackedLinear::tensors() const {
    if (kind == LinearKind::by_head) return all_heads_;
    const bool is_stored = pieces_.size() == 1 && format_of_panels(pieces_[0].tensors.panels.dtype()) ==
                                                      std::optional(pieces_[0].weight.format);
    return is_stored ? pieces_[0].tensors : PackedTensors();
}

void PackedLinear::check(const PackedSource& source) {
    checked_format(source);
    cut_of(source);
}

PackedLinear::PackedLinear(PackedMemory& memory, const PackedSource& source) {
    const Format format = checked_format(source);
    const PackedCut cut = cut_of(source);
    kind = source.kind;
    in_features = source.columns.size();
    std::vector<int64_t> rows;
    for (const PackedSource::Part& part : source.parts) {
        rows.push_back(0);
        for (const Range& range : part.rows) rows.back() += range.size();
    }
    const bool by_head = kind == LinearKind::by_head;
    const int64_t all_rows = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    if (!by_head) add_piece(format, rows);
    const PackedShapes shapes =
        packed_shapes(format, kind, by_head ? all_rows : out_features, in_features, source.head_dim);
    const int64_t groups = num_groups(source.in_features);
    const PackedTensors own{
        cut_out(memory, source.tensors.panels, cut, shapes.panels, true, groups),
        cut_out(memory, source.tensors.scales, cut, shapes.scales, scale_bytes_of_group(format) > 0, groups)};
    if (by_head) {
        head_dim_ = source.head_dim;
        add_heads(format, all_rows / head_dim_, own);
        return;
    }
    set_tensors(pieces_[0], own);
    for (size_t p = 0; p < source.parts.size(); ++p) set_bias(p, source.parts[p].bias);
}

PackedLinear::Place PackedLinear::place(size_t part, int64_t row) const {
    const Part& of = parts_[part];
    if (kind == LinearKind::by_head) return {pieces_[static_cast<size_t>(row / head_dim_)].weight, row % head_dim_};
    if (kind == LinearKind::act_mul)
        row = (row / panel_outputs * 2 + static_cast<int64_t>(part)) * panel_outputs + row % panel_outputs;
    return {pieces_[of.piece].weight, of.first_row + row};
}

}  // namespace infinilm::cpu
