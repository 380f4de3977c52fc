// linear_grouped of weights that are stored as they are multiplied, and the choice of what runs: see
// linear_grouped.cuh.
#include "linear_grouped.cuh"

namespace infinilm::cuda {

extern template cudaError_t linear_grouped_as<Int8>(const GroupedLinearArgs&, cudaStream_t);
extern template cudaError_t linear_grouped_as<Int4<32>>(const GroupedLinearArgs&, cudaStream_t);
extern template cudaError_t linear_grouped_as<Fp8>(const GroupedLinearArgs&, cudaStream_t);

cudaError_t linear_grouped(const GroupedLinearArgs& args, cudaStream_t stream) {
    if (args.tile != 8 && args.tile != 32 && args.tile != 64) return cudaErrorInvalidValue;
    if (args.most_items == 0) return cudaSuccess;
    if (args.linear.weight.type == Type::f32) return linear_grouped_f32(args, stream);
    switch (args.linear.weight.format) {
        case WeightFormat::int8: return linear_grouped_as<Int8>(args, stream);
        case WeightFormat::int4: return linear_grouped_as<Int4<32>>(args, stream);
        case WeightFormat::fp8: return linear_grouped_as<Fp8>(args, stream);
        case WeightFormat::as_type: break;
    }
    return linear_grouped_as<AsType>(args, stream);
}

}  // namespace infinilm::cuda
