// attention(): the kernels that a step's list of work asks for (ops/attention_work.h).
#include "attention.cuh"

namespace infinilm::cuda {

cudaError_t attention(const AttentionArgs& a, const AttentionWorkArgs& work, cudaStream_t stream) {
    constexpr float kLog2E = 1.44269504088896340736f;
    const float cap = a.score_cap / a.softmax_scale;
    const AttentionKernelArgs p{a,
                                a.num_heads / a.num_kv_heads,
                                a.softmax_scale * kLog2E,
                                cap,
                                -2 * cap,
                                2 * kLog2E / cap,
                                Divider(a.block_size),
                                work};
    if (work.most_decode > 0)
        if (cudaError_t error = launch_attention_decode(p, stream)) return error;
    return work.num_prefill > 0 ? launch_attention_prefill(p, stream) : cudaSuccess;
}

}  // namespace infinilm::cuda
