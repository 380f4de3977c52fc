// linear_sm90 of weights that are stored as they are multiplied, and the choice of what runs: see linear_sm90.cuh.
#include "cuda/linear/linear_sm90.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) \
    extern template cudaError_t linear_sm90_as<F>(const LinearArgs&, const HopperPlan&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
INFINILM_FOR_ROUNDED(INFINILM_DECLARE)
#undef INFINILM_DECLARE

cudaError_t linear_sm90(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const PackedWeight& w = args.weight;
    if (args.out_float32 && joins_gate_up(args)) {                  // which no model asks for
        if (rounds_inputs(w.format)) return cudaErrorInvalidValue;  // whose bits would be others
        return linear_prefill(args, stream);
    }
    int num_sms = 0;
    if (cudaError_t error = device_sms(num_sms)) return error;
    const HopperPlan plan = choose_sm90(args, num_sms);
    if (plan.tokens == 0) return cudaErrorInvalidValue;  // args.splits, which k has no units for
    if (w.format == WeightFormat::as_type) return linear_sm90_as<AsType>(args, plan, stream);
    return visit_multiplied(w.format, [&](auto f) { return linear_sm90_as<decltype(f)>(args, plan, stream); });
}

}  // namespace infinilm::cuda
