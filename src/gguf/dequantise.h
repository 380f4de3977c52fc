// Stored blocks to plain numbers, exactly: every product of scale and integer fits a float32, so that a weight is
// rounded at most once, where a minimum is subtracted or a super-block's product has 25 bits.
#pragma once

#include <cstddef>

#include "core/tensor.h"
#include "gguf/types.h"

namespace infinilm::gguf {

struct Rows {
    const Type& type;       // readable
    const std::byte* data;  // [num_rows] rows of num_columns / block * bytes
    int64_t row_stride;     // bytes from row to row
    int64_t num_rows;
    int64_t num_columns;  // a multiple of the block

    const std::byte* row(int64_t number) const { return data + number * row_stride; }
};

// How many threads, up to num_threads, share the work on the rows: few rows are done before a thread has begun.
int64_t num_shares(const Rows& rows, int num_threads);

// Writes the rows to `out`, [num_rows, num_columns] in float32, bfloat16 or float16 (to nearest, ties to even), with up
// to num_threads threads. WeightError: a finite weight that float16 or bfloat16 cannot hold.
void dequantise(const Rows& rows, const TensorView& out, int num_threads);

// WeightError: a finite weight that a floating dtype cannot hold. For who keeps the blocks, and makes numbers of that
// dtype later, where nothing would tell.
void check_range(const Rows& rows, DType dtype, int num_threads);

}  // namespace infinilm::gguf
