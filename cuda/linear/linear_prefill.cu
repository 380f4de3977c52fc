// linear_prefill of weights that are stored as they are multiplied, and the choice of what runs: see
// linear_prefill.cuh.
#include "cuda/linear/linear_prefill.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) \
    extern template cudaError_t linear_prefill_as<F>(const LinearArgs&, const PrefillPlan&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
INFINILM_FOR_ROUNDED(INFINILM_DECLARE)
#undef INFINILM_DECLARE

cudaError_t linear_prefill(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    int num_sms = 0;
    if (cudaError_t error = device_sms(num_sms)) return error;
    const PrefillPlan plan = choose_prefill(args, num_sms);
    if (plan.tokens == 0) return cudaErrorInvalidValue;  // args.splits, which k or the workspace has no room for
    if (args.weight.format != WeightFormat::as_type)
        return visit_multiplied(args.weight.format,
                                [&](auto f) { return linear_prefill_as<decltype(f)>(args, plan, stream); });
    if (plan.tokens == 64) return linear_prefill_as<AsType>(args, plan, stream);
    return args.weight.type == Element::bf16 ? launch_prefill<bf16, AsType, 128>(args, 1, stream)
                                             : launch_prefill<f16, AsType, 128>(args, 1, stream);
}

}  // namespace infinilm::cuda
