// linear_prefill of weights that are stored as they are multiplied, and the choice of what runs: see
// linear_prefill.cuh.
#include "linear_prefill.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) extern template cudaError_t linear_prefill_as<F>(const LinearArgs&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
#undef INFINILM_DECLARE

cudaError_t linear_prefill(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    if (args.weight.format != WeightFormat::as_type)
        return visit_quantised(args.weight.format,
                               [&](auto f) { return linear_prefill_as<decltype(f)>(args, stream); });
    int num_sms = 0;
    if (cudaError_t error = device_sms(num_sms)) return error;
    const bool small = choose_tile_tokens(args, num_sms) == 64;
    if (args.weight.type == Type::bf16)
        return small ? launch_prefill<bf16, AsType, 64>(args, stream) : launch_prefill<bf16, AsType, 128>(args, stream);
    return small ? launch_prefill<f16, AsType, 64>(args, stream) : launch_prefill<f16, AsType, 128>(args, stream);
}

}  // namespace infinilm::cuda
