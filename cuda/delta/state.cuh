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

}  // namespace infinilm::cuda
