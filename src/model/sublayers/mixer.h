// What all sublayers have in common that mix a token with those before it.
#pragma once

#include "model/step.h"
#include "model/table.h"

namespace infinilm::sites {

inline constexpr Site attention{"attention"};  // [num_tokens, num_heads, head_dim]: what the last linear reads
inline constexpr Site conv{"conv"};            // [num_tokens, channels]: behind the convolution of layers that have one
inline constexpr Site o_proj{"o_proj"};        // [num_tokens, hidden_size], before the residual is added
// The same two of a mixer that may stand beside attention.
inline constexpr Site scan{"scan"}, out_proj{"out_proj"};

}  // namespace infinilm::sites
