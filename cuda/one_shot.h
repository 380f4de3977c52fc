// The sum over all ranks, the residual and the RMSNorm after it in one kernel: what a row-parallel linear needs behind
// it when ranks are threads of one process, each on a GPU of its own that writes its peers' memory, and the message is
// short. For a communicator: `connect_peers` once, a workspace for each rank, then one launch of each rank a round.
//
// Where it stops paying against NCCL is not known: that is to be measured on a machine of several GPUs. Each rank sends
// (size - 1) * message bytes, a ring about 2 * message bytes in 2 * (size - 1) steps, so it is for messages whose time
// is latency, up to some hundreds of KiB.
#pragma once

#include "kernels.h"

namespace infinilm::cuda {

constexpr int max_one_shot_ranks = 8;
constexpr int one_shot_blocks = 64;  // at most; row t is block t % one_shot_blocks, always

// One and the same on all ranks, but for `rank`.
struct OneShotPeers {
    int rank = 0, size = 1;
    int capacity_bytes = 0;  // of the longest message, num_tokens * one_shot_row_bytes(); a multiple of 256
    // [size]: one_shot_workspace_bytes() in memory of rank r, that all ranks write; aligned to 256, zero before the
    // first round and never touched by anything else
    void* workspaces[max_one_shot_ranks] = {};
    // A word in pinned memory of the host, or null. Once it is not zero, kernels that wait give up and leave their
    // outputs as they are, so that a failed rank does not leave its peers spinning; the workspaces are useless then.
    const unsigned* aborted = nullptr;
};

// Rows in the workspaces start at multiples of 8 elements.
constexpr int64_t one_shot_row_bytes(int hidden_size, Type type) {
    return int64_t{(hidden_size + 7) / 8} * 8 * size_bytes(type);
}
size_t one_shot_workspace_bytes(int size, int capacity_bytes);

// Lets the current device, that of `rank`, write the memory (of cudaMalloc) of the devices of the others; each rank
// calls it. *connected: false where the system does not allow that, or where the device has too few SMs to run all
// blocks at once, without which ranks could wait for each other for ever. Then this kernel is not for these ranks.
cudaError_t connect_peers(const int* devices, int rank, int size, bool* connected);  // devices: [size]

// x of rank 0 + x of rank 1 + .., in that order in float32, rounded to T; then as rms_norm: residual += that, rounded
// to T, and out = its norm times weight. The same bits on every rank, and those of an all_reduce in rank order followed
// by rms_norm. All ranks launch the same rounds with the same num_tokens, hidden_size and type, and hold the same
// residual. cudaErrorInvalidValue: size, or a message longer than the capacity.
struct OneShotArgs {
    OneShotPeers peers;
    const void* x;                                  // [num_tokens, hidden_size] T: this rank's part of the sum
    void* residual;                                 // [num_tokens, hidden_size] T
    const float* weight;                            // [hidden_size]
    void* out;                                      // [num_tokens, hidden_size] T; may be x
    int64_t x_stride, residual_stride, out_stride;  // elements between rows
    int num_tokens, hidden_size;                    // any: no alignment is needed, 16 bytes of all rows is faster
    float eps;
    Type type;
};
cudaError_t one_shot_all_reduce_add_rms_norm(const OneShotArgs&, cudaStream_t);

}  // namespace infinilm::cuda
