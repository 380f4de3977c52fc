// Element types. `bf16` and `f16` are storage-only structs: arithmetic happens in float32 after widening.
// `visit_dtype` turns a run-time DType into a template argument.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace infinilm {

// int8 is for caches and for arrays that come through DLPack, fp8 (e4m3) for caches, and uint8 for bytes.
enum class DType : uint8_t { float32, bfloat16, float16, int32, int64, uint8, int8, fp8 };

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

constexpr int64_t size_bytes(DType dtype) {
    switch (dtype) {
        case DType::float32:
        case DType::int32: return 4;
        case DType::bfloat16:
        case DType::float16: return 2;
        case DType::int64: return 8;
        case DType::uint8:
        case DType::int8:
        case DType::fp8: return 1;
    }
    return 0;
}

constexpr std::string_view name(DType dtype) {
    switch (dtype) {
        case DType::float32: return "float32";
        case DType::bfloat16: return "bfloat16";
        case DType::float16: return "float16";
        case DType::int32: return "int32";
        case DType::int64: return "int64";
        case DType::uint8: return "uint8";
        case DType::int8: return "int8";
        case DType::fp8: return "fp8";
    }
    return "?";
}

// How the weights of linears are stored once they are prepared (quantise.h). none: as they come; int8 and fp8: with a
// scale for each output; int4: with one for each output and 32 in_features. On a CPU, which has no fp8, x is rounded to
// int8 with a scale for each 32 of a token; on CUDA it keeps its 16 bits.
enum class Quantization : uint8_t { none, int8, int4, fp8 };

constexpr std::string_view name(Quantization quantization) {
    switch (quantization) {
        case Quantization::none: return "none";
        case Quantization::int8: return "int8";
        case Quantization::int4: return "int4";
        case Quantization::fp8: return "fp8";
    }
    return "?";
}

constexpr bool is_floating(DType dtype) {
    return dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16;
}
// Whether each row of a cache in this dtype has a float32 scale, which multiplies its numbers.
constexpr bool has_row_scales(DType dtype) { return dtype == DType::int8 || dtype == DType::fp8; }

template <class T>
inline constexpr DType dtype_of = [] {
    static_assert(sizeof(T) == 0, "not a tensor element type");
    return DType::float32;
}();
template <>
inline constexpr DType dtype_of<float> = DType::float32;
template <>
inline constexpr DType dtype_of<bf16> = DType::bfloat16;
template <>
inline constexpr DType dtype_of<f16> = DType::float16;
template <>
inline constexpr DType dtype_of<int32_t> = DType::int32;
template <>
inline constexpr DType dtype_of<int64_t> = DType::int64;
template <>
inline constexpr DType dtype_of<uint8_t> = DType::uint8;
template <>
inline constexpr DType dtype_of<int8_t> = DType::int8;

// Calls f(T{}) with the floating element type that `dtype` names.
template <class F>
decltype(auto) visit_floating(DType dtype, F&& f) {
    switch (dtype) {
        case DType::bfloat16: return f(bf16{});
        case DType::float16: return f(f16{});
        default: return f(float{});
    }
}

// Scalar conversions, round to nearest even. Kernels have vector forms of the same.
inline float to_float(float v) { return v; }
inline float to_float(bf16 v) { return std::bit_cast<float>(uint32_t{v.bits} << 16); }
inline float to_float(f16 v) {
    const uint32_t sign = uint32_t{v.bits & 0x8000u} << 16, magnitude = v.bits & 0x7fffu;
    if (magnitude >= 0x7c00u)  // infinity or NaN
        return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude < 0x0400u)  // zero or subnormal: magnitude * 2^-24 is exact
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

template <class T>
T from_float(float v);
template <>
inline float from_float<float>(float v) {
    return v;
}
template <>
inline bf16 from_float<bf16>(float v) {
    const uint32_t u = std::bit_cast<uint32_t>(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(u >> 16 | 0x40u)};  // keep NaN a NaN
    return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}
template <>
inline f16 from_float<f16>(float v) {
    const uint32_t u = std::bit_cast<uint32_t>(v), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    return {static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13)};
}

}  // namespace infinilm
