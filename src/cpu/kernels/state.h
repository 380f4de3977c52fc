// What the kernels of layers with a state have in common: where states stop, and their rows.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

// Where the state of a sequence stops: in front of its drafts.
INFINILM_INLINE int64_t state_end(const StateStepsArgs& sequences, int64_t s) {
    return sequences.state_tokens ? sequences.cu_seqlens_q[s] + sequences.state_tokens[s]
                                  : sequences.cu_seqlens_q[s + 1];
}

// Rows of columns of a state, `stride` elements apart.
template <class T>
struct Rows {
    T* first;
    int64_t stride;

    INFINILM_MEMBER T* operator[](int64_t row) const { return first + row * stride; }
};

// A number as a type: how many vectors a call of step_columns has.
template <int N>
struct Number {
    static constexpr int value = N;
};

}  // namespace infinilm::cpu::INFINILM_ISA
