#include "cpu/packed_linear.h"

#include <sys/mman.h>

#include <algorithm>

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

// Memory that is written once and whole. In huge pages where there are any: most of the time that packing takes is
// spent on the page faults of small ones.
Tensor allocate_packed(int64_t bytes) {
    Tensor tensor = allocate_host(DType::uint8, {bytes});
    if (bytes >= 2 << 20) madvise(tensor.data(), static_cast<size_t>(bytes), MADV_HUGEPAGE);  // advice: may be refused
    return tensor;
}

}  // namespace

Element element(DType dtype) {
    switch (dtype) {
        case DType::bfloat16: return Element::bf16;
        case DType::float16: return Element::f16;
        default: return Element::f32;
    }
}

PackedLinear::PackedLinear(std::span<const LinearPart> parts, LinearKind kind, Quantization quantization,
                           const Pack& pack) {
    this->kind = kind;
    in_features = parts[0].weight.shape(1);
    const bool pairs = kind == LinearKind::silu_mul;
    std::vector<PackSource> sources;
    bool has_bias = false;
    for (const LinearPart& part : parts) {
        sources.push_back({.weight = part.weight.data(),
                           .weight_stride = part.weight.stride(0),
                           .element = element(part.weight.dtype()),
                           .out_features = part.weight.shape(0)});
        part_rows_.push_back(part.weight.shape(0));
        out_features += pairs && sources.size() == 2 ? 0 : part.weight.shape(0);
        has_bias = has_bias || part.bias;
    }
    packed_.format = format_of(parts, quantization);
    packed_.in_features = in_features;
    const int64_t panels = (out_features + panel_outputs - 1) / panel_outputs;  // of gate alone
    packed_.num_panels = pairs ? 2 * panels : (panels + 1) / 2 * 2;
    panels_ = allocate_packed(packed_.num_panels * panel_bytes(packed_.format, in_features));
    scales_ = allocate_packed(packed_.num_panels * scale_bytes_of_panel(packed_.format, in_features));
    packed_.panels = panels_.data(), packed_.scales = scales_.data();
    pack({.sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .pairs = pairs,
          .in_features = in_features,
          .num_panels = packed_.num_panels,
          .format = packed_.format,
          .panels = panels_.data(),
          .scales = scales_.data()});
    if (!has_bias) return;
    bias_.resize(static_cast<size_t>(packed_.num_panels * panel_outputs));
    for (size_t p = 0; p < parts.size(); ++p) {
        const TensorView& bias = parts[p].bias;
        for (int64_t row = 0; bias && row < part_rows_[p]; ++row)
            visit_floating(bias.dtype(), [&](auto tag) {
                bias_[static_cast<size_t>(packed_row(p, row))] =
                    to_float(bias.as<const decltype(tag)>()[row * bias.stride(0)]);
            });
    }
}

int64_t PackedLinear::packed_row(size_t part, int64_t row) const {
    if (kind == LinearKind::silu_mul)
        return (row / panel_outputs * 2 + static_cast<int64_t>(part)) * panel_outputs + row % panel_outputs;
    for (size_t before = 0; before < part; ++before) row += part_rows_[before];
    return row;
}

}  // namespace infinilm::cpu
