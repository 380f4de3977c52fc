// linear_decode, linear_grouped and linear_prefill of weights with a float16 scale and minimum for each 32 columns.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Q4_1)
INFINILM_INSTANTIATE_LINEARS(Q5_1)

}  // namespace infinilm::cuda
