#include "cuda/linear/linear_host.h"

namespace infinilm::cuda {

cudaError_t run_head_linear(const HeadLinearParams& p, cudaStream_t stream) {
    const bool aligned = p.x.stride(0) % 8 == 0 && p.x.stride(1) % 8 == 0 &&
                         reinterpret_cast<uintptr_t>(p.x.data()) % (size_bytes(p.x.dtype()) == 4 ? 32 : 16) == 0;
    require(aligned && p.x.shape(2) % 8 == 0, "linears of heads of ", p.x.shape(2),
            " inputs: on CUDA the parts of a query and of a latent must be multiples of 8; use device='cpu'");
    return head_linear({.x = p.x.data(),
                        .x_stride = p.x.stride(0),
                        .x_head_stride = p.x.stride(1),
                        .num_tokens = count(p.x.shape(0)),
                        .num_heads = count(p.x.shape(1)),
                        .out_features = count(p.out.shape(2)),
                        .weight = packed(p.weight),
                        .out = p.out.data(),
                        .out_stride = p.out.stride(0),
                        .out_head_stride = p.out.stride(1)},
                       stream);
}

}  // namespace infinilm::cuda
