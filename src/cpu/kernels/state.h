// What the kernels of layers with a state have in common: where states stop, and their rows.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

// Where the state of a sequence stops: in front of its drafts.
INFINILM_INLINE int64_t state_end(const StateStepsArgs& sequences, int64_t s) {
    return sequences.state_tokens ? sequences.cu_seqlens_q[s] + sequences.state_tokens[s]
                                  : sequences.cu_seqlens_q[s + 1];
}

// How many rows of its log a sequence goes through before its own tokens.
INFINILM_INLINE int64_t num_replayed(const StateStepsArgs& sequences, int64_t s) {
    return sequences.num_replayed ? sequences.num_replayed[s] : 0;
}

// Rows of the tokens of a sequence, counted from its first one in the step. Those before are replayed from its log.
struct SequenceRows {
    const float *rows, *behind_log;
    int64_t stride, log_stride;

    INFINILM_MEMBER const float* operator[](int64_t t) const {
        return t < 0 ? behind_log + t * log_stride : rows + t * stride;
    }
};

INFINILM_INLINE SequenceRows rows_of(const StateStepsArgs& sequences, int64_t s, const void* rows, int64_t stride,
                                     const StateLogArgs& log) {
    const int64_t count = num_replayed(sequences, s);
    const float* const behind =
        count > 0 ? (const float*)log.rows + (sequences.state_in[s] * (int64_t)log.num_rows + count) * log.stride
                  : nullptr;
    const float* const first = rows ? (const float*)rows + sequences.cu_seqlens_q[s] * stride : nullptr;
    return {first, behind, stride, log.stride};
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
