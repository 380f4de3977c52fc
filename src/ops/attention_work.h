// What a GPU's attention has to do in a step, as a list made on the host: a grid knows neither how many keys a sequence
// has nor how many sequences are long. A block takes an item of the list, so that a step costs what its keys cost,
// however they are spread over sequences, and a graph of it holds for any lengths with as many items or fewer.
//
// Decode: the sequences with few query rows (a row is a query token and a head of its kv head's group). Their rows are
// cut into tiles of 16, and the keys of a tile into chunks of 128 at fixed positions. An item is some neighbouring
// chunks of a tile. Where a tile has several items, each chunk leaves a partial result in the workspace, and the last
// block to arrive merges them in order; a tile of one item is merged by its block. Neither changes a bit.
// Prefill: the other sequences, tiles of 128 rows (64 of wide heads and of latents) with all keys that these see, those
// with most keys first.
// Idea: plans of flashinfer (attention/scheduler.cuh). C++17, as the kernels include it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinilm {

constexpr int attention_chunk = 128;       // keys
constexpr int attention_tile_rows = 16;    // of decode
constexpr int attention_decode_rows = 32;  // a sequence with at most this many rows a kv head is decode's
constexpr int attention_item_chunks = 4;   // of a tile that several blocks of decode share, at most
constexpr int attention_item_blocks = 8;   // of the block table, that an item of decode brings

// The kernels are compiled for these widths of a head; columns from head_dim on are zeros.
constexpr int attention_kernel_dim(int head_dim) {
    return head_dim <= 32    ? 32
           : head_dim <= 64  ? 64
           : head_dim <= 80  ? 80
           : head_dim <= 96  ? 96
           : head_dim <= 128 ? 128
           : head_dim <= 256 ? 256
           : head_dim <= 512 ? 512
                             : 576;
}
constexpr int attention_widest_head = 576;
// Rows of a tile of prefill: a warp has 32, or the 16 that there are registers for; of wide heads four warps share 32.
constexpr int attention_prefill_rows(int head_dim) { return attention_kernel_dim(head_dim) <= 128 ? 128 : 64; }
constexpr int attention_wide_rows = 64;
constexpr int attention_wide_values = 512;  // columns of the values that prefill of wide heads has registers for
// A row of partial results: the floats of the output, and behind those of the model's widest heads its largest score,
// its sum of weights, and two more. In the first row of a (tile, kv head) the first of these counts the blocks that
// have arrived; it is zero between calls.
constexpr int attention_row_floats(int head_dim) { return attention_kernel_dim(head_dim) + 4; }

// Heads of a rank, of one layer.
struct AttentionHeads {
    int num_heads, num_kv_heads, head_dim;
    int value_dim;  // less than head_dim: a value is the end of its key
    int group() const { return num_heads / num_kv_heads; }
    // Wide heads have a prefill kernel of their own; the decode kernel may be faster (list_attention_work).
    bool is_wide() const { return value_dim < head_dim || attention_kernel_dim(head_dim) > 256; }
    int prefill_rows() const { return is_wide() ? attention_wide_rows : attention_prefill_rows(head_dim); }
    bool operator==(const AttentionHeads& o) const {
        return num_heads == o.num_heads && num_kv_heads == o.num_kv_heads && head_dim == o.head_dim &&
               value_dim == o.value_dim;
    }
};
// The properties of a layer's attention that its list depends on.
struct AttentionLayer {
    int sliding_window = 0;  // 0: none
    AttentionHeads heads = {};
    bool chunked = false;  // see AttentionParams
    bool two_way = false;  // the same
    bool spans = true;     // sequences of two_way_seqs see all keys behind, too
    bool chosen = false;   // each token is a sequence, of the keys that it has chosen
    bool operator==(const AttentionLayer& o) const {
        return sliding_window == o.sliding_window && heads == o.heads && chunked == o.chunked && two_way == o.two_way &&
               spans == o.spans && chosen == o.chosen;
    }
};

// Bytes for the partial results of decode steps over a cache of so many tokens, at most 128 MiB, which are a million
// tokens of an 8B model. A step that would need more, since sequences share tokens or have several queries, has its
// shortest tiles taken whole, each by one block. row_floats: of the model's widest heads.
int64_t attention_workspace_bytes(const AttentionHeads& heads, int64_t num_tokens, int row_floats);

// An item of decode has all that its block needs to find its first keys: the block reads this one entry, and then keys.
// Lengths and block numbers that lay elsewhere would each be a read more that waits for the one before.
struct AttentionDecodeItem {
    int32_t seq = -1;         // -1: there is no item here
    int32_t row0 = 0;         // the tile's first row
    int32_t first_chunk = 0;  // from the first that any row of the tile sees
    // The row of partial results where those of the tile begin, [num_kv_heads][chunks of the tile][rows of the tile];
    // -1: the item is all of the tile.
    int32_t slot = -1;
    int32_t first_token = 0, query_len = 0, context_len = 0;  // of the sequence
    int32_t width = 0;                                        // chunks of an item that is not all of its tile
    // The sequence's entries of the block table, from that of the first key of the item's first chunk on, as far as any
    // row of the tile sees keys; -1: the host does not know it, and the table has it.
    int32_t blocks[attention_item_blocks] = {};
};
struct AttentionPrefillItem {
    int32_t seq, tile;  // rows [AttentionHeads::prefill_rows() * tile, ..)
    int32_t padding[2];
};

// The sequences of a step, in host memory; see AttentionParams.
struct AttentionLengths {
    int64_t num_seqs;
    const int32_t* cu_seqlens_q;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    // The same for layers with a window, where their sequences are others; null: they are not.
    const int32_t* window_lens = nullptr;
    const int32_t* two_way_seqs = nullptr;  // [num_seqs] or null: see AttentionParams
    // [num_seqs, table_stride]: the block table, and that of layers with a window, where they have their own; null:
    // items bring no block numbers.
    const int32_t *block_table = nullptr, *window_table = nullptr;
    int64_t table_stride = 0, block_size = 0;
    // The sequences of layers whose tokens choose the keys that they read; null: there are no such layers.
    const AttentionLengths* of_tokens = nullptr;
};

// The list of the layers that share one, as far as the host needs it to launch their kernels.
struct AttentionList {
    AttentionLayer layer = {};
    int row_floats = 0;  // of a row of partial results
    // Items. Decode has none or a power of two, at least 16, the last of which may be empty. Graphs are looked up by
    // how many there are of both kinds, so that in the steps of one graph each list has its own in one place.
    int64_t num_decode = 0, num_prefill = 0;
    int64_t decode_begin = 0, prefill_begin = 0;  // elements of the array
};
struct AttentionWork {
    std::vector<AttentionList> lists;
    // [num_elements, 4]: the items of prefill of all lists, an element each, and those of decode, four elements each.
    std::vector<int32_t> array;
};

// Lists for each of these, which are all that the model has. num_sms: of the device. workspace_bytes: see
// attention_workspace_bytes.
AttentionWork list_attention_work(const AttentionLengths& lengths, const std::vector<AttentionLayer>& layers,
                                  int num_sms, int64_t workspace_bytes);

}  // namespace infinilm
