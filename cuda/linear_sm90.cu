// linear_sm90 of weights that are stored as they are multiplied, and the choice of what runs: see linear_sm90.cuh.
#include "linear_sm90.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) extern template cudaError_t linear_sm90_as<F>(const LinearArgs&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
#undef INFINILM_DECLARE

cudaError_t linear_sm90(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    if (args.weight.format != WeightFormat::as_type)
        return visit_quantised(args.weight.format, [&](auto f) { return linear_sm90_as<decltype(f)>(args, stream); });
    int num_sms = 0;
    if (cudaError_t error = num_sms_of_device(num_sms)) return error;
    const bool small = choose_tile_tokens(args, num_sms) == 64;
    if (args.weight.type == Type::bf16)
        return small ? launch_sm90<bf16, AsType, 64>(args, num_sms, stream)
                     : launch_sm90<bf16, AsType, 128>(args, num_sms, stream);
    return small ? launch_sm90<f16, AsType, 64>(args, num_sms, stream)
                 : launch_sm90<f16, AsType, 128>(args, num_sms, stream);
}

}  // namespace infinilm::cuda
