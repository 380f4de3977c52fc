// linear_decode, linear_grouped and linear_prefill of int4 weights.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Int4)

}  // namespace infinilm::cuda
