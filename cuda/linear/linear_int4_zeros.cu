// linear_decode, linear_grouped and linear_prefill of int4 weights with zero points.
#include "cuda/linear/linear_grouped.cuh"
#include "cuda/linear/linear_prefill.cuh"

namespace infinilm::cuda {

template cudaError_t linear_decode_as<Int4Zeros>(const LinearArgs&, cudaStream_t);
template cudaError_t linear_grouped_as<Int4Zeros>(const GroupedLinearArgs&, cudaStream_t);
template cudaError_t linear_prefill_as<Int4Zeros>(const LinearArgs&, const PrefillPlan&, cudaStream_t);

}  // namespace infinilm::cuda
