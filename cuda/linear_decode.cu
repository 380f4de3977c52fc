// linear_decode of weights that are stored as they are multiplied, and the choice of what runs: see linear_decode.cuh.
#include "linear_decode.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) extern template cudaError_t linear_decode_as<F>(const LinearArgs&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
#undef INFINILM_DECLARE

// Chooses R: more rows share the columns of x, as long as there is a group of them for each SM.
template <class T, bool kNorm, int NT>
cudaError_t run_rows(const LinearArgs& args, const DecodeDevice& device, cudaStream_t stream) {
    constexpr int kSmall = NT <= 4 ? 1 : 2, kLarge = NT == 12 && kNorm ? kSmall : 2 * kSmall;  // as registers allow
    if (ceil_div(num_tiles(args.weight), kLarge) >= device.sms)
        return run_decode<T, AsType, kNorm, NT, kLarge>(args, device, stream);
    return run_decode<T, AsType, kNorm, NT, kSmall>(args, device, stream);
}

template <class T, bool kNorm>
cudaError_t run_tokens(const LinearArgs& args, const DecodeDevice& device, cudaStream_t stream) {
    if (args.num_tokens <= 8) return run_rows<T, kNorm, 1>(args, device, stream);
    if (args.num_tokens <= 16) return run_rows<T, kNorm, 2>(args, device, stream);
    if (args.num_tokens <= 32) return run_rows<T, kNorm, 4>(args, device, stream);
    if (args.num_tokens <= 64) return run_rows<T, kNorm, 8>(args, device, stream);
    static_assert(max_decode_tokens(WeightFormat::as_type) == 8 * 12, "the largest number of token tiles");
    return run_rows<T, kNorm, 12>(args, device, stream);
}

cudaError_t linear_decode(const LinearArgs& args, cudaStream_t stream) {
    const WeightFormat format = args.weight.format;
    const int most = args.norm_weight ? max_norm_tokens(format) : max_decode_tokens(format);
    if (args.num_tokens > most || args.weight.type == Type::f32) return cudaErrorInvalidValue;
    if (args.num_tokens == 0) return cudaSuccess;
    if (format != WeightFormat::as_type)
        return visit_quantised(format, [&](auto f) { return linear_decode_as<decltype(f)>(args, stream); });
    DecodeDevice device;
    if (cudaError_t error = query(device)) return error;
    auto run_type = [&](auto t) {
        using T = decltype(t);
        return args.norm_weight ? run_tokens<T, true>(args, device, stream)
                                : run_tokens<T, false>(args, device, stream);
    };
    return args.weight.type == Type::bf16 ? run_type(bf16{}) : run_type(f16{});
}

}  // namespace infinilm::cuda
