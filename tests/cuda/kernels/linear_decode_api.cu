// C functions of linear_decode and linear_split_sm90 for the tests, and the norm of rows that its prologue must equal.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/linear/kernels.h"

namespace infinilm::cuda {

template <class T>
__global__ void __launch_bounds__(32)
    norm_rows_kernel(const T* x, int x_stride, const float* weight, T* out, int width, float eps) {
    begin_kernel();
    const T* row = x + static_cast<int64_t>(blockIdx.x) * x_stride;
    const float inverse = row_inverse_rms(row, width, eps);
    for (int i = static_cast<int>(lane_id()); i < width; i += 32)
        out[static_cast<int64_t>(blockIdx.x) * x_stride + i] =
            from_float<T>(normed(to_float(row[i]), inverse, weight[i]));
}

// x, out: [num_tokens, width], rows x_stride apart.
template <class T>
int norm_rows(const void* x, int x_stride, const float* weight, void* out, int num_tokens, int width, float eps) {
    const LaunchConfig config{dim3(static_cast<unsigned>(num_tokens)), dim3(32)};
    return launch<norm_rows_kernel<T>>(config, static_cast<const T*>(x), x_stride, weight, static_cast<T*>(out), width,
                                       eps);
}

}  // namespace infinilm::cuda

using namespace infinilm;
using namespace infinilm::cuda;

extern "C" {
// kernel: 0 linear_decode, 1 linear_split_sm90. What follows has_rope is read only with it.
int run_linear_decode(int kernel, int type, const void* x, int x_stride, int num_tokens, const void* weight,
                      const float* bias, int n, int k, int order, int head_dim, const float* norm_weight, float eps,
                      const void* residual, int residual_stride, void* out, int out_stride, int out_float32,
                      int has_rope, const float* cos_sin, const int64_t* slot_mapping, void* k_cache, void* v_cache,
                      int num_heads, int num_kv_heads, int block_size) {
    LinearArgs args;
    args.x = x, args.x_stride = x_stride, args.num_tokens = num_tokens;
    args.weight = {weight, bias, n, k, static_cast<Element>(type), static_cast<RowOrder>(order), head_dim};
    args.norm_weight = norm_weight, args.norm_eps = eps;
    args.residual = residual, args.residual_stride = residual_stride;
    args.out = out, args.out_stride = out_stride, args.out_float32 = out_float32 != 0;
    args.has_rope = has_rope != 0;
    RopeStoreArgs& rope = args.rope;
    rope.cos_sin = rope.q_cos_sin = cos_sin, rope.slot_mapping = slot_mapping;
    rope.k_cache = k_cache, rope.v_cache = v_cache;
    rope.num_heads = num_heads, rope.num_kv_heads = num_kv_heads, rope.head_dim = rope.rotary_dim = head_dim;
    rope.block_size = block_size, rope.eps = eps;
    return (kernel == 0 ? linear_decode : linear_split_sm90)(args, nullptr);
}
int run_norm_rows(int type, const void* x, int x_stride, const float* weight, void* out, int num_tokens, int width,
                  float eps) {
    return static_cast<Element>(type) == Element::bf16
               ? norm_rows<bf16>(x, x_stride, weight, out, num_tokens, width, eps)
               : norm_rows<f16>(x, x_stride, weight, out, num_tokens, width, eps);
}
}
