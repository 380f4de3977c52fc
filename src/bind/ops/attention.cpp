// Rotary embedding, the KV cache and attention over it.
#include "bind/ops/ops.h"
#include "ops/ops.h"

namespace infinilm {

void bind_attention_ops(OpsClass& backend) {
    backend
        .def(
            "rope_table",
            [](SharedBackend& shared, const Tensor& positions, const Tensor& inv_freq, float attention_factor,
               const Tensor& cos_sin, float scale_beta, int scale_positions, const OptionalTensor& axes) {
                const InUse b(shared);
                ops::rope_table(b, {.positions = positions,
                                    .inv_freq = inv_freq,
                                    .axes = optional_view(axes),
                                    .attention_factor = attention_factor,
                                    .scale_beta = scale_beta,
                                    .scale_positions = scale_positions,
                                    .cos_sin = output("rope_table", "cos_sin", cos_sin)});
            },
            "positions"_a, "inv_freq"_a, "attention_factor"_a, "cos_sin"_a, "scale_beta"_a = 0.0f,
            "scale_positions"_a = 1, "axes"_a = nb::none(), Release())
        .def(
            "qk_norm_rope_store_kv",
            [](SharedBackend& shared, const Tensor& qkv, const OptionalTensor& cos_sin, const OptionalTensor& q_norm,
               const OptionalTensor& k_norm, const OptionalTensor& slot_mapping, const Tensor& k_cache,
               const OptionalTensor& v_cache, int num_heads, int num_kv_heads, int head_dim, float eps,
               const OptionalTensor& k_scales, const OptionalTensor& v_scales, const OptionalTensor& v_norm,
               const OptionalTensor& q_turned, int value_dim) {
                const InUse b(shared);
                const char* op = "qk_norm_rope_store_kv";
                ops::qk_norm_rope_store_kv(b, {.qkv = output(op, "qkv", qkv),
                                               .cos_sin = optional_view(cos_sin),
                                               .q_cos_sin = {},
                                               .q_turned = optional_view(q_turned),
                                               .q_norm = optional_view(q_norm),
                                               .k_norm = optional_view(k_norm),
                                               .v_norm = optional_view(v_norm),
                                               .slot_mapping = optional_view(slot_mapping),
                                               .k_cache = output(op, "k_cache", k_cache),
                                               .v_cache = v_cache ? output(op, "v_cache", *v_cache) : TensorView(),
                                               .k_scales = k_scales ? output(op, "k_scales", *k_scales) : TensorView(),
                                               .v_scales = v_scales ? output(op, "v_scales", *v_scales) : TensorView(),
                                               .num_heads = num_heads,
                                               .num_kv_heads = num_kv_heads,
                                               .head_dim = head_dim,
                                               .eps = eps,
                                               .value_dim = value_dim});
            },
            "qkv"_a, "cos_sin"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), "slot_mapping"_a.none(), "k_cache"_a,
            "v_cache"_a.none(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "eps"_a, "k_scales"_a = nb::none(),
            "v_scales"_a = nb::none(), "v_norm"_a = nb::none(), "q_turned"_a = nb::none(), "value_dim"_a = 0, Release())
        .def(
            "paged_attention",
            [](SharedBackend& shared, const Tensor& q, const Tensor& k_cache, const OptionalTensor& v_cache,
               const Tensor& block_table, const Tensor& cu_seqlens_q, const Tensor& context_lens, const Tensor& out,
               float softmax_scale, int sliding_window, const OptionalTensor& k_scales, const OptionalTensor& v_scales,
               float score_cap, const OptionalTensor& sinks, bool two_way, const OptionalTensor& position_bias,
               const OptionalTensor& two_way_seqs) {
                const InUse b(shared);
                ops::paged_attention(b, {.q = q,
                                         .k_cache = k_cache,
                                         .v_cache = optional_view(v_cache),
                                         .k_scales = optional_view(k_scales),
                                         .v_scales = optional_view(v_scales),
                                         .block_table = block_table,
                                         .cu_seqlens_q = cu_seqlens_q,
                                         .context_lens = context_lens,
                                         .out = output("paged_attention", "out", out),
                                         .sinks = optional_view(sinks),
                                         .position_bias = optional_view(position_bias),
                                         .softmax_scale = softmax_scale,
                                         .score_cap = score_cap,
                                         .sliding_window = sliding_window,
                                         .two_way = two_way,
                                         .two_way_seqs = optional_view(two_way_seqs)});
            },
            "q"_a, "k_cache"_a, "v_cache"_a.none(), "block_table"_a, "cu_seqlens_q"_a, "context_lens"_a, "out"_a,
            "softmax_scale"_a, "sliding_window"_a = 0, "k_scales"_a = nb::none(), "v_scales"_a = nb::none(),
            "score_cap"_a = 0.0f, "sinks"_a = nb::none(), "two_way"_a = false, "position_bias"_a = nb::none(),
            "two_way_seqs"_a = nb::none(), Release())
        .def(
            "choose_keys",
            [](SharedBackend& shared, const Tensor& q, const OptionalTensor& weights, const Tensor& k_cache,
               const Tensor& block_table, const Tensor& cu_seqlens_q, const Tensor& context_lens, const Tensor& slots,
               const OptionalTensor& k_scales, int run_keys, int last_runs, int slot_heads, int slot_head) {
                const InUse b(shared);
                ops::choose_keys(b, {.q = q,
                                     .weights = optional_view(weights),
                                     .k_cache = k_cache,
                                     .k_scales = optional_view(k_scales),
                                     .block_table = block_table,
                                     .cu_seqlens_q = cu_seqlens_q,
                                     .context_lens = context_lens,
                                     .slots = output("choose_keys", "slots", slots),
                                     .run_keys = run_keys,
                                     .last_runs = last_runs,
                                     .slot_heads = slot_heads,
                                     .slot_head = slot_head});
            },
            "q"_a, "weights"_a.none(), "k_cache"_a, "block_table"_a, "cu_seqlens_q"_a, "context_lens"_a, "slots"_a,
            "k_scales"_a = nb::none(), "run_keys"_a = 1, "last_runs"_a = 0, "slot_heads"_a = 1, "slot_head"_a = 0,
            Release());
}

}  // namespace infinilm
