#include "ops/attention_work.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace infinilm {

namespace {

constexpr int64_t most_workspace_bytes = int64_t{128} << 20;

// Lists of decode have at least so many places: short ones have the same graph, and the blocks that find nothing to do
// are few.
constexpr uint64_t least_items = 16;

// Rows of one tile, and the chunks of keys that any of them sees.
struct Tile {
    int32_t seq, row0;
    int num_rows;
    int end;                  // of the keys that any row sees
    int first_chunk, chunks;  // of them
    int slot = -1;
};

class Lister {
public:
    Lister(const AttentionLengths& lengths, const AttentionLayer& layer, int num_sms)
        : lengths_(lengths),
          context_lens_(layer.sliding_window > 0 && lengths.window_lens ? lengths.window_lens : lengths.context_lens),
          group_(layer.heads.group()),
          window_(layer.sliding_window > 0 ? layer.sliding_window : std::numeric_limits<int>::max()),
          chunked_(layer.chunked),
          two_way_(layer.two_way),
          spans_(layer.spans ? lengths.two_way_seqs : nullptr),
          block_table_(layer.sliding_window > 0 && lengths.window_table ? lengths.window_table : lengths.block_table) {
        const AttentionHeads& heads = layer.heads;
        const int most_rows = most_decode_rows(heads, num_sms);
        for (int32_t seq = 0; seq < lengths.num_seqs; ++seq) {
            const bool few = num_rows(seq) <= most_rows;
            add_tiles(few ? decode : prefill, seq, few ? attention_tile_rows : heads.prefill_rows());
        }
        // The last tile of a prompt sees most keys. Blocks begin in the order of the list.
        std::stable_sort(prefill.begin(), prefill.end(),
                         [](const Tile& a, const Tile& b) { return a.chunks > b.chunks; });
    }

    std::vector<Tile> decode, prefill;

    // The item of a tile of decode that begins with its chunk first_chunk.
    AttentionDecodeItem item(const Tile& tile, int first_chunk, int width) const {
        AttentionDecodeItem item{.seq = tile.seq,
                                 .row0 = tile.row0,
                                 .first_chunk = first_chunk,
                                 .slot = tile.slot,
                                 .first_token = lengths_.cu_seqlens_q[tile.seq],
                                 .query_len = query_len(tile.seq),
                                 .context_len = context_lens_[tile.seq],
                                 .width = width,
                                 .blocks = {}};
        std::fill(std::begin(item.blocks), std::end(item.blocks), -1);
        if (!block_table_) return item;
        const int64_t first = int64_t{tile.first_chunk + first_chunk} * attention_chunk / lengths_.block_size;
        const int64_t count = (tile.end - 1) / lengths_.block_size + 1 - first;
        std::copy_n(block_table_ + tile.seq * lengths_.table_stride + first,
                    std::min<int64_t>(count, attention_item_blocks), item.blocks);
        return item;
    }

private:
    int query_len(int32_t seq) const { return lengths_.cu_seqlens_q[seq + 1] - lengths_.cu_seqlens_q[seq]; }
    int num_rows(int32_t seq) const { return query_len(seq) * group_; }
    void add_tiles(std::vector<Tile>& tiles, int32_t seq, int tile_rows) const {
        const int rows = num_rows(seq);
        for (int32_t row0 = 0; row0 < rows; row0 += tile_rows)
            tiles.push_back(make_tile(seq, row0, std::min(rows - row0, tile_rows)));
    }
    // A sequence with more rows is prefill's. With wide heads a block of prefill takes four tiles of decode at a time,
    // and about half as long for a chunk as decode for one tile, by counting (docs/kernels.md), but walks through all
    // chunks alone: it has them unless the longest walk would take longer than decode's tiles take when they are cut
    // and spread over the device.
    int most_decode_rows(const AttentionHeads& heads, int num_sms) const {
        constexpr int all = std::numeric_limits<int>::max();
        if (!heads.is_wide()) return attention_decode_rows;
        if (heads.value_dim > attention_wide_values) return all;
        std::vector<Tile> tiles;
        for (int32_t seq = 0; seq < lengths_.num_seqs; ++seq)
            if (num_rows(seq) > attention_tile_rows) add_tiles(tiles, seq, attention_wide_rows);
        int64_t longest = 0, cut = 0;
        for (const Tile& tile : tiles) {
            longest = std::max<int64_t>(longest, tile.chunks);
            cut += int64_t{tile.chunks} * ((tile.num_rows + attention_tile_rows - 1) / attention_tile_rows);
        }
        return longest * num_sms <= 2 * cut * heads.num_kv_heads ? attention_tile_rows : all;
    }
    // As Rows of cuda/attention/attention.cuh: a row sees keys [end - window, end), or those of its chunk, or all, and
    // two-way as many of those behind, or where the sequence says so, all of them.
    Tile make_tile(int32_t seq, int32_t row0, int rows) const {
        const int first_position = context_lens_[seq] - num_rows(seq) / group_;
        const int first_end = first_position + row0 / group_ + 1;
        const int64_t last_end = int64_t{first_position} + (row0 + rows - 1) / group_ + (two_way_ ? window_ : 1);
        const int end = spans_ && spans_[seq] != 0 ? context_lens_[seq]
                                                   : static_cast<int>(std::min<int64_t>(last_end, context_lens_[seq]));
        const int begin = chunked_ ? (first_end - 1) / window_ * window_ : std::max(0, first_end - window_);
        const int first_chunk = begin / attention_chunk;
        return {seq, row0, rows, end, first_chunk, (end + attention_chunk - 1) / attention_chunk - first_chunk};
    }

