// linear_decode, linear_grouped and linear_prefill of fp4 and nvfp4 weights.
#include "cuda/linear/instantiate.cuh"

namespace infinilm::cuda {

INFINILM_INSTANTIATE_LINEARS(Fp4)
INFINILM_INSTANTIATE_LINEARS(Nvfp4)

}  // namespace infinilm::cuda
