// How a linear's weight is packed for the kernels: its sizes and the order of its rows, before there is memory for it.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>

#include "cuda/core/host.h"
#include "cuda/linear/block_types.h"
#include "ops/backend.h"

namespace infinilm::cuda {

inline WeightFormat format_of(Quantization quantization) {
    switch (quantization) {
        case Quantization::int8: return WeightFormat::int8;
        case Quantization::int4: return WeightFormat::int4;
        case Quantization::fp8: return WeightFormat::fp8;
        default: return WeightFormat::as_type;
    }
}

// fp8_blocks has one scale for 8 rows: whether these have, in host memory.
inline void check_rows_of_blocks(const LinearPart& part, const BlockType& type) {
    if (type.format != WeightFormat::fp8_blocks) return;
    for (int64_t row = 0; row < part.weight.shape(0); ++row) {
        const auto* first = part.weight.as<const uint8_t>() + row / 8 * 8 * part.weight.stride(0);
        const auto* own = part.weight.as<const uint8_t>() + row * part.weight.stride(0);
        for (int64_t at = 0; at < part.weight.shape(1); at += part.blocks.bytes)
            require(std::memcmp(first + at, own + at, sizeof(float)) == 0, "a weight of shape ",
                    shape_string(part.weight.shape()), " of blocks ", type.name,
                    ": on CUDA, 8 outputs have one scale; pass its numbers as bfloat16");
    }
}

// The parts, from the first on, that are packed as one; see CudaPiece.
inline std::span<const LinearPart> first_piece(std::span<const LinearPart> parts) {
    const auto differs = [&](const LinearPart& part) { return part.blocks.type != parts[0].blocks.type; };
    return {parts.begin(), std::ranges::find_if(parts, differs)};
}

// Rows are padded to a multiple of 8; the parts are those of a piece. DeviceError: no kernel takes these parts; the
// message says what to do.
inline PackedWeight packed_layout(std::span<const LinearPart> parts, LinearKind kind, int head_dim,
                                  Quantization quantization, Element type) {
    const BlockType* blocks = find_blocks(parts[0].blocks.type);
    require((quantization == Quantization::none && !blocks) || type != Element::f32, "quantization '",
            blocks ? blocks->name : name(quantization),
            "' on CUDA is of models that compute in 16 bits; pass dtype='bfloat16' or 'float16', or device='cpu'");
    PackedWeight weight;
    weight.type = type;
    weight.format = blocks ? blocks->format : format_of(quantization);
    weight.k = static_cast<int>(parts[0].in_features());
    // Parts in their natural order may have any number of rows: those of a vocabulary, or a row for each head.
    const bool any_rows = kind == LinearKind::plain && (parts.size() == 1 || weight.format != WeightFormat::fp8_blocks);
    for (const LinearPart& part : parts) {
        if (blocks) check_rows_of_blocks(part, *blocks);
        require((any_rows || part.weight.shape(0) % 8 == 0) && weight.k % 8 == 0, "a weight of shape ",
                shape_string(part.weight.shape()),
                ": on CUDA hidden sizes and heads must be multiples of 8; use device='cpu'");
        weight.n += static_cast<int>(part.weight.shape(0));
    }
    weight.n += (8 - weight.n % 8) % 8;
    if (kind == LinearKind::act_mul && parts.size() == 2) weight.order = RowOrder::gate_up;
    if (kind == LinearKind::qkv && head_dim % 16 == 0 && type != Element::f32) {
        weight.order = RowOrder::rope_pairs;
        weight.head_dim = head_dim;
    }
    return weight;
}

}  // namespace infinilm::cuda
