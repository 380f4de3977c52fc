#include "ops/args.h"

namespace infinilm {

namespace {

int count(int64_t size) { return static_cast<int>(size); }

// The stride of a dimension; 0 for a tensor that is absent.
int64_t stride(const TensorView& view, int dim) { return view ? view.stride(dim) : 0; }

StateStepsArgs state_steps_args(const StateSteps& p) {
    return {.cu_seqlens_q = p.cu_seqlens_q.as<const int32_t>(),
            .state_in = p.state_in.as<const int32_t>(),
            .state_out = p.state_out.as<const int32_t>(),
            .state_tokens = p.state_tokens ? p.state_tokens.as<const int32_t>() : nullptr,
            .num_replayed = p.num_replayed ? p.num_replayed.as<const int32_t>() : nullptr,
            .num_seqs = count(p.state_in.shape(0))};
}

StateLogArgs state_log_args(const TensorView& log) {
    if (!log) return {};
    return {.rows = log.data(), .stride = log.stride(1), .num_rows = count(log.shape(1))};
}

}  // namespace

Element element(DType dtype) {
    switch (dtype) {
        case DType::bfloat16: return Element::bf16;
        case DType::float16: return Element::f16;
        case DType::int8: return Element::int8;
        case DType::fp8: return Element::fp8;
        default: return Element::f32;
    }
}

NormArgs norm_args(const AddRmsNormParams& p) {
    return {.x = p.x.data(),
            .residual = p.residual.data(),
            .weight = p.weight.data(),
            .bias = p.weight.ndim() == 2 ? p.weight.select(0, 1).data() : nullptr,
            .mean_square = nullptr,
            .out = p.out.data(),
            .x_stride = p.x.stride(0),
            .residual_stride = stride(p.residual, 0),
            .out_stride = p.out.stride(0),
            .num_tokens = count(p.x.shape(0)),
            .num_groups = 1,
            .hidden_size = count(p.x.shape(1)),
            .eps = p.eps,
            .multiplier = p.multiplier,
            .scale = p.scale,
            .type = element(p.x.dtype())};
}

NormArgs norm_args(const RmsNormParams& p) {
    NormArgs args = norm_args({.x = p.x, .residual = {}, .weight = p.weight, .out = p.out, .eps = p.eps});
    args.mean_square = p.mean_square.as<float>();
    args.num_groups = p.num_groups;
    args.hidden_size /= p.num_groups;
    return args;
}

NormArgs norm_args(const MeanSquareParams& p) {
    NormArgs args =
        norm_args({.x = p.x, .residual = {}, .weight = {}, .out = p.x, .eps = 0, .multiplier = p.multiplier});
    args.mean_square = p.out.as<float>();
    return args;
}

RowMomentArgs row_moment_args(const RowMomentParams& p) {
    return {.x = p.x.data(),
            .centre = p.centre ? p.centre.as<const float>() : nullptr,
            .out = p.out.as<float>(),
            .x_stride = p.x.stride(0),
            .num_tokens = count(p.x.shape(0)),
            .size = count(p.x.shape(1)),
            .multiplier = p.multiplier,
            .type = element(p.x.dtype())};
}

SparsifyArgs sparsify_args(const SparsifyParams& p) {
    return {.x = p.x.data(),
            .mean = p.mean.as<const float>(),
            .variance = p.variance.as<const float>(),
            .x_stride = p.x.stride(0),
            .num_tokens = count(p.x.shape(0)),
            .size = count(p.x.shape(1)),
            .deviations = p.deviations,
            .type = element(p.x.dtype())};
}

MatchRmsArgs match_rms_args(const MatchRmsParams& p) {
    return {.x = p.x.data(),
            .like = p.like.data(),
            .x_stride = p.x.stride(0),
            .like_stride = p.like.stride(0),
            .num_tokens = count(p.x.shape(0)),
            .hidden_size = count(p.x.shape(1)),
            .least = p.least,
            .type = element(p.x.dtype())};
}

MixStreamsArgs mix_streams_args(const MixStreamsParams& p) {
    return {.x = p.x.data(),
            .streams = p.streams.data(),
            .router = p.router.as<const float>(),
            .coefficients = p.coefficients.as<const float>(),
            .scale = p.scale ? p.scale.as<const float>() : nullptr,
            .scaled = p.scaled.data(),
            .x_stride = p.x.stride(0),
            .stream_stride = p.streams.stride(0),
            .row_stride = p.streams.stride(1),
            .scaled_stride = stride(p.scaled, 0),
            .num_tokens = count(p.x.shape(0)),
            .num_streams = count(p.streams.shape(0)),
            .hidden_size = count(p.x.shape(1)),
            .corrects = p.corrects,
            .eps = p.eps,
            .type = element(p.x.dtype())};
}

ActMulArgs act_mul_args(const ActMulParams& p) {
    const int64_t size = p.out.shape(1);
    const TensorView up = p.gate_up.shape(1) > size ? p.gate_up.slice(1, size, 2 * size) : p.up;
    return {.gate = p.gate_up.data(),
            .up = up.data(),
            .out = p.out.data(),
            .gate_stride = p.gate_up.stride(0),
            .up_stride = stride(up, 0),
            .out_stride = p.out.stride(0),
            .num_tokens = count(p.out.shape(0)),
            .intermediate_size = count(size),
            .activation = p.activation,
            .type = element(p.out.dtype()),
            .alpha_p = p.alpha_p,
            .alpha_n = p.alpha_n,
            .limit = p.limit,
            .group = count(p.gate_up.shape(1) < size ? size / p.gate_up.shape(1) : 1)};
}

ClipArgs clip_args(const ClipParams& p) {
    return {.x = p.x.data(),
            .out = p.out.data(),
            .x_stride = p.x.stride(0),
            .out_stride = p.out.stride(0),
            .num_rows = count(p.x.shape(0)),
            .n = count(p.x.shape(1)),
            .low = p.low,
            .high = p.high,
            .type = element(p.x.dtype())};
}

SoftCapArgs soft_cap_args(const SoftCapParams& p) {
    return {.x = p.x.as<float>(),
            .x_stride = p.x.stride(0),
            .num_rows = count(p.x.shape(0)),
            .n = count(p.x.shape(1)),
            .cap = p.cap};
}

CombineArgs combine_args(const ExpertsParams& p, const int32_t* part_of) {
    return {.parts = p.parts.data(),
            .part_of = part_of,
            .weights = p.weigh_inputs ? nullptr : p.weights.as<const float>(),
            .shared = p.shared.data(),
            .shared_gate = p.shared_gate.as<const float>(),
            .residual = p.residual.data(),
            .out = p.out.data(),
            .parts_stride = p.parts.stride(0),
            .weights_stride = p.weights.stride(0),
            .shared_stride = stride(p.shared, 0),
            .shared_gate_stride = stride(p.shared_gate, 0),
            .residual_stride = stride(p.residual, 0),
            .out_stride = p.out.stride(0),
            .num_tokens = count(p.ids.shape(0)),
            .top_k = count(p.ids.shape(1)),
            .hidden_size = count(p.out.shape(1)),
            .type = element(p.out.dtype())};
}

QkNormRopeStoreArgs rope_store_args(const RopeStoreParams& p) {
    const TensorView& q_cos_sin = p.q_cos_sin ? p.q_cos_sin : p.cos_sin;
    return {.qkv = p.qkv.data(),
            .qkv_stride = p.qkv.stride(0),
            .num_tokens = count(p.qkv.shape(0)),
            .rope = {.cos_sin = p.cos_sin.as<const float>(),
                     .q_cos_sin = q_cos_sin.as<const float>(),
                     .q_norm = p.q_norm.data(),
                     .k_norm = p.k_norm.data(),
                     .v_norm = p.v_norm.data(),
                     .slot_mapping = p.slot_mapping.as<const int64_t>(),
                     .k_cache = p.k_cache.data(),
                     .v_cache = p.v_cache.data(),
                     .q_turned = p.q_turned.data(),
                     .q_turned_stride = stride(p.q_turned, 0),
                     .q_turned_head_stride = stride(p.q_turned, 1),
                     .num_heads = p.num_heads,
                     .num_kv_heads = p.num_kv_heads,
                     .head_dim = p.head_dim,
                     .value_dim = p.v_dim(),
                     .rotary_dim = q_cos_sin ? count(q_cos_sin.shape(1)) : 0,
                     .block_size = p.k_cache ? count(p.k_cache.shape(2)) : 0,
                     .eps = p.eps,
                     .k_scales = p.k_scales.as<float>(),
                     .v_scales = p.v_scales.as<float>(),
                     .cache_type = element(p.k_cache.dtype())},
            .type = element(p.qkv.dtype())};
}

AttentionArgs attention_args(const AttentionParams& p) {
    const int64_t head_dim = p.q.shape(2), value_dim = p.out.shape(2);
    const std::byte* const ends_of_keys =
        p.k_cache.as<const std::byte>() + (head_dim - value_dim) * size_bytes(p.k_cache.dtype());
    return {
        .q = p.q.data(),
        .k_cache = p.k_cache.data(),
        .v_cache = p.v_cache ? p.v_cache.data() : ends_of_keys,
        .block_table = p.block_table.as<const int32_t>(),
        .cu_seqlens_q = p.cu_seqlens_q.as<const int32_t>(),
        .context_lens = p.context_lens.as<const int32_t>(),
        .sinks = p.sinks.as<const float>(),
        .two_way_seqs = p.two_way_seqs.as<const int32_t>(),
        .position_bias = p.position_bias ? p.position_bias.as<const float>() + p.position_bias.shape(1) / 2 : nullptr,
        .out = p.out.data(),
        .q_stride = p.q.stride(0),
        .out_stride = p.out.stride(0),
        .block_table_stride = p.block_table.stride(0),
        .position_bias_stride = stride(p.position_bias, 0),
        .num_seqs = count(p.context_lens.shape(0)),
        .num_heads = count(p.q.shape(1)),
        .num_kv_heads = count(p.k_cache.shape(1)),
        .head_dim = count(head_dim),
        .value_dim = count(value_dim),
        .block_size = count(p.k_cache.shape(2)),
        .max_query_len = p.max_query_len,
        .softmax_scale = p.softmax_scale,
        .score_cap = p.score_cap,
        .sliding_window = p.sliding_window,
        .chunked = p.chunked,
        .two_way = p.two_way,
        .type = element(p.q.dtype()),
        .k_scales = p.k_scales.as<const float>(),
        .v_scales = (p.v_cache ? p.v_scales : p.k_scales).as<const float>(),
        .cache_type = element(p.k_cache.dtype())};
}

ChooseKeysArgs choose_keys_args(const ChooseKeysParams& p) {
    return {.q = p.q.data(),
            .weights = p.weights.as<const float>(),
            .k_cache = p.k_cache.data(),
            .block_table = p.block_table.as<const int32_t>(),
            .cu_seqlens_q = p.cu_seqlens_q.as<const int32_t>(),
            .context_lens = p.context_lens.as<const int32_t>(),
            .slots = p.slots.as<int32_t>(),
            .scores = p.scores.as<float>(),
            .q_stride = p.q.stride(0),
            .weights_stride = stride(p.weights, 0),
            .block_table_stride = p.block_table.stride(0),
            .scores_stride = stride(p.scores, 0),
            .num_tokens = count(p.q.shape(0)),
            .num_seqs = count(p.context_lens.shape(0)),
            .num_heads = count(p.q.shape(1)),
            .head_dim = count(p.q.shape(2)),
            .block_size = count(p.k_cache.shape(2)),
            .top_k = count(p.slots.shape(1)),
            .num_score_rows = p.scores ? count(p.scores.shape(0)) : 0,
            .run_keys = p.run_keys,
            .last_runs = p.last_runs,
            .slot_heads = p.slot_heads,
            .slot_head = p.slot_head,
            .type = element(p.q.dtype()),
            .k_scales = p.k_scales.as<const float>(),
            .cache_type = element(p.k_cache.dtype())};
}

CausalConvArgs causal_conv_args(const CausalConvParams& p) {
    return {.x = p.x.data(),
            .weight = p.weight.as<const float>(),
            .bias = p.bias.as<const float>(),
            .state = p.state.as<float>(),
            .sequences = state_steps_args(p.sequences),
            .out = p.out.data(),
            .x_stride = p.x.stride(0),
            .out_stride = p.out.stride(0),
            .num_tokens = count(p.x.shape(0)),
            .channels = count(p.x.shape(1)),
            .taps = count(p.weight.shape(0)),
            .type = element(p.x.dtype()),
            .gate_in = p.gate_in.data(),
            .gate_out = p.gate_out.data(),
            .gate_in_stride = stride(p.gate_in, 0),
            .gate_out_stride = stride(p.gate_out, 0),
            .x_log = state_log_args(p.x_log),
            .gate_in_log = state_log_args(p.gate_in_log)};
}

DeltaRuleArgs delta_rule_args(const DeltaRuleParams& p) {
    return {.qkv = p.qkv.data(),
            .z = p.z.data(),
            .a = p.a.data(),
            .b = p.b.data(),
            .decay_rate = p.decay_rate.as<const float>(),
            .dt_bias = p.dt_bias.as<const float>(),
            .norm = p.norm.as<const float>(),
            .state = p.state.as<float>(),
            .sequences = state_steps_args(p.sequences),
            .out = p.out.data(),
            .qkv_stride = p.qkv.stride(0),
            .z_stride = p.z.stride(0),
            .a_stride = p.a.stride(0),
            .b_stride = p.b.stride(0),
            .out_stride = p.out.stride(0),
            .num_tokens = count(p.qkv.shape(0)),
            .num_k_heads = p.num_k_heads,
            .num_v_heads = count(p.state.shape(1)),
            .k_dim = count(p.state.shape(2)),
            .v_dim = count(p.state.shape(3)),
            .eps = p.eps,
            .type = element(p.qkv.dtype()),
            .kv_log = state_log_args(p.kv_log),
            .a_log = state_log_args(p.a_log),
            .b_log = state_log_args(p.b_log),
            .by_element = p.by_element,
            .sigmoid_gate = p.sigmoid_gate,
            .doubled_beta = p.doubled_beta,
            .lower_bound = p.lower_bound};
}

SelectiveScanArgs selective_scan_args(const SelectiveScanParams& p) {
    return {.xbc = p.xbc.data(),
            .dt = p.dt.data(),
            .decay_rate = p.decay_rate.as<const float>(),
            .dt_bias = p.dt_bias.as<const float>(),
            .skip = p.skip.as<const float>(),
            .state = p.state.as<float>(),
            .sequences = state_steps_args(p.sequences),
            .out = p.out.data(),
            .xbc_stride = p.xbc.stride(0),
            .dt_stride = p.dt.stride(0),
            .out_stride = p.out.stride(0),
            .num_tokens = count(p.xbc.shape(0)),
            .num_heads = count(p.state.shape(1)),
            .num_groups = p.num_groups,
            .state_dim = count(p.state.shape(2)),
            .head_dim = count(p.state.shape(3)),
            .dt_multiplier = p.dt_multiplier,
            .dt_min = p.dt_min,
            .dt_max = p.dt_max,
            .type = element(p.xbc.dtype()),
            .xb_log = state_log_args(p.xb_log),
            .dt_log = state_log_args(p.dt_log)};
}

LogDraftsArgs log_drafts_args(const LogDraftsParams& p) {
    LogDraftsArgs args{.parts = {},
                       .num_parts = count(static_cast<int64_t>(p.parts.size())),
                       .log = p.log.data(),
                       .log_stride = p.log.shape(2),
                       .num_rows = count(p.log.shape(1)),
                       .num_tokens = count(p.parts[0].shape(0)),
                       .sequences = state_steps_args(p.sequences),
                       .type = element(p.log.dtype())};
    for (size_t i = 0; i < p.parts.size(); ++i)
        args.parts[i] = {p.parts[i].data(), p.parts[i].stride(0), count(p.parts[i].shape(1))};
    return args;
}

GatedNormArgs gated_norm_args(const GatedNormParams& p) {
    return {.x = p.x.data(),
            .gate = p.gate.data(),
            .weight = p.weight.as<const float>(),
            .out = p.out.data(),
            .x_stride = p.x.stride(0),
            .gate_stride = p.gate.stride(0),
            .out_stride = p.out.stride(0),
            .num_tokens = count(p.x.shape(0)),
            .size = count(p.x.shape(1)),
            .group_size = p.group_size,
            .eps = p.eps,
            .gate_multiplier = p.gate_multiplier,
            .norm_first = p.norm_first,
            .type = element(p.x.dtype())};
}

}  // namespace infinilm
