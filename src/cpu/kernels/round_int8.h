// Rounding of floats to int8 with one scale for all: value = scale * integer, the largest magnitude being 127. What x
// of quantised linears and an int8 KV cache have in common.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

class Int8Rounding {
public:
    // First every vector of the floats; lanes beyond them are zero.
    INFINILM_MEMBER void see(vec v) {
        const ivec magnitude = (ivec)(as_uint(v) & 0x7fffffffu);
        largest_ = magnitude > largest_ ? magnitude : largest_;
    }
    // Then the scale, NaN if a float was infinite or NaN, and with it round().
    INFINILM_MEMBER float scale() {
        const float most = reduce_max(largest_);
        inverse_ = most > 0x1p-119f ? 127 / most : 0;  // less than that is nothing: its inverse is infinite
        return most / 127 + most * 0.0f;
    }
    INFINILM_MEMBER ivec round(vec v) const {
        return (ivec)(v * inverse_ + 0x1.8p23f) - 0x4b400000;  // the sum rounds to an integer, in the low bits
    }

private:
    // Bits of the magnitudes, which as integers are in the order of the numbers, infinity and NaN last.
    ivec largest_{};
    float inverse_ = 0;
};

}  // namespace infinilm::cpu::INFINILM_ISA
