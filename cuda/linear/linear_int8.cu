// linear_decode, linear_grouped and linear_prefill of int8 weights.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Int8)

}  // namespace infinilm::cuda
