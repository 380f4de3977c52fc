// attention(): decides which kernels run and how decode is cut. None of it changes a bit of a result.
#include "attention.cuh"

namespace infinilm::cuda {

// Partial results beyond this are not worth their memory: there are tiles enough to fill a device without cutting.
constexpr size_t kMaxSlotBytes = size_t{128} << 20;
constexpr int kMaxWidth = 4;

static int group_size(const AttentionArgs& a) { return a.num_heads / a.num_kv_heads; }
// Of the sequences that attention_decode takes; none where a single query has more rows than it takes.
static int64_t most_decode_rows(const AttentionArgs& a) {
    const int64_t rows = int64_t{group_size(a)} * a.max_query_len;
    return group_size(a) > kDecodeRows ? 0 : rows < kDecodeRows ? rows : kDecodeRows;
}
// Chunks that the rows of one tile see.
static int most_chunks(const AttentionArgs& a) {
    const int64_t chunks = ceil_div<int64_t>(a.max_context_len, kChunk);
    if (a.sliding_window == 0) return static_cast<int>(chunks);
    const int64_t windowed = ceil_div<int64_t>(int64_t{a.sliding_window} + kTileRows, kChunk) + 1;
    return static_cast<int>(windowed < chunks ? windowed : chunks);
}
static int64_t num_tiles(const AttentionArgs& a) {
    return ceil_div<int64_t>(most_decode_rows(a), kTileRows) * a.num_kv_heads * a.num_seqs;
}
static int slot_rows(const AttentionArgs& a) {
    const int64_t rows = most_decode_rows(a);
    return static_cast<int>(rows < kTileRows ? rows : kTileRows);
}
static size_t slot_bytes(const AttentionArgs& a) {
    return static_cast<size_t>(num_tiles(a)) * most_chunks(a) * slot_rows(a) * slot_stride(kernel_dim(a.head_dim)) *
           sizeof(float);
}

// No argument makes it less by growing, so that what the largest call needs is enough for all.
size_t attention_workspace_bytes(const AttentionArgs& a) {
    if (a.type == Type::f32) return 0;
    const size_t slots = slot_bytes(a);
    return kCounters * sizeof(unsigned) + (slots < kMaxSlotBytes ? slots : kMaxSlotBytes);
}

cudaError_t attention(const AttentionArgs& a, cudaStream_t stream) {
    if (a.num_seqs == 0 || a.max_query_len == 0) return cudaSuccess;
    constexpr float kLog2E = 1.44269504088896340736f;
    AttentionKernelArgs p{a, group_size(a), a.softmax_scale * kLog2E, Divider(a.block_size), kMaxWidth, 0, 0, 0};
    if (most_decode_rows(a) > 0) {
        p.row_tiles = static_cast<int>(ceil_div<int64_t>(most_decode_rows(a), kTileRows));
        p.max_chunks = most_chunks(a);
        p.slot_rows = slot_rows(a);
        const bool split = slot_bytes(a) <= kMaxSlotBytes && num_tiles(a) <= static_cast<int64_t>(kCounters);
        int device = 0, sms = 1;
        if (cudaError_t error = cudaGetDevice(&device)) return error;
        if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return error;
        // Few chunks: one or two to a block, so that they spread over the device.
        while (split && p.width > 1 && num_tiles(a) * ceil_div(p.max_chunks, p.width) < 2 * sms) p.width /= 2;
        const int rounds = split ? ceil_div(p.max_chunks, p.width) : 1;
        if (cudaError_t error = launch_attention_decode(p, static_cast<unsigned>(rounds), stream)) return error;
    }
    if (int64_t{p.group} * a.max_query_len <= kDecodeRows) return cudaSuccess;
    return launch_attention_prefill(p, stream);
}

}  // namespace infinilm::cuda
