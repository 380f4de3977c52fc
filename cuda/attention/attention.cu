// attention(): the kernels that a step's list of work asks for (ops/attention_work.h); and what prompts read of a cache
// in 8 bits, widened to T before their attention: for a prompt reads each key once for every tile of queries.
//
// widen_kernel: the tiles of a sequence share out the chunks of keys that any of them sees, and so do kWidenParts
// blocks of a tile, for a few queries of a long text. Where sequences have blocks in common, several write the same
// bytes to the same places. Grid (num_kv_heads, tiles, kWidenParts). Bytes: 3 for each number of the cache.
#include "cuda/attention/attention.cuh"
#include "cuda/core/launch.cuh"

namespace infinilm::cuda {

constexpr int kWidenThreads = 256, kWidenParts = 8;

// tile_rows: of a tile of prefill.
template <class T>
__global__ void __launch_bounds__(kWidenThreads) widen_kernel(const AttentionKernelArgs p, int tile_rows) {
    begin_kernel();
    const int4 item = p.work.array[p.work.prefill_begin + static_cast<int>(blockIdx.y)];  // AttentionPrefillItem
    const int kv_head = static_cast<int>(blockIdx.x), units = p.head_dim / 8;
    const Rows rows(p, item.x, kv_head);
    const KeyRows key_rows(p, item.x, kv_head);
    const int begin = rows.begin(0), end = rows.seen_end(rows.count - 1);
    const int tiles = ceil_div(rows.count, tile_rows);
    const auto widen = [&](const void* cache, const float* scales, void* wide, int row, int unit) {
        const CacheRow<T, uint8_t> from(cache, scales, p.cache_type, row, p.head_dim);
        float x[8];
        from.load8(unit * 8, x);
        store8(static_cast<T*>(wide) + static_cast<int64_t>(row) * p.head_dim + unit * 8, x);
    };
    for (int chunk = begin / kChunk + item.y + tiles * static_cast<int>(blockIdx.z); chunk * kChunk < end;
         chunk += tiles * kWidenParts)
        for (int i = static_cast<int>(threadIdx.x); i < kChunk * units; i += kWidenThreads) {
            const int key = chunk * kChunk + i / units;
            if (key < begin || key >= end) continue;
            const int row = key_rows.row(key);
            widen(p.k_cache, p.k_scales, p.work.wide_k, row, i % units);
            if (!values_end_keys<uint8_t>(p)) widen(p.v_cache, p.v_scales, p.work.wide_v, row, i % units);
        }
}

cudaError_t launch_decode_items(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store, cudaStream_t stream) {
    if (p.work.num_decode == 0) return cudaSuccess;
    return has_row_scales(p.cache_type) ? launch_attention_decode_8_bits(p, store, stream)
                                        : launch_attention_decode(p, store, stream);
}

cudaError_t widen_prefill_keys(AttentionKernelArgs& p, cudaStream_t stream) {
    if (!has_row_scales(p.cache_type)) return cudaSuccess;
    const int tile_rows = AttentionHeads{p.num_heads, p.num_kv_heads, p.head_dim, p.value_dim}.prefill_rows();
    const LaunchConfig config{
        dim3(static_cast<unsigned>(p.num_kv_heads), static_cast<unsigned>(p.work.num_prefill), kWidenParts),
        dim3(kWidenThreads), 0, stream};
    const cudaError_t error = p.type == Element::bf16 ? launch<widen_kernel<bf16>>(config, p, tile_rows)
                                                      : launch<widen_kernel<f16>>(config, p, tile_rows);
    p.k_cache = p.work.wide_k, p.v_cache = p.work.wide_v, p.cache_type = p.type;
    return error;
}

// Sequences of one token each, whose heads of a kv head are one tile: then one block, that of the last keys, has the
// key and the value that are new. Rows of queries lie in the room of the weights while they are normed.
bool attention_stores_kv(const QkNormRopeStoreArgs& store, const AttentionArgs& a, const AttentionWorkArgs& work) {
    const RopeStoreArgs& rope = store.rope;
    return store.num_tokens == a.num_seqs && a.max_query_len == 1 && work.num_prefill == 0 &&
           a.num_heads / a.num_kv_heads <= kTileRows && attention_kernel_dim(a.head_dim) <= 256 &&
           a.value_dim == a.head_dim && !rope.q_turned && (rope.num_kv_heads == 0 || rope.slot_mapping);
}

cudaError_t store_kv_and_attend(const QkNormRopeStoreArgs& store, const AttentionArgs& a, const AttentionWorkArgs& work,
                                cudaStream_t stream) {
    return launch_decode_items(AttentionKernelArgs(a, work), store, stream);
}

cudaError_t attention(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    AttentionKernelArgs p(a, work);
    if (cudaError_t error = launch_decode_items(p, {}, stream)) return error;
    if (work.num_prefill == 0) return cudaSuccess;
    if (cudaError_t error = widen_prefill_keys(p, stream)) return error;
    return AttentionHeads{a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim}.is_wide()
               ? launch_attention_wide(p, stream)
               : launch_attention_prefill(p, stream);
}

}  // namespace infinilm::cuda
