// The table of cosines and sines of a step, and what lies between the QKV projection and attention where linear_decode
// does not do it: RMSNorm per head of q and k, RoPE (rotate-half, Su et al. 2021), k and v into the cache.
//
// rope_table: one thread per (token, frequency), once a step: num_tokens * rotary_dim * 4 bytes. Angle, cosine and sine
// in double as on the CPU: at position 100000 a float32 angle is off by 0.004.
//
// qk_norm_rope_store_kv: one warp per (token, head). The head is read once and written once, k and v once more to the
// cache: (2 num_heads + 3 num_kv_heads + 2 num_kv_heads) * head_dim * sizeof(T) bytes a token; the floor is that over
// the memory bandwidth. A pair may lie in two lanes, so a head passes through shared memory, whatever head_dim (a
// multiple of 8) and rotary_dim (even). 16-byte accesses (kernels.h, Alignment). Arithmetic: norm.cuh, rope.cuh. Fusing
// the three follows TensorRT-LLM cpp/tensorrt_llm/kernels/fusedQKNormRopeKernel.cu (one warp per head).
#include "cuda/attention/cache_rows.cuh"
#include "cuda/attention/kernels.h"
#include "cuda/attention/rope.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
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

// Turns elements first .. first + 7 of a head, of which x are the values. head: [head_dim] in shared memory; cos_sin:
// [2 * half].
__device__ __forceinline__ void turn8(float (&x)[8], const float* head, int first, const float* cos_sin, int half) {
    if (first >= 2 * half) return;
    float cosines[8] = {}, sines[8] = {};
    if (half % 8 == 0) {  // the usual case: 8 pairs side by side
        load8(cos_sin + first % half, cosines);
        load8(cos_sin + half + first % half, sines);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (first + j >= 2 * half) continue;
            cosines[j] = cos_sin[(first + j) % half];
            sines[j] = cos_sin[half + (first + j) % half];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int i = first + j;
        if (i < half) {
            float second = head[i + half];
            rotate(x[j], second, cosines[j], sines[j]);
        } else if (i < 2 * half) {
            float before = head[i - half];
            rotate(before, x[j], cosines[j], sines[j]);
        }
    }
}

// Heads of k, and of v where there are any.
__host__ __device__ __forceinline__ int kv_parts(const RopeStoreArgs& rope) { return rope.v_cache ? 2 : 1; }

template <class T>
__global__ void __launch_bounds__(kRopeThreads) qk_norm_rope_store_kv_kernel(QkNormRopeStoreArgs args) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    const RopeStoreArgs& rope = args.rope;
    const int num_heads = rope.num_heads + kv_parts(rope) * rope.num_kv_heads, head_dim = rope.head_dim;
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * kRopeWarps + warp_id();
    const int64_t token = unit / num_heads;
    if (token >= args.num_tokens) return;
    const int head = static_cast<int>(unit % num_heads), value = head - (rope.num_heads + rope.num_kv_heads);
    const bool is_query = head < rope.num_heads, is_value = value >= 0;
    int size = is_value ? rope.value_dim : head_dim;
    T* x = static_cast<T*>(args.qkv) + token * args.qkv_stride + head * head_dim;  // [size]
    if (is_value) x -= value * (head_dim - size);

    int64_t row = -1;  // of the cache
    if (const int64_t slot = is_query || !rope.slot_mapping ? -1 : rope.slot_mapping[token]; slot >= 0)
        row = cache_row(slot, head - rope.num_heads - (is_value ? rope.num_kv_heads : 0), rope.num_kv_heads,
                        rope.block_size);
    void* const cache = is_value ? rope.v_cache : rope.k_cache;
    float* const scales = is_value ? rope.v_scales : rope.k_scales;
    const float* table = is_value ? nullptr : is_query ? rope.q_cos_sin : rope.cos_sin;
    const auto* weight = static_cast<const float*>(is_value   ? rope.v_norm
                                                   : is_query ? rope.q_norm
                                                              : rope.k_norm);  // [head_dim]
    if (is_value && row < 0 && !weight) return;
    const float scale = weight ? row_inverse_rms(x, head_dim, rope.eps) : 0.0f;
    float* shared = reinterpret_cast<float*>(smem) + static_cast<int>(warp_id()) * head_dim;  // [head_dim]
    const int first = static_cast<int>(lane_id()) * 8;
    float v[8];
    // What is turned of a query may lie elsewhere: then that alone is read and written.
    const T* from = x;
    if (is_query && rope.q_turned) {
        from = static_cast<const T*>(rope.q_turned) + token * rope.q_turned_stride + head * rope.q_turned_head_stride;
        size = rope.rotary_dim;
    }
    for (int i = first; i < size; i += 256) {
        load8(from + i, v);
        if (weight) {
            float w[8];
            load8(weight + i, w);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = to_float(from_float<T>(normed(v[j], scale, w[j])));
        }
        store8(shared + i, v);
    }
    __syncwarp();
    const auto turn = [&](int i) {
        load8(shared + i, v);
        if (table) turn8(v, shared, i, table + token * rope.rotary_dim, rope.rotary_dim / 2);
    };
    RowRounding rounding;
    if (scales && row >= 0) {
        for (int i = first; i < size; i += 256) turn(i), rounding.see(v);
        const float scale = rounding.find_scale(rope.cache_type);
        if (lane_id() == 0) scales[row] = scale;
    }
    for (int i = first; i < size; i += 256) {
        turn(i);
        if (!is_value || weight) store8(x + i, v);
        if (row < 0) continue;
        if (scales)
            *reinterpret_cast<uint2*>(static_cast<uint8_t*>(cache) + row * head_dim + i) = rounding.round(v);
        else
            store8(static_cast<T*>(cache) + row * head_dim + i, v);
    }
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
