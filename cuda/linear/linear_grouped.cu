// linear_grouped of weights that are stored as they are multiplied, and the choice of what runs: see
// linear_grouped.cuh.
#include "cuda/linear/linear_grouped.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) extern template cudaError_t linear_grouped_as<F>(const GroupedLinearArgs&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
INFINILM_FOR_ROUNDED(INFINILM_DECLARE)
#undef INFINILM_DECLARE

cudaError_t linear_grouped(const GroupedLinearArgs& args, cudaStream_t stream) {
    if (args.tile != 8 && args.tile != 32 && args.tile != 64) return cudaErrorInvalidValue;
    if (args.most_items == 0) return cudaSuccess;
    if (args.linear.weight.type == Element::f32) return linear_grouped_f32(args, stream);
    if (args.linear.weight.format != WeightFormat::as_type)
        return visit_multiplied(args.linear.weight.format,
                                [&](auto f) { return linear_grouped_as<decltype(f)>(args, stream); });
    return linear_grouped_as<AsType>(args, stream);
}

}  // namespace infinilm::cuda
