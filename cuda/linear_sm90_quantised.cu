// linear_sm90 of quantised weights.
#include "linear_sm90.cuh"

namespace infinilm::cuda {

template cudaError_t linear_sm90_as<Int8>(const LinearArgs&, cudaStream_t);
template cudaError_t linear_sm90_as<Int4<32>>(const LinearArgs&, cudaStream_t);
template cudaError_t linear_sm90_as<Fp8>(const LinearArgs&, cudaStream_t);

}  // namespace infinilm::cuda
