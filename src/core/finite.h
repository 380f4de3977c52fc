// Whether numbers are numbers: what is rounded to integers would hide NaN and infinities.
#pragma once

#include "core/tensor.h"

namespace infinilm {

// Where the first element is, in row-major order, that is NaN or infinite; -1: all are finite. A contiguous tensor of a
// floating dtype in host memory, read once, by up to num_threads threads.
int64_t first_not_finite(const TensorView& tensor, int num_threads);

}  // namespace infinilm
