// How a call of attention is cut into items that threads draw: see attention.h, which alone includes this.
#pragma once

#include "cpu/kernels/attention_tile.h"

namespace infinilm::cpu::INFINILM_ISA {

// (query, head) rows per item: enough to pay for staging, few enough for L2. A quarter as many rather than to split
// items.
constexpr int block_rows = 768;
constexpr int strip_rows = 48;  // of them that are computed at a time: what they need of a tile stays near L1
// An item larger than 1 / (threads * fine_items) of the whole call is split by chunks.
constexpr int64_t fine_items = 8;
constexpr int64_t items_per_share = 4;  // at least, where items take several kv heads
// Bounds shared scratch: 19 MB at head_dim 128. One sequence of 32 heads and 262144 keys fits; what does not is not
// split.
constexpr int64_t max_partials = 32768;

static int group_size(const CpuAttentionArgs& a) { return a.num_heads / a.num_kv_heads; }
static int64_t most_block_queries(const CpuAttentionArgs& a) { return larger(1, block_rows / group_size(a)); }
static int64_t max_rows(const CpuAttentionArgs& a) { return larger(block_rows, group_size(a)); }
static int64_t padded_dim(const CpuAttentionArgs& a) { return round_up(a.value_dim, width); }
// A partial result: padded_dim sums, then the largest score, then the sum of weights.
static int64_t partial_stride(const CpuAttentionArgs& a) { return round_up(a.value_dim, 16) + 16; }

namespace {

// A range of keys, or of chunks.
struct Interval {
    int64_t begin, end;
};

// Positions of the keys, of `context` in all of sequence `seq`, that its query at `position` sees. Both ends grow with
// the position.
static Interval visible_keys(const CpuAttentionArgs& a, int64_t seq, int64_t position, int64_t context) {
    if (a.chunked) return {position / a.sliding_window * a.sliding_window, position + 1};
    const int64_t window = a.sliding_window > 0 ? a.sliding_window : context;
    const int64_t begin = larger(0, position + 1 - window);
    if (a.two_way_seqs && a.two_way_seqs[seq]) return {begin, context};
    return {begin, a.two_way ? smaller(context, position + window) : position + 1};
}

// Walks over the sequences of a call and says how each is cut into items.
struct Cursor {
    int64_t total_work = 0;  // (query, chunk) pairs over all kv heads
    int64_t num_shares = 1;
    int64_t seq = -1;
    int64_t first_token = 0, num_queries = 0, context = 0;  // of sequence seq
    int64_t first_chunk = 0, num_chunks = 0, block_queries = 0, num_blocks = 0;
    int64_t kv_per_item = 1, num_kv_groups = 0;
    bool split = false;
    int64_t item_begin = 0, item_end = 0, partial_begin = 0, partial_end = 0;

    void load(const CpuAttentionArgs& a, int64_t s) {
        seq = s;
        first_token = a.cu_seqlens_q[s];
        num_queries = a.cu_seqlens_q[s + 1] - first_token;
        context = a.context_lens[s];
        first_chunk = visible_keys(a, seq, context - num_queries, context).begin / chunk_keys;
        num_chunks = num_queries ? (context - 1) / chunk_keys + 1 - first_chunk : 0;
    }
    // Whether items of so many queries would be too large for the threads.
    bool too_few_items(const CpuAttentionArgs& a, int64_t queries) const {
        return smaller(num_queries, queries) * num_chunks * fine_items * a.num_threads > total_work;
    }
    void start(const CpuAttentionArgs& a, int shares) {
        int64_t work = 0;
        for (int64_t s = 0; s < a.num_seqs; ++s) {
            load(a, s);
            work += num_queries * num_chunks * a.num_kv_heads;
        }
        *this = Cursor{};
        total_work = work;
        num_shares = shares;
    }
    // kv heads that one item takes. A paged cache has the heads of a block side by side, and is read fastest in that
    // order; a long block has one head's keys side by side.
    int64_t choose_kv_heads(const CpuAttentionArgs& a) const {
        if (a.block_size >= chunk_keys) return 1;
        const int64_t tokens = smaller(num_queries, block_queries), chunks = split ? 1 : num_chunks;
        const int64_t fit = strip_rows / larger(tokens * group_size(a), 1);
        const int64_t fair = total_work / larger(tokens * chunks * num_shares * items_per_share, 1);
        const int64_t most = larger(1, smaller(smaller(fit, fair), a.num_kv_heads));
        return (a.num_kv_heads + (a.num_kv_heads + most - 1) / most - 1) / ((a.num_kv_heads + most - 1) / most);
    }
    bool next(const CpuAttentionArgs& a) {
        if (seq + 1 >= a.num_seqs) return false;
        load(a, seq + 1);
        const int64_t partials = num_queries * a.num_heads * num_chunks;
        block_queries = most_block_queries(a);
        for (int i = 0; i < 2 && too_few_items(a, block_queries); ++i) block_queries = (block_queries + 1) / 2;
        num_blocks = (num_queries + block_queries - 1) / block_queries;
        split = num_chunks > 1 && too_few_items(a, block_queries) && partial_end + partials <= max_partials;
        item_begin = item_end;
        kv_per_item = choose_kv_heads(a);
        num_kv_groups = (a.num_kv_heads + kv_per_item - 1) / kv_per_item;
        item_end += num_blocks * num_kv_groups * (split ? num_chunks : 1);
        partial_begin = partial_end;
        if (split) partial_end += partials;
        return true;
    }
    float* partial(const CpuAttentionArgs& a, int64_t query, int64_t head, int64_t chunk) const {
        const int64_t index = partial_begin + (query * a.num_heads + head) * num_chunks + (chunk - first_chunk);
        return (float*)a.shared_scratch + index * partial_stride(a);
    }
};

}  // namespace

}  // namespace infinilm::cpu::INFINILM_ISA
