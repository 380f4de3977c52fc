// The arithmetic of RMSNorm, shared by rms_norm and by the prologue of linear_decode so that both give the same bits:
// one warp per row, lane l adds the squares of vectors l, l + 32, .. of 8 elements in order, then the warp's butterfly.
#pragma once

#include "cuda/core/ptx.cuh"

namespace infinilm::cuda {

// 8 neighbouring elements, as float32. `address` is 16-byte aligned (32-byte for float).
template <class T>
__device__ __forceinline__ void unpack8(uint4 v, float (&x)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = unpack_low<T>(words[i]);
        x[2 * i + 1] = unpack_high<T>(words[i]);
    }
}
template <class T>
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
}
template <class T>
__device__ __forceinline__ void load8(const T* address, float (&x)[8]) {
    unpack8<T>(*reinterpret_cast<const uint4*>(address), x);
}
template <>
__device__ __forceinline__ void load8<float>(const float* address, float (&x)[8]) {
    const float4 low = reinterpret_cast<const float4*>(address)[0], high = reinterpret_cast<const float4*>(address)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}
template <class T>
__device__ __forceinline__ void store8(T* address, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(address) = pack8<T>(x);
}
template <>
__device__ __forceinline__ void store8<float>(float* address, const float (&x)[8]) {
    reinterpret_cast<float4*>(address)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(address)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// 8 neighbouring elements in as few registers as they need.
template <class T>
struct Vector {
    uint4 words;

    __device__ __forceinline__ void load(const T* address) { words = *reinterpret_cast<const uint4*>(address); }
    __device__ __forceinline__ void unpack(float (&x)[8]) const { unpack8<T>(words, x); }
    __device__ __forceinline__ void pack(const float (&x)[8]) { words = pack8<T>(x); }
    __device__ __forceinline__ void store(T* address) const { *reinterpret_cast<uint4*>(address) = words; }
};
template <>
struct Vector<float> {
    float values[8];

    __device__ __forceinline__ void load(const float* address) { load8(address, values); }
    __device__ __forceinline__ void unpack(float (&x)[8]) const { memcpy(x, values, sizeof(x)); }
    __device__ __forceinline__ void pack(const float (&x)[8]) { memcpy(values, x, sizeof(x)); }
    __device__ __forceinline__ void store(float* address) const { store8(address, values); }
};

// Adds a vector's squares to a lane's sum.
__device__ __forceinline__ void add_squares(float& sum, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(x[i], x[i], sum);
}
// 1 / rms of a row, from the lanes' sums; every lane gets it.
__device__ __forceinline__ float inverse_rms(float lane_sum, int hidden_size, float eps) {
    return rsqrtf(warp_sum(lane_sum) / static_cast<float>(hidden_size) + eps);
}
// The same from memory. row: [hidden_size] T, hidden_size a multiple of 8.
template <class T>
__device__ __forceinline__ float row_inverse_rms(const T* row, int hidden_size, float eps) {
    float sum = 0.0f;
    for (int i = static_cast<int>(lane_id()) * 8; i < hidden_size; i += 256) {
        float x[8];
        load8(row + i, x);
        add_squares(sum, x);
    }
    return inverse_rms(sum, hidden_size, eps);
}
__device__ __forceinline__ float normed(float x, float inverse_rms, float weight) {
    return __fmul_rn(__fmul_rn(x, inverse_rms), weight);
}

}  // namespace infinilm::cuda
