// linear_decode, linear_grouped and linear_prefill of int8 weights in groups.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Int8Groups)

}  // namespace infinilm::cuda
