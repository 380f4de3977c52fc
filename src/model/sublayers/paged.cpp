#include "model/sublayers/paged.h"

#include <algorithm>

#include "ops/ops.h"

namespace infinilm {

TensorView of_heads(const TensorView& rows, int64_t count, int64_t stride, int64_t begin, int64_t size) {
    const int64_t shape[] = {rows.shape(0), count, size}, strides[] = {rows.stride(0), stride, 1};
    return {rows.as<std::byte>() + begin * size_bytes(rows.dtype()), rows.dtype(), shape, strides, rows.device()};
}

template <class Tap>
RopeStoreParams rope_store(const Step<Tap>& s, const PagedLayer& own, const TensorView& qkv) {
    const bool owns_rows = own.cache.owns_rows();
    const auto rope = [&](int index) { return index < 0 ? TensorView() : s.ropes[static_cast<size_t>(index)]; };
    const auto of_kv = [&](const TensorView& view) { return owns_rows ? view : TensorView(); };
    return {.qkv = qkv,
            .cos_sin = rope(own.rope),
            .q_cos_sin = rope(own.q_rope),
            .q_turned = {},
            .q_norm = {},
            .k_norm = {},
            .v_norm = {},
            .slot_mapping = of_kv(s.batch.slot_mapping.select(0, s.cache.group(s.layer))),
            .k_cache = of_kv(s.cache.k(s.layer)),
            .v_cache = of_kv(s.cache.v(s.layer)),
            .k_scales = of_kv(s.cache.k_scales(s.layer)),
            .v_scales = of_kv(s.cache.v_scales(s.layer)),
            .num_heads = own.cache.num_heads,
            .num_kv_heads = owns_rows ? own.cache.num_kv_heads : 0,
            .head_dim = own.cache.head_dim,
            .eps = own.eps};
}

template <class Tap>
void attend(const Step<Tap>& s, const PagedLayer& own, const TensorView& qkv, const TensorView& sinks,
            const TensorView& out, const TensorView& slots, int kv_head, const std::optional<RopeStoreParams>& store) {
    const auto& lists = s.batch.attention_lists;
    const AttentionLayer layer = attention_layer(own.cache);
    const int group = s.cache.group(s.layer);
    const auto list = std::ranges::find(lists, layer, &AttentionList::layer);
    AttentionParams params{.q = of_heads(qkv, own.cache.num_heads, own.cache.head_dim, 0, own.cache.head_dim),
                           .k_cache = s.cache.k(s.layer),
                           .v_cache = s.cache.v(s.layer),
                           .k_scales = s.cache.k_scales(s.layer),
                           .v_scales = s.cache.v_scales(s.layer),
                           .block_table = s.batch.block_table.select(0, group),
                           .cu_seqlens_q = s.batch.cu_seqlens_q,
                           .context_lens = s.batch.lens_of(group),
                           .out = out,
                           .sinks = sinks,
                           .position_bias = s.position_bias,
                           .softmax_scale = own.softmax_scale,
                           .score_cap = own.score_cap,
                           .sliding_window = own.cache.sliding_window,
                           .chunked = own.cache.chunked,
                           .two_way = own.cache.two_way,
                           .two_way_seqs = own.cache.spans ? s.batch.two_way_seqs.view() : TensorView(),
                           .max_query_len = s.batch.max_query_len,
                           .work = s.batch.attention_work,
                           .known = list == lists.end() ? AttentionList() : *list,
                           .workspace = s.cache.workspace(),
                           .wide_cache = s.cache.wide_cache()};
    if (slots) {  // each token is a sequence, whose blocks have one row each
        const auto of_one_row = [](const TensorView& rows) {
            if (!rows) return rows;
            const int64_t num_slots = rows.shape(0) * rows.shape(1) * rows.shape(2);
            return rows.ndim() == 4 ? rows.reshape({num_slots, 1, 1, rows.shape(3)}) : rows.reshape({num_slots, 1, 1});
        };
        const int group_size = layer.heads.num_heads, head_dim = own.cache.head_dim, first = kv_head * group_size;
        params.q = of_heads(qkv, group_size, head_dim, int64_t{first} * head_dim, head_dim);
        params.out = out.slice(1, first, first + group_size);
        for (TensorView* rows : {&params.k_cache, &params.v_cache, &params.k_scales, &params.v_scales})
            *rows = of_one_row(*rows);
        params.block_table = slots;
        params.cu_seqlens_q = s.batch.token_starts;
        params.context_lens = s.batch.token_lens;
        params.max_query_len = 1;
    }
    if (store)
        ops::store_kv_and_attend(s.backend, *store, params);
    else
        ops::paged_attention(s.backend, params);
}

template RopeStoreParams rope_store(const Step<NoTap>&, const PagedLayer&, const TensorView&);
template RopeStoreParams rope_store(const Step<StepTap>&, const PagedLayer&, const TensorView&);
template void attend(const Step<NoTap>&, const PagedLayer&, const TensorView&, const TensorView&, const TensorView&,
                     const TensorView&, int, const std::optional<RopeStoreParams>&);
template void attend(const Step<StepTap>&, const PagedLayer&, const TensorView&, const TensorView&, const TensorView&,
                     const TensorView&, int, const std::optional<RopeStoreParams>&);

}  // namespace infinilm
