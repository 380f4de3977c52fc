// linear_decode, linear_grouped and linear_prefill of fp8 weights.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Fp8)

}  // namespace infinilm::cuda
