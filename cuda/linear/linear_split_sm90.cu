// linear_split_sm90 of the formats that it is the fastest for (linear_choice.h).
#include "cuda/linear/linear_split_sm90.cuh"

namespace infinilm::cuda {

cudaError_t linear_split_sm90(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    switch (args.weight.format) {
        case WeightFormat::as_type: return linear_split_sm90_as<AsType>(args, stream);
        case WeightFormat::int8: return linear_split_sm90_as<Int8>(args, stream);
        case WeightFormat::fp8_pairs: return linear_split_sm90_as<Fp8Pairs>(args, stream);
        case WeightFormat::fp8_block_pairs: return linear_split_sm90_as<Fp8BlockPairs>(args, stream);
        case WeightFormat::fp8: return linear_split_sm90_as<Fp8>(args, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace infinilm::cuda
