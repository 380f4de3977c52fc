// linear_decode of weights that are stored as they are multiplied, and the choice of what runs: see linear_decode.cuh.
#include "cuda/linear/linear_decode.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) extern template cudaError_t linear_decode_as<F>(const LinearArgs&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
INFINILM_FOR_ROUNDED(INFINILM_DECLARE)
#undef INFINILM_DECLARE

// Chooses R by what the busiest block reads: rows of weights, and rows of x, once for each of its groups.
template <class T, bool kNorm, int NT>
cudaError_t run_rows(const LinearArgs& args, const DecodeDevice& device, cudaStream_t stream) {
    constexpr int kSmall = NT <= 4 ? 1 : 2, kLarge = NT <= 8 ? 2 * kSmall : kSmall;  // as registers allow
    auto cost = [&](int rows, const DecodeFit& fit) {
        return ceil_div(ceil_div(num_tiles(args.weight), rows), fit.blocks) * (16 * rows + args.num_tokens);
    };
    if (cost(kLarge, fit_decode<AsType, kNorm, NT, kLarge>(device)) <
        cost(kSmall, fit_decode<AsType, kNorm, NT, kSmall>(device)))
        return run_decode<T, AsType, kNorm, NT, kLarge>(args, device, stream);
    return run_decode<T, AsType, kNorm, NT, kSmall>(args, device, stream);
}

template <class T>
cudaError_t run_tokens(const LinearArgs& args, const DecodeDevice& device, cudaStream_t stream) {
    static_assert(max_norm_tokens(WeightFormat::as_type) == 8 * 2 && max_decode_tokens(WeightFormat::as_type) == 8 * 12,
                  "the largest numbers of token tiles");
    const int tokens = args.num_tokens;
    if (args.norm_weight)
        return tokens <= 8 ? run_rows<T, true, 1>(args, device, stream) : run_rows<T, true, 2>(args, device, stream);
    if (tokens <= 8) return run_rows<T, false, 1>(args, device, stream);
    if (tokens <= 16) return run_rows<T, false, 2>(args, device, stream);
    if (tokens <= 32) return run_rows<T, false, 4>(args, device, stream);
    if (tokens <= 64) return run_rows<T, false, 8>(args, device, stream);
    return run_rows<T, false, 12>(args, device, stream);
}

cudaError_t linear_decode(const LinearArgs& args, cudaStream_t stream) {
    const WeightFormat format = args.weight.format;
    const int most = args.norm_weight ? max_norm_tokens(format) : max_decode_tokens(format);
    if (args.num_tokens > most || args.weight.type == Element::f32) return cudaErrorInvalidValue;
    if (args.num_tokens == 0) return cudaSuccess;
    if (format != WeightFormat::as_type)
        return visit_multiplied(format, [&](auto f) { return linear_decode_as<decltype(f)>(args, stream); });
    DecodeDevice device;
    if (cudaError_t error = query(device)) return error;
    return args.weight.type == Element::bf16 ? run_tokens<bf16>(args, device, stream)
                                             : run_tokens<f16>(args, device, stream);
}

}  // namespace infinilm::cuda
