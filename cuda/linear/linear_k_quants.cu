// linear_decode, linear_grouped and linear_prefill of weights of K-quants of GGUF files.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Q2_K)
INFINILM_INSTANTIATE_LINEARS(Q3_K)
INFINILM_INSTANTIATE_LINEARS(Q4_K)
INFINILM_INSTANTIATE_LINEARS(Q5_K)
INFINILM_INSTANTIATE_LINEARS(Q6_K)

}  // namespace infinilm::cuda
