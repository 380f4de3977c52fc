// linear_sm90 of weights that are stored as they are multiplied, and the choice of what runs: see linear_sm90.cuh.
#include "linear_sm90.cuh"

namespace infinilm::cuda {

extern template cudaError_t linear_sm90_as<Int8>(const LinearArgs&, cudaStream_t);
extern template cudaError_t linear_sm90_as<Int4<32>>(const LinearArgs&, cudaStream_t);
extern template cudaError_t linear_sm90_as<Fp8>(const LinearArgs&, cudaStream_t);

cudaError_t linear_sm90(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    switch (args.weight.format) {
        case WeightFormat::int8: return linear_sm90_as<Int8>(args, stream);
        case WeightFormat::int4: return linear_sm90_as<Int4<32>>(args, stream);
        case WeightFormat::fp8: return linear_sm90_as<Fp8>(args, stream);
        case WeightFormat::as_type: break;
    }
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
