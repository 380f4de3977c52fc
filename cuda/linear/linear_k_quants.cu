// linear_decode, linear_grouped and linear_prefill of weights as GGUF files have them.
#include "cuda/linear/linear_grouped.cuh"
#include "cuda/linear/linear_prefill.cuh"

namespace infinilm::cuda {

#define INFINILM_INSTANTIATE(F)                                                        \
    template cudaError_t linear_decode_as<F>(const LinearArgs&, cudaStream_t);         \
    template cudaError_t linear_grouped_as<F>(const GroupedLinearArgs&, cudaStream_t); \
    template cudaError_t linear_prefill_as<F>(const LinearArgs&, const PrefillPlan&, cudaStream_t);
INFINILM_INSTANTIATE(Q4_K)
INFINILM_INSTANTIATE(Q5_K)
INFINILM_INSTANTIATE(Q6_K)

}  // namespace infinilm::cuda
