// head_linear() for head_linear_cases.py. Types and formats are their numbers in core/types.h.
#include "cuda/linear/kernels.h"

using namespace infinilm::cuda;

extern "C" {
int run_head_linear(const void* x, int64_t x_stride, int64_t x_head_stride, int num_tokens, int num_heads,
                    const void* weight, int out_features, int k, int type, int format, void* out, int64_t out_stride,
                    int64_t out_head_stride) {
    HeadLinearArgs args{};
    args.x = x, args.x_stride = x_stride, args.x_head_stride = x_head_stride;
    args.num_tokens = num_tokens, args.num_heads = num_heads, args.out_features = out_features;
    args.weight.data = weight, args.weight.n = (num_heads * out_features + 7) / 8 * 8, args.weight.k = k;
    args.weight.type = static_cast<Element>(type), args.weight.format = static_cast<WeightFormat>(format);
    args.out = out, args.out_stride = out_stride, args.out_head_stride = out_head_stride;
    return head_linear(args, nullptr);
}
}
