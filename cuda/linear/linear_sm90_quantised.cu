// linear_sm90 of quantised weights.
#include "cuda/linear/linear_sm90.cuh"

namespace infinilm::cuda {

#define INFINILM_INSTANTIATE(F) \
    template cudaError_t linear_sm90_as<F>(const LinearArgs&, const HopperPlan&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_INSTANTIATE)
INFINILM_FOR_ROUNDED(INFINILM_INSTANTIATE)

}  // namespace infinilm::cuda
