#include "cuda/attention/attention_host.h"

#include "ops/attention_work.h"

namespace infinilm::cuda {

void check_head(int head_dim) {
    require(head_dim % 8 == 0 && head_dim <= attention_widest_head, "head_dim is ", head_dim,
            ": on CUDA it must be a multiple of 8, at most ", attention_widest_head, "; use device='cpu'");
}

}  // namespace infinilm::cuda
