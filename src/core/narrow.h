// float32 to the dtype of weights, many at a time: to nearest, ties to even.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "core/dtype.h"

namespace infinilm {

inline void narrow(const float* in, int64_t n, float* out) { std::copy_n(in, n, out); }
inline void narrow(const float* in, int64_t n, bf16* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = from_float<bf16>(in[i]);
}
// Without branches, so that the compiler makes vectors of it: an eighth of the time of from_float.
inline void narrow(const float* in, int64_t n, f16* out) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = std::bit_cast<uint32_t>(in[i]), magnitude = u & 0x7fffffffu;
        const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
        const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
        uint32_t bits = magnitude < 0x38800000u ? subnormal : normal;
        bits = magnitude >= 0x477ff000u ? 0x7c00u : bits;
        bits = magnitude > 0x7f800000u ? 0x7e00u : bits;
        out[i] = {static_cast<uint16_t>(bits | (u >> 16 & 0x8000u))};
    }
}

// Whether one of the numbers is finite, and so large that T makes it infinite.
template <class T>
bool any_lost(const float* in, int64_t n) {
    constexpr uint32_t limit = sizeof(T) == 4 ? 0x7f800000u : std::is_same_v<T, bf16> ? 0x7f7f8000u : 0x477ff000u;
    uint32_t lost = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(in[i]) & 0x7fffffffu;
        lost |= static_cast<uint32_t>(magnitude >= limit) & static_cast<uint32_t>(magnitude < 0x7f800000u);
    }
    return lost != 0;
}

}  // namespace infinilm
