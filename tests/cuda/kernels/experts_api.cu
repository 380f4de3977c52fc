// C functions over the launchers of experts.cu, linear_grouped.cu and linear_grouped_sm90.cu for experts_cases.py.
// Types, orders and formats are their numbers in core/types.h.
#include "cuda/experts/kernels.h"
#include "cuda/linear/kernels.h"

using namespace infinilm::cuda;

extern "C" {

int run_route(const float* logits, int64_t logits_stride, const float* bias, int* ids, int64_t ids_stride,
              float* weights, int64_t weights_stride, int num_tokens, int num_experts, int top_k, int sigmoid,
              int normalize, float scale, int num_groups, int top_groups, int group_best, const float* expert_scales) {
    return route({logits, bias, ids, weights, logits_stride, ids_stride, weights_stride, num_tokens, num_experts, top_k,
                  sigmoid != 0, normalize != 0, scale, num_groups, top_groups, group_best, expert_scales, false, 0},
                 nullptr);
}

int run_group_rows(const int* ids, int64_t ids_stride, int num_tokens, int top_k, int num_experts, int tile,
                   int* tokens, int* part_of, int4* items, int* num_items) {
    return group_rows({ids, ids_stride, num_tokens, top_k, num_experts, tile, tokens, part_of, items, num_items},
                      nullptr);
}

// maps: [count * weight_map_bytes]. All in memory of the host.
int run_weight_maps(const GroupWeight* weights, int count, int n, int k, int type, int format, void* maps) {
    PackedWeight shape;
    shape.n = n, shape.k = k;
    shape.type = static_cast<Element>(type), shape.format = static_cast<WeightFormat>(format);
    return make_weight_maps(shape, weights, count, maps);
}

// dense: the one weight of a linear, which all num_tokens rows go through; else those of the items, by wgmma with maps.
// joined: 0 gate_up in one, 1 gate_up apart, 2 gate_in_out.
int run_linear(const void* dense, const float* dense_bias, const GroupWeight* weights, const int4* items,
               const int* num_items, int most_items, int tile, const int* x_rows, const int* out_rows, const void* x,
               int64_t x_stride, int num_tokens, int n, int k, int type, int order, int format, const void* residual,
               int64_t residual_stride, void* out, int64_t out_stride, const void* maps, int joined) {
    GroupedLinearArgs args{};
    LinearArgs& linear = args.linear;
    linear.x = x, linear.x_stride = x_stride, linear.num_tokens = num_tokens;
    linear.weight.data = dense, linear.weight.bias = dense_bias, linear.weight.n = n, linear.weight.k = k;
    linear.weight.type = static_cast<Element>(type), linear.weight.order = static_cast<RowOrder>(order);
    linear.weight.format = static_cast<WeightFormat>(format);
    linear.residual = residual, linear.residual_stride = residual_stride;
    linear.out = out, linear.out_stride = out_stride;
    linear.gate_up_apart = joined == 1, linear.gate_in_out = joined == 2;
    if (dense) return (linear.weight.type == Element::f32 ? linear_f32 : linear_decode)(linear, nullptr);
    args.weights = weights, args.items = items, args.num_items = num_items, args.most_items = most_items;
    args.tile = tile, args.x_rows = x_rows, args.out_rows = out_rows;
    args.maps = maps;
    return (maps ? linear_grouped_sm90 : linear_grouped)(args, nullptr);
}

int run_weigh(const void* x, int64_t x_stride, const int* part_of, const float* weights, int64_t weights_stride,
              void* out, int64_t out_stride, int num_tokens, int top_k, int hidden_size, int type) {
    return weigh({x, part_of, weights, out, x_stride, weights_stride, out_stride, num_tokens, top_k, hidden_size,
                  static_cast<Element>(type)},
                 nullptr);
}

int run_combine(const void* parts, int64_t parts_stride, const int* part_of, const float* weights,
                int64_t weights_stride, const void* shared, int64_t shared_stride, const float* shared_gate,
                int64_t shared_gate_stride, const void* residual, int64_t residual_stride, void* out,
                int64_t out_stride, int num_tokens, int top_k, int hidden_size, int type) {
    return combine(
        {parts, part_of, weights, shared, shared_gate, residual, out, parts_stride, weights_stride, shared_stride,
         shared_gate_stride, residual_stride, out_stride, num_tokens, top_k, hidden_size, static_cast<Element>(type)},
        nullptr);
}
}
