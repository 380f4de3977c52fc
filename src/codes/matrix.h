// Matrices of quantised safetensors checkpoints: codes of few bits, what a code stands for, and scales of groups of
// codes. The formats differ in where the bits of a code lie (Order); everything else is tables.
// Layouts: docs/formats.md.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/tensor.h"

namespace infinilm::codes {

// Where code (row, column) of [rows, columns] lies. Words are 32 bits, little-endian; codes fill them lowest bits
// first.
enum class Order : uint8_t {
    rows,        // each row is bytes of its own: its codes one behind the other
    rows_high,   // 4 bits: the first of two codes in the high half of their byte (bitsandbytes)
    columns,     // words [columns * bits / 32, rows]: the codes of a row run down a column of words (GPTQ)
    interleaved  // 4 bits, words [columns, rows / 8]: a word has the codes of 8 rows, 0 2 4 6 1 3 5 7 (AWQ)
};

struct Matrix {
    Order order = Order::rows;
    int bits = 8;  // of a code: 2 to 8
    const uint8_t* codes = nullptr;
    int64_t num_rows = 0, num_columns = 0;
    const float* values = nullptr;  // [2 ** bits]: what a code stands for
    // A weight is (value - zero) * scale + minimum. [ceil(num_rows / scale_rows), num_groups]
    const float* scales = nullptr;
    const float* zeros = nullptr;   // likewise; null: none
    const float* minima = nullptr;  // likewise; null: none
    int64_t num_groups = 1, scale_rows = 1;
    int64_t group_size = 0;             // columns of a group
    const int32_t* group_of = nullptr;  // [num_columns]: the group of a column, where groups are no neighbours; or null
};

// Bytes of the codes. InfinilmError: there is no such matrix, since rows or columns do not fill the words.
int64_t code_bytes(Order order, int bits, int64_t num_rows, int64_t num_columns);

// The rows [begin, begin + out.shape(0)) as plain numbers, [rows, columns] in float32, bfloat16 or float16 (to nearest,
// ties to even; the product is rounded to float32 first), by up to num_threads threads.
// WeightError: a finite weight that the dtype cannot hold.
void dequantise(const Matrix& matrix, int64_t begin, const TensorView& out, int num_threads);

// The rows [begin, begin + count) in the form of a GGUF file's blocks, which packed linears are made of: for each
// `block` columns (32, 64 or 128) the bytes of a scale as they are (2 of float16, with a zero point 3, with a minimum
// 4, 1 of MXFP4's exponent), and of each 32 columns the codes as Q4_0 and MXFP4 (up to 4 bits) or Q8_0 (8 bits) have
// them. Only the codes of the matrix count; those of 8 bits get `flip` xored. scales: [num_rows, num_groups, bytes] of
// group_size columns, a multiple of the block or all. out: [count, columns / block, block_bytes].
struct BlockScales {
    const uint8_t* scales;
    int64_t num_groups, bytes, group_size, block;
    static int block_bits(int bits) { return bits <= 4 ? 4 : 8; }
    int64_t block_bytes(int bits) const { return bytes + block * block_bits(bits) / 8; }
};
void make_blocks(const Matrix& matrix, const BlockScales& scales, uint8_t flip, int64_t begin, int64_t count,
                 uint8_t* out, int num_threads);

}  // namespace infinilm::codes
