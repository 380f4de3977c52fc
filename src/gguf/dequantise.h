// Stored blocks to plain numbers, exactly: every product of scale and integer fits a float32, so that a weight is
// rounded at most once, where a minimum is subtracted or a super-block's product has 25 bits.
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

#include "core/tensor.h"
#include "gguf/types.h"

namespace infinilm::gguf {

struct Rows {
    const Type& type;       // readable
    const std::byte* data;  // [num_rows] rows of num_columns / block * bytes
    int64_t row_stride;     // bytes from row to row
    int64_t num_rows;
    int64_t num_columns;  // a multiple of the block
    // Not 0: rows are those of heads of this size, in which the two halves of a head take turns, as llama.cpp orders
    // the rows of q and k of the architecture "llama". Row h * d + j * d / 2 + i of the result is row h * d + 2 i + j.
    int64_t interleaved_head_dim = 0;
};

// Where row `row` of the result is stored.
inline const std::byte* stored_row(const Rows& rows, int64_t row) {
    if (const int64_t d = rows.interleaved_head_dim; d > 0) {
        const int64_t in_head = row % d;
        row += 2 * (in_head % (d / 2)) + in_head / (d / 2) - in_head;
    }
    return rows.data + row * rows.row_stride;
}

// Calls f(share) for the shares 0 to num_shares - 1 at once; throws what the first one of them threw.
template <class F>
void run_shares(int64_t num_shares, F f) {
    std::vector<std::exception_ptr> errors(static_cast<size_t>(num_shares));
    const auto run = [&](int64_t share) {
        try {
            f(share);
        } catch (...) {
            errors[static_cast<size_t>(share)] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> threads;
        for (int64_t share = 1; share < num_shares; ++share) threads.emplace_back(run, share);
        run(0);
    }
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

// Writes the rows to `out`, [num_rows, num_columns] in float32, bfloat16 or float16 (to nearest, ties to even), with up
// to num_threads threads. WeightError: a finite weight that float16 or bfloat16 cannot hold.
void dequantise(const Rows& rows, const TensorView& out, int num_threads);

}  // namespace infinilm::gguf
