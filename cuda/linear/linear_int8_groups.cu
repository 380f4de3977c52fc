// linear_decode, linear_grouped and linear_prefill of int8 weights in groups.
#include "cuda/linear/linear_grouped.cuh"
#include "cuda/linear/linear_prefill.cuh"

namespace infinilm::cuda {

template cudaError_t linear_decode_as<Int8Groups>(const LinearArgs&, cudaStream_t);
template cudaError_t linear_grouped_as<Int8Groups>(const GroupedLinearArgs&, cudaStream_t);
template cudaError_t linear_prefill_as<Int8Groups>(const LinearArgs&, const PrefillPlan&, cudaStream_t);

}  // namespace infinilm::cuda
