// A C function over the launchers of the linears, for linear_prefill_cases.py. Types and orders are their numbers in
// kernels.h.
#include "kernels.h"

using namespace infinilm::cuda;

// kernel: 0 linear_prefill, 1 linear_sm90, 2 linear_split_sm90, 3 linear_decode.
extern "C" int run_linear(int kernel, const void* x, int64_t x_stride, int num_tokens, const void* data,
                          const float* bias, int n, int k, int type, int order, int head_dim, const void* residual,
                          int64_t residual_stride, void* out, int64_t out_stride, int out_float32) {
    LinearArgs args;
    args.x = x, args.x_stride = x_stride, args.num_tokens = num_tokens;
    args.weight.data = data, args.weight.bias = bias, args.weight.n = n, args.weight.k = k;
    args.weight.type = static_cast<Type>(type), args.weight.order = static_cast<RowOrder>(order);
    args.weight.head_dim = head_dim;
    args.residual = residual, args.residual_stride = residual_stride;
    args.out = out, args.out_stride = out_stride, args.out_float32 = out_float32 != 0;
    constexpr decltype(&linear_prefill) kernels[] = {linear_prefill, linear_sm90, linear_split_sm90, linear_decode};
    return kernels[kernel](args, nullptr);
}
