// attention(): the kernels that a step's list of work asks for (ops/attention_work.h).
#include "attention.cuh"

namespace infinilm::cuda {

cudaError_t attention(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    const AttentionKernelArgs p(a, work);
    if (work.most_decode > 0)
        if (cudaError_t error = launch_attention_decode(p, stream)) return error;
    return work.num_prefill > 0 ? launch_attention_prefill(p, stream) : cudaSuccess;
}

}  // namespace infinilm::cuda
