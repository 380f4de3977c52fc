// Blocks of GGUF files as packed weights, integer for integer and scale for scale.
#pragma once

#include <span>

#include "cpu/packed_linear.h"
#include "gguf/dequantise.h"

namespace infinilm::cpu {

// The parts of a linear, all of type Q8_0 or all Q4_0 and of equally many columns, as its panels and scales, in the
// format of that name. By up to num_threads threads.
PackedTensors pack_blocks(std::span<const gguf::Rows> parts, LinearKind kind, int num_threads);

}  // namespace infinilm::cpu
