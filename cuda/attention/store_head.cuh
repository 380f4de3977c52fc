// What lies between the linear of q, k and v and attention, of one head of a token, by a warp: RMSNorm, RoPE, and for k
// and v the cache. qk_norm_rope_store_kv and attention of decode share it, so that both give the same bits.
#pragma once

#include "args/attention.h"
#include "cuda/attention/cache_rows.cuh"
#include "cuda/attention/rope.cuh"

namespace infinilm::cuda {

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

// head: of q, then k, then v. shared: [head_dim] floats of this warp. put(place, i, x) gets elements i .. i + 7 of a
// head that is normed or turned, and where they lie in qkv.
template <class T, class Put>
__device__ __forceinline__ void store_head(const QkNormRopeStoreArgs& args, int64_t token, int head, float* shared,
                                           const Put& put) {
    const RopeStoreArgs& rope = args.rope;
    const int head_dim = rope.head_dim, value = head - (rope.num_heads + rope.num_kv_heads);
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
        if (!is_value || weight) put(x + i, i, v);
        if (row < 0) continue;
        if (scales)
            *reinterpret_cast<uint2*>(static_cast<uint8_t*>(cache) + row * head_dim + i) = rounding.round(v);
        else
            store8(static_cast<T*>(cache) + row * head_dim + i, v);
    }
}

}  // namespace infinilm::cuda
