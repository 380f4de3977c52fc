// linear_decode, linear_grouped and linear_prefill of fp8 weights.
#include "cuda/linear/linear_grouped.cuh"
#include "cuda/linear/linear_prefill.cuh"

namespace infinilm::cuda {

template cudaError_t linear_decode_as<Fp8>(const LinearArgs&, cudaStream_t);
template cudaError_t linear_grouped_as<Fp8>(const GroupedLinearArgs&, cudaStream_t);
template cudaError_t linear_prefill_as<Fp8>(const LinearArgs&, const PrefillPlan&, cudaStream_t);

}  // namespace infinilm::cuda
