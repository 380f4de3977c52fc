// linear_decode, linear_grouped and linear_prefill of fp8 and fp8_blocks weights beside inputs of e4m3.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_FOR_ROUNDED(INFINILM_INSTANTIATE_LINEARS)

}  // namespace infinilm::cuda
