// What the kernels of layers with a state have in common.
#pragma once

#include "args/state.h"
#include "cuda/core/device.cuh"

namespace infinilm::cuda {

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Where the state of a sequence stops that begins with token `first`: in front of its drafts.
__device__ __forceinline__ int state_end(const StateStepsArgs& sequences, int s, int first) {
    return sequences.state_tokens ? first + sequences.state_tokens[s] : sequences.cu_seqlens_q[s + 1];
}

// The sequence of a token. Where each has one token, as in most steps, the first guess is right.
__device__ __forceinline__ int sequence_of(const StateStepsArgs& sequences, int token) {
    const int* starts = sequences.cu_seqlens_q;
    if (token < sequences.num_seqs && starts[token] <= token && token < starts[token + 1]) return token;
    int first = 0, end = sequences.num_seqs;
    while (end - first > 1) {
        const int middle = (first + end) / 2;
        (starts[middle] <= token ? first : end) = middle;
    }
    return first;
}

// A sequence in a step: its first token, and in front of it so many that are replayed from the log of its state. Those
// have the numbers before it.
struct SequenceStart {
    int first, replayed, state;

    __device__ __forceinline__ SequenceStart(const StateStepsArgs& sequences, int s)
        : first(sequences.cu_seqlens_q[s]),
          replayed(sequences.num_replayed ? sequences.num_replayed[s] : 0),
          state(sequences.state_in[s]) {}
    __device__ __forceinline__ int begin() const { return first - replayed; }
    // The row of a token, of its own or of its log. skipped: columns in front of those that the log has.
    template <class T>
    __device__ __forceinline__ const T* row(const void* rows, int64_t stride, const StateLogArgs& log, int token,
                                            int skipped = 0) const {
        if (token >= first) return static_cast<const T*>(rows) + token * stride + skipped;
        const int64_t place = static_cast<int64_t>(state) * log.num_rows + (token - begin());
        return static_cast<const T*>(log.rows) + place * log.stride;
    }
};

}  // namespace infinilm::cuda
