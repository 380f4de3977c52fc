#include "gguf/dequantise.h"

#include <algorithm>

#include "core/narrow.h"
#include "core/shares.h"
#include "gguf/blocks.h"

namespace infinilm::gguf {

namespace {

using ReadBlocks = void (*)(const uint8_t* data, int64_t count, float* out);

template <class Block>
void read_blocks(const uint8_t* data, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        if constexpr (requires { Block::value; })
            blocks::read<Block>(data + i * Block::bytes, out + i * Block::block);
        else
            Block::read(data + i * Block::bytes, out + i * Block::block);
    }
}

template <class Block>
bool is(const Type& type, std::string_view name) {
    return type.name == name && type.block == Block::block && type.bytes == Block::bytes;
}

ReadBlocks reader_of(const Type& type) {
#define INFINILM_BLOCK(name) \
    if (is<blocks::name>(type, #name)) return read_blocks<blocks::name>;
    INFINILM_BLOCK(F32)
    INFINILM_BLOCK(F16)
    INFINILM_BLOCK(BF16)
    INFINILM_BLOCK(Q4_0)
    INFINILM_BLOCK(Q4_1)
    INFINILM_BLOCK(Q5_0)
    INFINILM_BLOCK(Q5_1)
    INFINILM_BLOCK(Q8_0)
    INFINILM_BLOCK(Q2_K)
    INFINILM_BLOCK(Q3_K)
    INFINILM_BLOCK(Q4_K)
    INFINILM_BLOCK(Q5_K)
    INFINILM_BLOCK(Q6_K)
    INFINILM_BLOCK(IQ1_S)
    INFINILM_BLOCK(IQ1_M)
    INFINILM_BLOCK(IQ2_XXS)
    INFINILM_BLOCK(IQ2_XS)
    INFINILM_BLOCK(IQ2_S)
    INFINILM_BLOCK(IQ3_XXS)
    INFINILM_BLOCK(IQ3_S)
    INFINILM_BLOCK(IQ4_NL)
    INFINILM_BLOCK(IQ4_XS)
    INFINILM_BLOCK(TQ1_0)
    INFINILM_BLOCK(TQ2_0)
    INFINILM_BLOCK(MXFP4)
    INFINILM_BLOCK(NVFP4)
    INFINILM_BLOCK(Z4_32)
    INFINILM_BLOCK(Z4_64)
    INFINILM_BLOCK(Z4_128)
    INFINILM_BLOCK(NVFP4_ROW)
    INFINILM_BLOCK(F8_ROW)
    INFINILM_BLOCK(F8_32)
    INFINILM_BLOCK(F8_128)
#undef INFINILM_BLOCK
    throw WeightError(concat("weights of type ", type.name, " are not read in this version, only ", readable_types()));
}

// use(values, n, at) for pieces of rows [begin, end), n float32 weights from element `at` of the matrix on.
// WeightError: a finite weight that T cannot hold.
template <class T, class Use>
void read_rows(const Rows& rows, ReadBlocks read, int64_t begin, int64_t end, Use use) {
    constexpr int64_t piece = 2048;  // weights at a time, a multiple of all blocks: they stay in the first cache
    alignas(64) float values[piece];
    const int64_t block = rows.type.block;
    for (int64_t row = begin; row < end; ++row) {
        const auto* const from = reinterpret_cast<const uint8_t*>(rows.row(row));
        for (int64_t column = 0; column < rows.num_columns; column += piece) {
            const int64_t n = std::min(piece, rows.num_columns - column);
            read(from + column / block * rows.type.bytes, n / block, values);
            if (any_lost<T>(values, n))
                throw WeightError(
                    concat("a weight in row ", row, " lies outside the range of ", name(dtype_of<T>),
                           std::is_same_v<T, f16> ? "; use dtype='bfloat16' or 'float32'" : "; use dtype='float32'"));
            use(values, n, row * rows.num_columns + column);
        }
    }
}

// read_rows of all rows by up to num_threads threads, T that of the dtype.
template <class Use>
void read_all(const Rows& rows, DType dtype, int num_threads, Use use) {
    const ReadBlocks read = reader_of(rows.type);
    const int64_t shares = num_shares(rows, num_threads);
    run_shares(shares, [&](int64_t share) {
        visit_floating(dtype, [&]<class T>(T) {
            read_rows<T>(rows, read, rows.num_rows * share / shares, rows.num_rows * (share + 1) / shares,
                         [&](const float* values, int64_t n, int64_t at) { use(T{}, values, n, at); });
        });
    });
}

}  // namespace

int64_t num_shares(const Rows& rows, int num_threads) {
    constexpr int64_t least_weights = 1 << 18;  // of a thread
    const int64_t most = std::max<int64_t>(rows.num_rows * rows.num_columns / least_weights, 1);
    return std::clamp<int64_t>(std::min<int64_t>(num_threads, most), 1, std::max<int64_t>(rows.num_rows, 1));
}

void dequantise(const Rows& rows, const TensorView& out, int num_threads) {
    read_all(rows, out.dtype(), num_threads,
             [&]<class T>(T, const float* values, int64_t n, int64_t at) { narrow(values, n, out.as<T>() + at); });
}

void check_range(const Rows& rows, DType dtype, int num_threads) {
    read_all(rows, dtype, num_threads, [](auto, const float*, int64_t, int64_t) {});
}

}  // namespace infinilm::gguf
