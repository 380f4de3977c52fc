// linear_sm90 of weights that are stored as they are multiplied, and the choice of what runs: see linear_sm90.cuh.
#include "linear_sm90.cuh"

namespace infinilm::cuda {

#define INFINILM_DECLARE(F) extern template cudaError_t linear_sm90_as<F>(const LinearArgs&, cudaStream_t);
INFINILM_FOR_FORMATS(INFINILM_DECLARE)
#undef INFINILM_DECLARE

cudaError_t linear_sm90(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    if (args.out_float32 && joins_gate_up(args)) return linear_prefill(args, stream);  // which nobody asks for
    if (args.weight.format != WeightFormat::as_type)
        return visit_quantised(args.weight.format, [&](auto f) { return linear_sm90_as<decltype(f)>(args, stream); });
    int num_sms = 0;
    if (cudaError_t error = device_sms(num_sms)) return error;
    const HopperTiles tiles = choose_hopper_tiles(args, num_sms);
    auto launch_as = [&](auto type) {
        using T = decltype(type);
        switch (tiles.tokens) {
            case 64: return launch_sm90<T, AsType, 64>(args, tiles.same_rows, stream);
            case 128: return launch_sm90<T, AsType, 128>(args, tiles.same_rows, stream);
            case 176: return launch_sm90<T, AsType, 176>(args, tiles.same_rows, stream);
            default: return launch_sm90<T, AsType, 192>(args, tiles.same_rows, stream);
        }
    };
    return args.weight.type == Type::bf16 ? launch_as(bf16{}) : launch_as(f16{});
}

}  // namespace infinilm::cuda
