#include "cpu/gguf_panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "gguf/blocks.h"

namespace infinilm::cpu {

namespace {

namespace blocks = gguf::blocks;

// The stored bytes of a row of the linear, or null: it is only there to fill its panel.
const uint8_t* row_of(std::span<const gguf::Rows> parts, bool pairs, int64_t panel, int64_t lane) {
    auto part = static_cast<size_t>(pairs ? panel % 2 : 0);
    int64_t row = (pairs ? panel / 2 : panel) * panel_outputs + lane;
    while (!pairs && part < parts.size() && row >= parts[part].num_rows) row -= parts[part++].num_rows;
    if (part >= parts.size() || row >= parts[part].num_rows) return nullptr;
    return reinterpret_cast<const uint8_t*>(parts[part].row(row));
}

// 32 integers of an output, to a lane of the planes of their bits.
template <int bits>
void write_integers(const uint8_t* q, int64_t lane, std::byte* lines) {
    uint32_t quads[group_size / 4];
    std::memcpy(quads, q, sizeof quads);
    std::byte* to = lines + 4 * lane;
    int at = 0;  // the lowest bit of the plane
    for (const int plane : {8, 4, 2, 1}) {
        if (!(bits & plane)) continue;
        const uint32_t mask = ((1u << plane) - 1) * 0x01010101u;
        const int per_line = 8 / plane;
        for (int line = 0; line < plane; ++line, to += line_bytes) {
            uint32_t word = 0;
            for (int i = 0; i < per_line; ++i) word |= (quads[line * per_line + i] >> at & mask) << (plane * i);
            std::memcpy(to, &word, sizeof word);
        }
        at += plane;
    }
}

// Numbers of a block that are stored together as the scales of an output: number i of 16 outputs is at [i][16].
class ScaleWriter {
public:
    ScaleWriter(std::byte* scales, int64_t lane) : next_(scales), lane_(lane) {}
    template <int size>  // bytes of a number
    void write(const void* from, int count) {
        for (int i = 0; i < count; ++i, next_ += size * panel_outputs)
            std::memcpy(next_ + size * lane_, static_cast<const std::byte*>(from) + size * i, size);
    }

