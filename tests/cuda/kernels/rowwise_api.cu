// C functions over the launchers of the row-wise kernels, for rowwise_cases.py. Types and orders are their numbers in
// core/types.h.
#include "cuda/attention/kernels.h"
#include "cuda/linear/kernels.h"
#include "cuda/rows/kernels.h"

using namespace infinilm;
using namespace infinilm::cuda;

static PackedWeight packed(const void* data, const float* bias, int n, int k, int type, int order, int head_dim) {
    PackedWeight w;
    w.data = data, w.bias = bias, w.n = n, w.k = k;
    w.type = static_cast<Element>(type), w.order = static_cast<RowOrder>(order), w.head_dim = head_dim;
    return w;
}

extern "C" {

int norm_rows(const void* x, void* residual, const float* weight, const float* bias, float* mean_square, void* out,
              int64_t x_stride, int64_t residual_stride, int64_t out_stride, int num_tokens, int num_groups,
              int hidden_size, float eps, float multiplier, float scale, int type) {
    return rms_norm({x, residual, weight, bias, mean_square, out, x_stride, residual_stride, out_stride, num_tokens,
                     num_groups, hidden_size, eps, multiplier, scale, static_cast<Element>(type)},
                    nullptr);
}

int make_rope_table(const int* positions, const float* inv_freq, const int* axes, float* cos_sin, int num_tokens,
                    int half, float attention_factor, float scale_beta, int scale_positions, int scale_offset) {
    return rope_table({positions, inv_freq, axes, cos_sin, num_tokens, half, attention_factor, scale_beta,
                       scale_positions, scale_offset},
                      nullptr);
}

int rope_store(void* qkv, int64_t qkv_stride, int num_tokens, const float* cos_sin, const float* q_norm,
               const float* k_norm, const float* v_norm, const int64_t* slot_mapping, void* k_cache, void* v_cache,
               const void* q_turned, int64_t q_turned_stride, int64_t q_turned_head_stride, int num_heads,
               int num_kv_heads, int head_dim, int value_dim, int rotary_dim, int block_size, float eps, int type,
               float* k_scales, float* v_scales, int cache_type) {
    const RopeStoreArgs rope{cos_sin,
                             cos_sin,
                             q_norm,
                             k_norm,
                             v_norm,
                             slot_mapping,
                             k_cache,
                             v_cache,
                             q_turned,
                             q_turned_stride,
                             q_turned_head_stride,
                             num_heads,
                             num_kv_heads,
                             head_dim,
                             value_dim,
                             rotary_dim,
                             block_size,
                             eps,
                             k_scales,
                             v_scales,
                             static_cast<Element>(cache_type)};
    return qk_norm_rope_store_kv({qkv, qkv_stride, num_tokens, rope, static_cast<Element>(type)}, nullptr);
}

int embed(const int* ids, const void* table, int n, int k, int type, void* out, int64_t out_stride, int num_tokens,
          float multiplier) {
    return embedding({ids, 0, false, packed(table, nullptr, n, k, type, 0, 0), out, out_stride, num_tokens, multiplier},
                     nullptr);
}

int multiply_gate(const void* gate_up, const void* up, void* out, int64_t gate_up_stride, int64_t up_stride,
                  int64_t out_stride, int num_tokens, int intermediate_size, int activation, int type, float alpha_p,
                  float alpha_n, float limit, int group) {
    return act_mul({gate_up, up, out, gate_up_stride, up_stride, out_stride, num_tokens, intermediate_size,
                    static_cast<Activation>(activation), static_cast<Element>(type), alpha_p, alpha_n, limit, group},
                   nullptr);
}

int cap_rows(float* x, int64_t x_stride, int num_rows, int n, float cap) {
    return soft_cap({x, x_stride, num_rows, n, cap}, nullptr);
}

int gather(const void* x, const int* rows, void* out, int64_t x_stride, int64_t out_stride, int num_rows,
           int hidden_size, int type) {
    return gather_rows({x, rows, out, x_stride, out_stride, num_rows, hidden_size, static_cast<Element>(type)},
                       nullptr);
}

int clip_rows(const void* x, int64_t x_stride, void* out, int64_t out_stride, int num_rows, int n, float low,
              float high, int type) {
    return clip({x, out, x_stride, out_stride, num_rows, n, low, high, static_cast<Element>(type)}, nullptr);
}

int join(const void* parts, void* out, int64_t out_stride, int num_parts, int num_rows, int columns) {
    return join_columns({parts, out, out_stride, num_parts, num_rows, columns}, nullptr);
}

int update(const int* previous_ids, const int* rows, int* ids, int num_tokens, int* table, const int* entries,
           int num_entries) {
    return update_step(
        {previous_ids, rows, ids, num_tokens, table, reinterpret_cast<const int2*>(entries), num_entries}, nullptr);
}

int add_parts(const void* parts, void* out, int num_parts, int64_t size, int type) {
    return sum_parts({parts, out, num_parts, size, static_cast<Element>(type)}, nullptr);
}

int convert_elements(const void* src, int src_type, void* dst, int dst_type, int64_t count) {
    return convert({src, static_cast<Element>(src_type), dst, static_cast<Element>(dst_type), count}, nullptr);
}

int pack_rows(const void* src, int src_type, int first, int rows, void* data, int n, int k, int type, int order,
              int head_dim) {
    return pack_weight(
        {src, static_cast<Element>(src_type), first, rows, packed(data, nullptr, n, k, type, order, head_dim)},
        nullptr);
}

int multiply_f32(const float* x, int64_t x_stride, int num_tokens, const float* weight, const float* bias, int n, int k,
                 int order, int activation, const float* residual, int64_t residual_stride, float* out,
                 int64_t out_stride) {
    LinearArgs args{};
    args.x = x, args.x_stride = x_stride, args.num_tokens = num_tokens;
    args.weight = packed(weight, bias, n, k, static_cast<int>(Element::f32), order, 0);
    args.residual = residual, args.residual_stride = residual_stride, args.out = out, args.out_stride = out_stride;
    args.activation = static_cast<Activation>(activation);
    return linear_f32(args, nullptr);
}

}  // extern "C"
