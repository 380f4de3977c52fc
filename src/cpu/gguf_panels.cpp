#include "cpu/gguf_panels.h"

#include <algorithm>
#include <cstring>

#include "core/shares.h"

namespace infinilm::cpu {

namespace {

// The bytes of a row of the linear, or null: it is only there to fill its panel.
const std::byte* row_of(std::span<const gguf::Rows> parts, LinearKind kind, int64_t panel, int64_t lane) {
    size_t part = 0;
    int64_t row = panel * panel_outputs + lane;
    if (kind == LinearKind::act_mul) {  // panels of gate and up take turns
        part = static_cast<size_t>(panel % 2);
        row = panel / 2 * panel_outputs + lane;
    } else {
        while (part < parts.size() && row >= parts[part].num_rows) row -= parts[part++].num_rows;
    }
    if (part >= parts.size() || row >= parts[part].num_rows) return nullptr;
    const gguf::Rows& rows = parts[part];
    return rows.data +
           gguf::stored_row(row, rows.interleaved_head_dim) * (rows.num_columns / group_size) * rows.type.bytes;
}

// A group of an output: its scale, then 32 int8 or 16 pairs of 4 bits, in which k and k + 16 are together.
void pack_group(Format format, const std::byte* block, int64_t lane, std::byte* lines, std::byte* scales) {
    std::memcpy(scales + 2 * lane, block, 2);
    const std::byte* const q = block + 2;
    if (format == Format::q8_0) {
        for (int64_t line = 0; line < 8; ++line) std::memcpy(lines + line * line_bytes + 4 * lane, q + 4 * line, 4);
        return;
    }
    // Four k of one half of the bytes each, then the next four beside them.
    for (int64_t line = 0; line < 4; ++line) {
        uint32_t first, second;
        std::memcpy(&first, q + 8 * (line % 2), 4);
        std::memcpy(&second, q + 8 * (line % 2) + 4, 4);
        const int half = line < 2 ? 0 : 4;
        const uint32_t lanes = (first >> half & 0x0f0f0f0fu) | (second >> half & 0x0f0f0f0fu) << 4;
        std::memcpy(lines + line * line_bytes + 4 * lane, &lanes, 4);
    }
}

}  // namespace

PackedTensors pack_blocks(std::span<const gguf::Rows> parts, LinearKind kind, int num_threads) {
    const bool is_q8 = parts[0].type.name == "Q8_0";
    const Format format = is_q8 ? Format::q8_0 : Format::q4_0;
    const int64_t in_features = parts[0].num_columns, groups = num_groups(in_features);
    int64_t out_features = 0;
    for (const gguf::Rows& rows : parts)
        if (kind != LinearKind::act_mul || &rows == &parts[0]) out_features += rows.num_rows;
    const PackedShapes shapes = packed_shapes(format, kind, out_features, in_features);
    const PackedTensors packed{allocate_packed(shapes.panels), allocate_packed(shapes.scales)};
    const int64_t panels = packed.panels.shape(0), block_bytes = parts[0].type.bytes;
    const int64_t group_bytes = panel_bytes(format, group_size), scale_bytes = scale_bytes_of_group(format);
    // Rows that fill a panel: scales of zero, and integers that are what a zero is in q4_0.
    const std::byte zero = is_q8 ? std::byte{0} : static_cast<std::byte>(int4_offset | int4_offset << 4);
    const int64_t shares = std::clamp<int64_t>(num_threads, 1, panels);
    run_shares(shares, [&](int64_t share) {
        for (int64_t panel = panels * share / shares; panel < panels * (share + 1) / shares; ++panel) {
            std::byte* const lines = packed.panels.as<std::byte>() + panel * groups * group_bytes;
            std::byte* const scales = packed.scales.as<std::byte>() + panel * groups * scale_bytes;
            const std::byte* rows[panel_outputs];
            for (int64_t lane = 0; lane < panel_outputs; ++lane) rows[lane] = row_of(parts, kind, panel, lane);
            if (std::find(rows, rows + panel_outputs, nullptr) != rows + panel_outputs)
                std::fill_n(lines, groups * group_bytes, zero);
            for (int64_t group = 0; group < groups; ++group)
                for (int64_t lane = 0; lane < panel_outputs; ++lane)
                    if (rows[lane])
                        pack_group(format, rows[lane] + group * block_bytes, lane, lines + group * group_bytes,
                                   scales + group * scale_bytes);
        }
    });
    return packed;
}

}  // namespace infinilm::cpu
