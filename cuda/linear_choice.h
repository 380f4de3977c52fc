// Which kernel a linear takes. All give a row the same bits (linear.cuh), so what is chosen is time alone, as it was
// measured on an H100 (docs/kernels.md).
#pragma once

#include "kernels.h"

namespace infinilm::cuda {

#ifndef INFINILM_SM90  // whether the build has the kernels of Hopper
#define INFINILM_SM90 0
#endif

enum class LinearKernel { f32, decode, split_sm90, sm90, prefill };

// num_sms: of the device. Those of Hopper are not in every build.
inline LinearKernel choose_linear(const LinearArgs& args, bool is_hopper, int num_sms) {
    const PackedWeight& w = args.weight;
    const int tokens = args.num_tokens;
    if (w.type == Type::f32) return LinearKernel::f32;
    if (!INFINILM_SM90 || !is_hopper)
        return tokens <= max_decode_tokens(w.format) ? LinearKernel::decode : LinearKernel::prefill;
    const bool is_as_type = w.format == WeightFormat::as_type;
    const bool splits = is_as_type || w.format == WeightFormat::int8 || w.format == WeightFormat::fp8;
    if (tokens <= (is_as_type ? 16 : 32)) return LinearKernel::decode;
    // Tiles of 128 rows are to linear_sm90 what SMs read; two fifths of them read almost as fast as memory does.
    const int tiles = (num_tiles(w) + 7) / 8;
    if (tokens <= 64 && !splits && (args.out_float32 || 5 * tiles < 2 * num_sms)) return LinearKernel::decode;
    const bool is_small = tokens <= 64 ? 5 * tiles < 2 * num_sms : tokens <= 128 && 8 * tiles <= num_sms;
    return splits && is_small ? LinearKernel::split_sm90 : LinearKernel::sm90;
}

// Whether the norm in front and RoPE with the cache behind may be part of it (LinearArgs).
constexpr bool fuses_norm(LinearKernel kernel, int num_tokens, WeightFormat format) {
    return kernel == LinearKernel::decode && num_tokens <= max_norm_tokens(format);
}
constexpr bool fuses_rope(LinearKernel kernel) {
    return kernel == LinearKernel::decode || kernel == LinearKernel::split_sm90;
}

inline cudaError_t launch_linear(LinearKernel kernel, const LinearArgs& args, cudaStream_t stream) {
    switch (kernel) {
        case LinearKernel::f32: return linear_f32(args, stream);
        case LinearKernel::decode: return linear_decode(args, stream);
#if INFINILM_SM90
        case LinearKernel::split_sm90: return linear_split_sm90(args, stream);
        case LinearKernel::sm90: return linear_sm90(args, stream);
#endif
        default: return linear_prefill(args, stream);
    }
}

}  // namespace infinilm::cuda
