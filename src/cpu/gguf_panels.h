// Blocks of GGUF files as packed weights, integer for integer and scale for scale.
#pragma once

#include <optional>
#include <span>

#include "core/range.h"
#include "cpu/kernels/pack.h"
#include "gguf/dequantise.h"

namespace infinilm::cpu {

// The format that keeps the integers and scales of a type's blocks; none: there is no such.
std::optional<Format> format_of_blocks(std::string_view type);
// Bytes that a block takes in it; 0: there is none.
int64_t packed_bytes(const gguf::Type& type);
// What the integers of a format stand for, where they are numbers of values; else null. See PackedWeight.
const int8_t* values_of(Format format);

// Fills panels [begin, end) of a linear of these parts, which are of one type and have equally many columns. pairs:
// they are gate and up, whose panels take turns.
void pack_blocks(std::span<const gguf::Rows> parts, bool pairs, std::byte* panels, std::byte* scales, Range range);

}  // namespace infinilm::cpu
