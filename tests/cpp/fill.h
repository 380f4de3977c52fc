// Contents of tensors.
#pragma once

#include <cmath>

#include "core/dtype.h"

namespace infinilm::test {

// Numbers of very different sizes, so that the order of a sum shows in its bits; some infinities.
inline void fill(DType dtype, void* data, int64_t numel, uint32_t seed) {
    uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
    for (int64_t i = 0; i < numel; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const auto bits = static_cast<uint32_t>(state >> 32);
        const int exponent = static_cast<int>(bits >> 24 & 15u) - 8;
        float value = std::ldexp(static_cast<float>(static_cast<int32_t>(bits << 8)) * 0x1p-31f, exponent);
        if (bits % 1009 == 0) value = bits & 1024 ? HUGE_VALF : -HUGE_VALF;
        switch (dtype) {
            case DType::float32: static_cast<float*>(data)[i] = value; break;
            case DType::bfloat16: static_cast<bf16*>(data)[i] = from_float<bf16>(value); break;
            case DType::float16: static_cast<f16*>(data)[i] = from_float<f16>(value); break;
            case DType::int32: static_cast<uint32_t*>(data)[i] = bits; break;
            case DType::int64: static_cast<uint64_t*>(data)[i] = state; break;
            default: static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(bits); break;
        }
    }
}

}  // namespace infinilm::test