    // What is there: a number that was written before, or zero.
    float stored() const {
        float number;
        std::memcpy(&number, next_ + sizeof number * static_cast<size_t>(lane_), sizeof number);
        return number;
    }

private:
    std::byte* next_;
    int64_t lane_;
};

template <class Block>
void write_scales(const uint8_t* b, ScaleWriter out) {
    if constexpr (std::is_same_v<Block, blocks::MXFP4>) {
        float scale;
        Block::scales(b, &scale, nullptr);
        const bf16 exact = from_float<bf16>(scale);
        out.write<2>(&exact, 1);
    } else if constexpr (std::is_same_v<Block, blocks::NVFP4>) {
        uint8_t codes[4];
        std::ranges::transform(std::span(b, 4), codes, Block::scale_code);
        out.write<4>(codes, 1);
    } else if constexpr (requires { Block::numbers; }) {
        constexpr int count = Block::block / Block::group;
        uint8_t numbers[count], pairs[count / 2];
        Block::numbers(b, numbers);
        for (int i = 0; i < count / 2; ++i) pairs[i] = static_cast<uint8_t>(numbers[2 * i] | numbers[2 * i + 1] << 4);
        const uint16_t factor = Block::factor(b);
        out.write<4>(pairs, count / 8);
        out.write<2>(&factor, 1);
    } else if constexpr (std::is_same_v<Block, blocks::Z4<Block::block>>) {
        out.write<2>(b, 1);
        out.write<1>(b + 2, 1);
    } else if constexpr (std::is_same_v<Block, blocks::F8<Block::block>>) {
        // Kernels do not know the codes of NaN: a scale of NaN makes the same of an output as such a weight does. All
        // blocks of a row may write the same one.
        uint8_t codes[Block::block];
        Block::integers(b, codes);
        float scale;
        Block::scales(b, &scale, nullptr);
        scale *= f8_scale_factor;
        if (std::ranges::any_of(codes, Block::is_nan) || std::isnan(out.stored())) scale = NAN;
        out.write<4>(&scale, 1);
    } else if constexpr (Block::block == 32) {
        out.write<2>(b, Block::has_min ? 2 : 1);
    } else if constexpr (std::is_same_v<Block, blocks::Q4_K> || std::is_same_v<Block, blocks::Q5_K>) {
        out.write<2>(b, 2);
        out.write<4>(b + 4, 3);
    } else if constexpr (std::is_same_v<Block, blocks::Q6_K>) {
        out.write<4>(b + 192, 4);
        out.write<2>(b + 208, 1);
    } else if constexpr (std::is_same_v<Block, blocks::Q3_K>) {
        int8_t numbers[16];
        Block::scale_numbers(b, numbers);
        out.write<4>(numbers, 4);
        out.write<2>(b + 108, 1);
    } else if constexpr (std::is_same_v<Block, blocks::IQ4_XS>) {
        int8_t numbers[8];
        Block::scale_numbers(b, numbers);
        out.write<4>(numbers, 2);
        out.write<2>(b, 1);
    } else if constexpr (Block::group == Block::block) {
        out.write<2>(b + Block::bytes - 2, 1);
    } else {
        static_assert(std::is_same_v<Block, blocks::Q2_K>);
        out.write<4>(b, 4);
        out.write<2>(b + 80, 2);
    }
}

template <class Block, Format format>
void pack_panels(std::span<const gguf::Rows> parts, bool pairs, std::byte* panels, std::byte* scales, Range range) {
    constexpr int bits = is_f8(format) ? 8 : integers_of(format).bits;
    constexpr int64_t group_bytes = bits * line_bytes, groups = Block::block / group_size;
    constexpr int64_t scale_bytes = scale_bytes_of_group(format) * groups;
    const int64_t num_blocks = parts[0].num_columns / Block::block;
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
        std::array<const uint8_t*, panel_outputs> rows;
        for (int64_t lane = 0; lane < panel_outputs; ++lane)
            rows[static_cast<size_t>(lane)] = row_of(parts, pairs, panel, lane);
        std::byte* lines = panels + panel * num_blocks * groups * group_bytes;
        std::byte* of_block = scales + panel * scale_bytes_of_panel(format, parts[0].num_columns);
        for (int64_t i = 0; i < num_blocks; ++i, lines += groups * group_bytes, of_block += scale_bytes)
            for (int64_t lane = 0; lane < panel_outputs; ++lane) {
                const uint8_t* const row = rows[static_cast<size_t>(lane)];
                if (!row) continue;
                uint8_t q[Block::block];
                Block::integers(row + i * Block::bytes, q);
                if constexpr (is_f8(format))
                    for (size_t quad = 0; quad < sizeof q; quad += 4) std::swap(q[quad + f8_place(1)], q[quad + 1]);
                for (int64_t group = 0; group < groups; ++group)
                    write_integers<bits>(q + group * group_size, lane, lines + group * group_bytes);
                write_scales<Block>(row + i * Block::bytes, {of_block, lane});
            }
    }
}

struct NativeType {
    std::string_view name;
    Format format;
    void (*pack)(std::span<const gguf::Rows>, bool pairs, std::byte* panels, std::byte* scales, Range);
    const int8_t* values = nullptr;
};
constexpr NativeType native_types[] = {
    {"Q8_0", Format::q8_0, pack_panels<blocks::Q8_0, Format::q8_0>},
    {"Q4_0", Format::q4_0, pack_panels<blocks::Q4_0, Format::q4_0>},
    {"Q4_1", Format::q4_1, pack_panels<blocks::Q4_1, Format::q4_1>},
    {"Q5_0", Format::q5_0, pack_panels<blocks::Q5_0, Format::q5_0>},
    {"Q5_1", Format::q5_1, pack_panels<blocks::Q5_1, Format::q5_1>},
    {"Q2_K", Format::q2_k, pack_panels<blocks::Q2_K, Format::q2_k>},
    {"Q3_K", Format::q3_k, pack_panels<blocks::Q3_K, Format::q3_k>},
    {"Q4_K", Format::q4_k, pack_panels<blocks::Q4_K, Format::q4_k>},
    {"Q5_K", Format::q5_k, pack_panels<blocks::Q5_K, Format::q5_k>},
    {"Q6_K", Format::q6_k, pack_panels<blocks::Q6_K, Format::q6_k>},
    {"IQ1_S", Format::iq1_s, pack_panels<blocks::IQ1_S, Format::iq1_s>},
    {"IQ1_M", Format::iq1_m, pack_panels<blocks::IQ1_M, Format::iq1_m>},
    {"IQ2_XXS", Format::iq2_xxs, pack_panels<blocks::IQ2_XXS, Format::iq2_xxs>, blocks::iq2_values},
    {"IQ2_XS", Format::iq2_xs, pack_panels<blocks::IQ2_XS, Format::iq2_xs>, blocks::iq2_values},
    {"IQ2_S", Format::iq2_xs, pack_panels<blocks::IQ2_S, Format::iq2_xs>, blocks::iq2_values},
    {"IQ3_XXS", Format::iq3_xxs, pack_panels<blocks::IQ3_XXS, Format::iq3_xxs>, blocks::iq3_xxs_values},
    {"IQ3_S", Format::iq3_s, pack_panels<blocks::IQ3_S, Format::iq3_s>, blocks::iq3_s_values},
    {"IQ4_NL", Format::iq4_nl, pack_panels<blocks::IQ4_NL, Format::iq4_nl>, blocks::iq4_values},
    {"IQ4_XS", Format::iq4_xs, pack_panels<blocks::IQ4_XS, Format::iq4_xs>, blocks::iq4_values},
    {"TQ1_0", Format::tq2_0, pack_panels<blocks::TQ1_0, Format::tq2_0>},
    {"TQ2_0", Format::tq2_0, pack_panels<blocks::TQ2_0, Format::tq2_0>},
    {"MXFP4", Format::mxfp4, pack_panels<blocks::MXFP4, Format::mxfp4>, blocks::mxfp4_values},
    {"NVFP4", Format::nvfp4, pack_panels<blocks::NVFP4, Format::nvfp4>, blocks::mxfp4_values},
    {"Z4_32", Format::z4_32, pack_panels<blocks::Z4_32, Format::z4_32>},
    {"Z4_64", Format::z4_64, pack_panels<blocks::Z4_64, Format::z4_64>},
    {"Z4_128", Format::z4_128, pack_panels<blocks::Z4_128, Format::z4_128>},
    {"F8_ROW", Format::f8_row, pack_panels<blocks::F8_ROW, Format::f8_row>},
    {"F8_32", Format::f8_32, pack_panels<blocks::F8_32, Format::f8_32>},
    {"F8_128", Format::f8_128, pack_panels<blocks::F8_128, Format::f8_128>},
};

}  // namespace

std::optional<Format> format_of_blocks(std::string_view type) {
    for (const NativeType& native : native_types)
        if (native.name == type) return native.format;
    return std::nullopt;
}

int64_t packed_bytes(const gguf::Type& type) {
    const std::optional<Format> format = format_of_blocks(type.name);
    if (!format) return 0;
    const int64_t scales = scale_bytes_of_group(*format) * num_groups(type.block);  // without one of a whole row
    return (panel_bytes(*format, type.block) + scales) / panel_outputs;
}

const int8_t* values_of(Format format) {
    for (const NativeType& native : native_types)
        if (native.format == format) return native.values;
    return nullptr;
}

void pack_blocks(std::span<const gguf::Rows> parts, bool pairs, std::byte* panels, std::byte* scales, Range range) {
    for (const NativeType& native : native_types)
        if (native.name == parts[0].type.name) return native.pack(parts, pairs, panels, scales, range);
    throw WeightError(concat("weights of type ", parts[0].type.name, " are not packed as they are stored"));
}

}  // namespace infinilm::cpu
