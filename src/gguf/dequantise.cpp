#include "gguf/dequantise.h"

#include <algorithm>

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
    INFINILM_BLOCK(IQ4_NL)
    INFINILM_BLOCK(IQ4_XS)
    INFINILM_BLOCK(TQ1_0)
    INFINILM_BLOCK(TQ2_0)
    INFINILM_BLOCK(MXFP4)
#undef INFINILM_BLOCK
    throw WeightError(concat("weights of type ", type.name, " are not read in this version, only ", readable_types()));
}

void narrow(const float* in, int64_t n, float* out) { std::copy_n(in, n, out); }
void narrow(const float* in, int64_t n, bf16* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = from_float<bf16>(in[i]);
}
// Without branches, so that the compiler makes vectors of it: an eighth of the time of from_float.
void narrow(const float* in, int64_t n, f16* out) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = std::bit_cast<uint32_t>(in[i]), magnitude = u & 0x7fffffffu;
        const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
        const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
        uint32_t bits = magnitude < 0x38800000u ? subnormal : normal;
        bits = magnitude >= 0x477ff000u ? 0x7c00u : bits;
        bits = magnitude > 0x7f800000u ? 0x7e00u : bits;
        out[i] = {static_cast<uint16_t>(bits | (u >> 16 & 0x8000u))};
    }
}

// Whether one of the numbers is finite, and so large that T makes it infinite.
template <class T>
bool any_lost(const float* in, int64_t n) {
    constexpr uint32_t limit = sizeof(T) == 4 ? 0x7f800000u : std::is_same_v<T, bf16> ? 0x7f7f8000u : 0x477ff000u;
    uint32_t lost = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(in[i]) & 0x7fffffffu;
        lost |= static_cast<uint32_t>(magnitude >= limit) & static_cast<uint32_t>(magnitude < 0x7f800000u);
    }
    return lost != 0;
}

template <class T>
void dequantise_rows(const Rows& rows, ReadBlocks read, int64_t begin, int64_t end, T* out) {
    constexpr int64_t piece = 2048;  // weights at a time, a multiple of all blocks: they stay in the first cache
    alignas(64) float values[piece];
    const int64_t block = rows.type.block;
    for (int64_t row = begin; row < end; ++row) {
        const auto* const from = reinterpret_cast<const uint8_t*>(stored_row(rows, row));
        for (int64_t column = 0; column < rows.num_columns; column += piece) {
            const int64_t n = std::min(piece, rows.num_columns - column);
            read(from + column / block * rows.type.bytes, n / block, values);
            if (any_lost<T>(values, n))
                throw WeightError(concat("a weight in row ", row, " lies outside the range of ", name(dtype_of<T>),
                                         "; use dtype='float32'"));
            narrow(values, n, out + row * rows.num_columns + column);
        }
    }
}

}  // namespace

void dequantise(const Rows& rows, const TensorView& out, int num_threads) {
    const ReadBlocks read = reader_of(rows.type);
    constexpr int64_t least_weights = 1 << 18;  // of a thread: less is done before it has begun
    const int64_t most = std::max<int64_t>(rows.num_rows * rows.num_columns / least_weights, 1);
    const int64_t shares =
        std::clamp<int64_t>(std::min<int64_t>(num_threads, most), 1, std::max<int64_t>(rows.num_rows, 1));
    run_shares(shares, [&](int64_t share) {
        visit_floating(out.dtype(), [&]<class T>(T) {
            dequantise_rows(rows, read, rows.num_rows * share / shares, rows.num_rows * (share + 1) / shares,
                            out.as<T>());
        });
    });
}

}  // namespace infinilm::gguf
