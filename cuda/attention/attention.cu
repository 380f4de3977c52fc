// attention(): the kernels that a step's list of work asks for (ops/attention_work.h).
#include "cuda/attention/attention.cuh"

namespace infinilm::cuda {

cudaError_t attention(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    const AttentionKernelArgs p(a, work);
    if (work.most_decode > 0)
        if (cudaError_t error = launch_attention_decode(p, stream)) return error;
    if (work.num_prefill == 0) return cudaSuccess;
    return AttentionHeads{a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim}.is_wide()
               ? launch_attention_wide(p, stream)
               : launch_attention_prefill(p, stream);
}

}  // namespace infinilm::cuda