    const AttentionLengths& lengths_;
    const int32_t* const context_lens_;  // [num_seqs]
    const int group_, window_;
    const bool chunked_, two_way_;
    const int32_t* const spans_;        // [num_seqs] or null
    const int32_t* const block_table_;  // [num_seqs, table_stride] or null
};

int rounds(const Tile& tile, int width) { return (tile.chunks + width - 1) / width; }

// Blocks that keep a device busy: three for each two SMs (measured on an H100, as are the two rules).
int64_t enough_blocks(int num_sms) { return 3 * int64_t{num_sms} / 2; }

// Few chunks: one or two to a block, so that they spread over the device.
int choose_width(const std::vector<Tile>& tiles, int num_kv_heads, int num_sms) {
    int width = attention_item_chunks;
    for (; width > 1; width /= 2) {
        int64_t blocks = 0;
        for (const Tile& tile : tiles) blocks += rounds(tile, width);
        if (blocks * num_kv_heads >= enough_blocks(num_sms)) break;
    }
    return width;
}

// Tiles of so many chunks are not cut: a block's fair share. Partial results cost up to a fifth of a chunk's time.
int longest_whole(const std::vector<Tile>& tiles, int num_kv_heads, int num_sms, int width) {
    int64_t chunks = 0;
    for (const Tile& tile : tiles) chunks += tile.chunks;
    return static_cast<int>(std::max<int64_t>(width, chunks * num_kv_heads / enough_blocks(num_sms)));
}

// Gives places to the partial results of tiles of several items; where there is no room for all, to the longest, whose
// blocks the others would wait for.
void place(std::vector<Tile>& tiles, int whole, int num_kv_heads, int64_t num_slots) {
    std::vector<Tile*> cut;
    int64_t needed = 0;
    for (Tile& tile : tiles) {
        if (tile.chunks <= whole) continue;
        cut.push_back(&tile);
        needed += int64_t{tile.chunks} * tile.num_rows * num_kv_heads;
    }
    if (needed > num_slots)
        std::stable_sort(cut.begin(), cut.end(), [](const Tile* a, const Tile* b) { return a->chunks > b->chunks; });
    int64_t slot = 0;
    for (Tile* tile : cut) {
        const int64_t rows = int64_t{tile->chunks} * tile->num_rows * num_kv_heads;
        if (slot + rows > num_slots) continue;
        tile->slot = static_cast<int>(slot);
        slot += rows;
    }
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionHeads& heads, int64_t num_tokens, int row_floats) {
    if (heads.group() > attention_decode_rows && !heads.is_wide()) return 0;  // all sequences are prefill's
    // A tile that is cut has at least two chunks, the first of them whole: it has fewer than context / 64 chunks.
    const int64_t chunks = num_tokens / (attention_chunk / 2);
    const int64_t of_a_chunk = int64_t{heads.num_heads} * row_floats * int64_t{sizeof(float)};
    return chunks < most_workspace_bytes / of_a_chunk ? chunks * of_a_chunk : most_workspace_bytes;
}

AttentionWork list_attention_work(const AttentionLengths& lengths, const std::vector<AttentionLayer>& layers,
                                  int num_sms, int64_t workspace_bytes) {
    int row_floats = attention_row_floats(0);
    for (const AttentionLayer& layer : layers)
        row_floats = std::max(row_floats, attention_row_floats(layer.heads.head_dim));
    const int64_t num_slots = workspace_bytes / (row_floats * static_cast<int64_t>(sizeof(float)));
    AttentionWork work;
    auto& array = work.array;
    const auto size = [&] { return static_cast<int64_t>(array.size() / 4); };
    const auto append = [&](const auto& item) {
        const size_t at = array.size();
        array.resize(at + sizeof(item) / sizeof(int32_t));
        std::memcpy(array.data() + at, &item, sizeof(item));
    };
    std::vector<Lister> listers;
    for (const AttentionLayer& layer : layers) {
        const Lister& tiles = listers.emplace_back(layer.chosen ? *lengths.of_tokens : lengths, layer, num_sms);
        work.lists.push_back({.layer = layer,
                              .row_floats = row_floats,
                              .num_prefill = static_cast<int64_t>(tiles.prefill.size()),
                              .prefill_begin = size()});
        for (const Tile& tile : tiles.prefill)
            append(AttentionPrefillItem{tile.seq, tile.row0 / layer.heads.prefill_rows(), {}});
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        const int num_kv_heads = layers[i].heads.num_kv_heads;
        std::vector<Tile>& tiles = listers[i].decode;
        const int width = choose_width(tiles, num_kv_heads, num_sms);
        place(tiles, longest_whole(tiles, num_kv_heads, num_sms, width), num_kv_heads, num_slots);
        AttentionList& list = work.lists[i];
        list.decode_begin = size();
        uint64_t count = 0;
        // Tiles that one block walks through alone come first: they end last.
        for (const bool walked : {true, false})
            for (const Tile& tile : tiles) {
                const int items = tile.slot < 0 ? 1 : rounds(tile, width);
                if (walked != (tile.slot < 0 && tile.chunks > width)) continue;
                for (int item = 0; item < items; ++item, ++count) append(listers[i].item(tile, item * width, width));
            }
        if (count == 0) continue;
        list.num_decode = static_cast<int64_t>(std::bit_ceil(std::max(count, least_items)));
        for (; count < static_cast<uint64_t>(list.num_decode); ++count) append(AttentionDecodeItem{});
    }
    return work;
}

}  // namespace infinilm
