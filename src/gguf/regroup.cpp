#include "gguf/regroup.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/shares.h"
#include "gguf/blocks.h"

namespace infinilm::gguf {

namespace {

void put_half(uint16_t bits, uint8_t* out) { std::memcpy(out, &bits, sizeof bits); }

// values: 256 of -32 to 31. scales: one for each 16 of them, multiples of the factor, whose float16 bits are given.
void put_q6_k(const int8_t* values, const int8_t* scales, uint16_t factor, uint8_t* out) {
    for (int half = 0; half < 2; ++half) {
        const auto code = [&](int i) { return values[128 * half + i] + 32; };
        for (int i = 0; i < 64; ++i)
            out[64 * half + i] = static_cast<uint8_t>((code(i) & 15) | (code(64 + i) & 15) << 4);
        for (int i = 0; i < 32; ++i) {
            int high = 0;
            for (int j = 0; j < 4; ++j) high |= code(32 * j + i) >> 4 << (2 * j);
            out[128 + 32 * half + i] = static_cast<uint8_t>(high);
        }
    }
    std::memcpy(out + 192, scales, 16);
    put_half(factor, out + 208);
}

template <class Block>
void to_q6_k(const uint8_t* b, uint8_t* out) {
    constexpr bool is_xxs = std::is_same_v<Block, blocks::IQ3_XXS>;
    uint8_t q[256];
    uint8_t numbers[8];
    int8_t values[256], scales[16];
    Block::integers(b, q);
    Block::numbers(b, numbers);
    // The integers of IQ3_XXS are even and up to 62, in quarters of the factor: half of each is in halves of it.
    for (int i = 0; i < 256; ++i) values[i] = static_cast<int8_t>(Block::value(q[i]) / (is_xxs ? 2 : 1));
    for (int i = 0; i < 16; ++i) scales[i] = static_cast<int8_t>(2 * numbers[i / 2] + 1);
    uint16_t factor = Block::factor(b);
    if (is_xxs) factor = from_float<f16>(to_float(f16{factor}) * 0.5f).bits;
    put_q6_k(values, scales, factor, out);
}

// Entries of IQ1 are -1, 0 or 1 and lie an eighth of the scale above or below: odd integers in eighths of the factor.
template <class Block>
void iq1_to_q6_k(const uint8_t* b, uint8_t* out) {
    constexpr int group = Block::group;
    uint8_t q[256], numbers[256 / group];
    int8_t values[256], scales[16];
    Block::integers(b, q);
    Block::numbers(b, numbers);
    for (int i = 0; i < 256; ++i)
        values[i] = static_cast<int8_t>(8 * (Block::value(q[i]) - 1) + (numbers[i / group] & 8 ? -1 : 1));
    for (int i = 0; i < 16; ++i) scales[i] = static_cast<int8_t>(2 * (numbers[16 * i / group] & 7) + 1);
    put_q6_k(values, scales, from_float<f16>(to_float(f16{Block::factor(b)}) * 0.125f).bits, out);
}

// The same integers, with the scale of each 32 as a float16: a weight changes by less than a bfloat16 of it would.
template <class Block>
void to_q8_0_by_groups(const uint8_t* b, uint8_t* out) {
    static_assert(Block::group == 32);
    uint8_t q[256];
    float scales[8];
    Block::integers(b, q);
    Block::scales(b, scales, nullptr);
    for (int group = 0; group < 8; ++group, out += 34) {
        put_half(from_float<f16>(scales[group]).bits, out);
        for (int i = 0; i < 32; ++i) out[2 + i] = static_cast<uint8_t>(Block::value(q[32 * group + i]));
    }
}

// Where 16 weights have a scale, two of them share one here: integers are those nearest to 127ths of the largest.
template <class Block>
void round_to_q8_0(const uint8_t* b, uint8_t* out) {
    static_assert(Block::group == 16);
    uint8_t q[256];
    float scales[16];
    Block::integers(b, q);
    Block::scales(b, scales, nullptr);
    for (int group = 0; group < 8; ++group, out += 34) {
        float weights[32], largest = 0;
        for (int i = 0; i < 32; ++i) {
            weights[i] = scales[2 * group + i / 16] * static_cast<float>(Block::value(q[32 * group + i]));
            largest = std::max(largest, std::abs(weights[i]));
        }
        const f16 scale = from_float<f16>(largest / 127);
        const float inverse = to_float(scale) == 0 ? 0 : 1 / to_float(scale);
        put_half(scale.bits, out);
        for (int i = 0; i < 32; ++i) {
            const float code =
                std::clamp(std::nearbyint(weights[i] * inverse), -127.0f, 127.0f);  // which lets a NaN through
            out[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::isnan(code) ? 0 : code));
        }
    }
}

template <class Block>
void to_q8_0(const uint8_t* b, uint8_t* out) {  // both begin with the scale
    uint8_t q[32];
    Block::integers(b, q);
    std::memcpy(out, b, 2);
    for (int i = 0; i < 32; ++i) out[2 + i] = static_cast<uint8_t>(Block::value(q[i]));
}

template <class Block>
void to_q2_k(const uint8_t* b, uint8_t* out) {  // the scale of 256 is that of each 16, and what is subtracted from all
    uint8_t q[256];
    Block::integers(b, q);
    std::memset(out, 1 | 1 << 4, 16);
    for (int i = 0; i < 64; ++i) {
        const uint8_t* const first = q + i / 32 * 128 + i % 32;
        out[16 + i] = static_cast<uint8_t>(first[0] | first[32] << 2 | first[64] << 4 | first[96] << 6);
    }
    for (uint8_t* half = out + 80; half < out + 84; half += 2) std::memcpy(half, b + Block::bytes - 2, 2);
}

struct Regrouping {
    std::string_view from, to;
    void (*put)(const uint8_t* block, uint8_t* out);
};
constexpr Regrouping regroupings[] = {
    {"IQ3_XXS", "Q6_K", to_q6_k<blocks::IQ3_XXS>},
    {"IQ3_S", "Q6_K", to_q6_k<blocks::IQ3_S>},
    {"Q5_0", "Q8_0", to_q8_0<blocks::Q5_0>},
    {"IQ4_NL", "Q8_0", to_q8_0<blocks::IQ4_NL>},
    {"TQ1_0", "Q2_K", to_q2_k<blocks::TQ1_0>},
    {"TQ2_0", "Q2_K", to_q2_k<blocks::TQ2_0>},
    {"IQ1_S", "Q6_K", iq1_to_q6_k<blocks::IQ1_S>},
    {"IQ1_M", "Q6_K", iq1_to_q6_k<blocks::IQ1_M>},
    {"IQ4_XS", "Q8_0", to_q8_0_by_groups<blocks::IQ4_XS>},
    {"IQ2_XXS", "Q8_0", to_q8_0_by_groups<blocks::IQ2_XXS>},
    {"IQ2_XS", "Q8_0", round_to_q8_0<blocks::IQ2_XS>},
    {"IQ2_S", "Q8_0", round_to_q8_0<blocks::IQ2_S>},
};

const Regrouping* find(std::string_view type) {
    for (const Regrouping& regrouping : regroupings)
        if (regrouping.from == type) return &regrouping;
    return nullptr;
}

}  // namespace

std::string_view regrouped_type(std::string_view type) {
    const Regrouping* const found = find(type);
    return found ? found->to : "";
}

int64_t regrouped_bytes(const Rows& rows) {
    const Type* const to = find_type(regrouped_type(rows.type.name));
    if (!to) throw Error(concat("blocks of ", rows.type.name, " are those of no other type"));
    return rows.num_columns / to->block * to->bytes;
}

void regroup(const Rows& rows, uint8_t* out, int num_threads) {
    const int64_t blocks_of_row = rows.num_columns / rows.type.block, bytes_of_row = regrouped_bytes(rows);
    const auto put = find(rows.type.name)->put;
    const int64_t shares = num_shares(rows, num_threads);
    run_shares(shares, [&](int64_t share) {
        for (int64_t row = rows.num_rows * share / shares; row < rows.num_rows * (share + 1) / shares; ++row) {
            const auto* const from = reinterpret_cast<const uint8_t*>(rows.row(row));
            for (int64_t i = 0; i < blocks_of_row; ++i)
                put(from + i * rows.type.bytes, out + row * bytes_of_row + i * bytes_of_row / blocks_of_row);
        }
    });
}

}  // namespace infinilm::gguf
