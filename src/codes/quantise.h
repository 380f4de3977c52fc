// Plain weights as integers with scales of groups.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace infinilm::codes {

// Rows of float32 as integers of -8 to 7, and for each group of columns the scale that `numerics/quantise.h` finds, by
// up to num_threads threads. group_size divides num_columns. codes: [num_rows, num_columns]; scales: [num_rows,
// groups].
void quantise_int4(const float* weights, int64_t num_rows, int64_t num_columns, int64_t group_size, int8_t* codes,
                   bf16* scales, int num_threads);

}  // namespace infinilm::codes
