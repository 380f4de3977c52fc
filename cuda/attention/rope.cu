// The table of cosines and sines of a step, and what lies between the QKV projection and attention where linear_decode
// does not do it: RMSNorm per head of q and k, RoPE (rotate-half, Su et al. 2021), k and v into the cache.
//
// rope_table: one thread per (token, frequency), once a step: num_tokens * rotary_dim * 4 bytes. Angle, cosine and sine
// in double as on the CPU: at position 100000 a float32 angle is off by 0.004.
//
// qk_norm_rope_store_kv: one warp per (token, head). The head is read once and written once, k and v once more to the
// cache: (2 num_heads + 3 num_kv_heads + 2 num_kv_heads) * head_dim * sizeof(T) bytes a token; the floor is that over
// the memory bandwidth. A pair may lie in two lanes, so a head passes through shared memory, whatever head_dim (a
// multiple of 8) and rotary_dim (even). 16-byte accesses (kernels.h, Alignment). Arithmetic: store_head.cuh. Fusing the
// three follows TensorRT-LLM cpp/tensorrt_llm/kernels/fusedQKNormRopeKernel.cu (one warp per head).
#include "cuda/attention/kernels.h"
#include "cuda/attention/store_head.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/visit.cuh"

namespace infinilm::cuda {

constexpr int kRopeThreads = 128, kRopeWarps = kRopeThreads / 32;

__global__ void __launch_bounds__(kRopeThreads) rope_table_kernel(RopeTableArgs args) {
    begin_kernel();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kRopeThreads + threadIdx.x;
    if (at >= static_cast<int64_t>(args.num_tokens) * args.half) return;
    const int64_t token = at / args.half;
    const int i = static_cast<int>(at % args.half);
    // In double, as on the CPU: at position 100000 a float32 angle is off by 0.004. In units of pi, 1 / pi being two
    // doubles, so that the reduction is short; that of sincos keeps a table in local memory.
    const int position =
        args.positions[args.axes ? static_cast<int64_t>(args.axes[i]) * args.num_tokens + token : token];
    constexpr double kInversePi = 0.318309886183790671538, kRest = -1.96786766751824869e-17;
    const double angle = static_cast<double>(position) * static_cast<double>(args.inv_freq[i]);
    const double turns = __dmul_rn(angle, kInversePi);
    const double rest = __fma_rn(angle, kRest, __fma_rn(angle, kInversePi, -turns));
    double sine, cosine;
    sincospi(__dadd_rn(turns - 2.0 * rint(0.5 * turns), rest), &sine, &cosine);
    float* row = args.cos_sin + token * 2 * args.half;  // [2 * half]
    double factor = static_cast<double>(args.attention_factor);
    if (args.scale_beta != 0.0f)
        factor *= 1.0 + static_cast<double>(args.scale_beta) *
                            log1p(static_cast<double>((position + args.scale_offset) / args.scale_positions));
    row[i] = static_cast<float>(cosine * factor);
    row[args.half + i] = static_cast<float>(sine * factor);
}

cudaError_t rope_table(const RopeTableArgs& args, cudaStream_t stream) {
    const int64_t count = static_cast<int64_t>(args.num_tokens) * args.half;
    if (count == 0) return cudaSuccess;
    const unsigned blocks = static_cast<unsigned>(ceil_div<int64_t>(count, kRopeThreads));
    return launch<rope_table_kernel>({dim3(blocks), dim3(kRopeThreads), 0, stream}, args);
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads) qk_norm_rope_store_kv_kernel(QkNormRopeStoreArgs args) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    const int num_heads = args.rope.num_heads + kv_parts(args.rope) * args.rope.num_kv_heads;
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * kRopeWarps + warp_id(), token = unit / num_heads;
    if (token >= args.num_tokens) return;
    float* shared = reinterpret_cast<float*>(smem) + static_cast<int>(warp_id()) * args.rope.head_dim;  // [head_dim]
    store_head<T>(args, token, static_cast<int>(unit % num_heads), shared,
                  [](T* place, int, const float (&x)[8]) { store8(place, x); });
}

cudaError_t qk_norm_rope_store_kv(const QkNormRopeStoreArgs& args, cudaStream_t stream) {
    const int64_t units =
        static_cast<int64_t>(args.num_tokens) * (args.rope.num_heads + kv_parts(args.rope) * args.rope.num_kv_heads);
    if (units == 0) return cudaSuccess;
    const size_t smem_bytes = sizeof(float) * kRopeWarps * static_cast<size_t>(args.rope.head_dim);
    const LaunchConfig config{dim3(static_cast<unsigned>(ceil_div<int64_t>(units, kRopeWarps))), dim3(kRopeThreads),
                              smem_bytes, stream};
    return visit(args.type, [&](auto t) { return launch<qk_norm_rope_store_kv_kernel<decltype(t)>>(config, args); });
}

}  // namespace infinilm::cuda
