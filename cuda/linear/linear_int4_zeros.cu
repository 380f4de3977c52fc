// linear_decode, linear_grouped and linear_prefill of int4 weights with zero points.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Int4Zeros)

}  // namespace infinilm::cuda
