// linear_prefill of weights that are stored as they are multiplied, and the choice of what runs: see
// linear_prefill.cuh.
#include "linear_prefill.cuh"

namespace infinilm::cuda {

extern template cudaError_t linear_prefill_as<Int8>(const LinearArgs&, cudaStream_t);
extern template cudaError_t linear_prefill_as<Int4<32>>(const LinearArgs&, cudaStream_t);
extern template cudaError_t linear_prefill_as<Fp8>(const LinearArgs&, cudaStream_t);

cudaError_t linear_prefill(const LinearArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    switch (args.weight.format) {
        case WeightFormat::int8: return linear_prefill_as<Int8>(args, stream);
        case WeightFormat::int4: return linear_prefill_as<Int4<32>>(args, stream);
        case WeightFormat::fp8: return linear_prefill_as<Fp8>(args, stream);
        case WeightFormat::as_type: break;
    }
    int device = 0, num_sms = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)) return error;
    const bool small = choose_tile_tokens(args, num_sms) == 64;
    if (args.weight.type == Type::bf16)
        return small ? launch_prefill<bf16, AsType, 64>(args, stream) : launch_prefill<bf16, AsType, 128>(args, stream);
    return small ? launch_prefill<f16, AsType, 64>(args, stream) : launch_prefill<f16, AsType, 128>(args, stream);
}

}  // namespace infinilm::cuda
