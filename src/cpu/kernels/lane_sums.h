// Sums over the columns of a row in an order that does not depend on the width of vectors: lane i of 16 sums columns i,
// i + 16, and so on, and then the lanes are added by halves. So builds that fuse multiplications and additions alike
// give the same bits, be their vectors of 4, 8 or 16 lanes.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

constexpr int sum_parts = 16 / width;  // vectors that have the 16 lanes together

// The part that has the lane of a column, the first of a vector.
INFINILM_INLINE int sum_part(int64_t column) { return (int)(column / width % sum_parts); }

INFINILM_INLINE float add_lanes(const vec (&parts)[sum_parts]) {
    if constexpr (sum_parts == 4) return reduce_add((parts[0] + parts[2]) + (parts[1] + parts[3]));
    if constexpr (sum_parts == 2) return reduce_add(parts[0] + parts[1]);
    return reduce_add(parts[0]);
}

}  // namespace infinilm::cpu::INFINILM_ISA
