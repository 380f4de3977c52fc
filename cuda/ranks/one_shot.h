// The sum over all ranks, the residual and the RMSNorm after it in one kernel: what a row-parallel linear needs behind
// it when ranks are threads of one process, each on a GPU of its own that writes its peers' memory, and the message is
// short. For a communicator: `connect_peers` once, a workspace for each rank, then one launch of each rank a round.
//
// Two ways, the same bits. One-shot: every rank sends its whole message to every other one, which is (size - 1)
// messages and one wait. Two-shot: it sends each rank the columns of its slice, adds up its own slice, and sends that
// to all: 2 * (size - 1) / size messages, as a ring, and two waits. Which of them, or NCCL, is told by the capacities.
#pragma once

#include "cuda/core/types.h"

namespace infinilm::cuda {

constexpr int max_one_shot_ranks = 8;
constexpr int one_shot_blocks = 64;  // at most; row t is block t % one_shot_blocks, always

// One and the same on all ranks, but for `rank`.
struct OneShotPeers {
    int rank = 0, size = 1;
    // Sizes of the longest message of either way, by one_shot_row_bytes() and two_shot_row_bytes(); multiples of 2048.
    // 0: that way is never taken.
    int one_shot_bytes = 0, two_shot_bytes = 0;
    // [size]: one_shot_workspace_bytes() in memory of rank r, that all ranks write; aligned to 256, zero before the
    // first round and never touched by anything else
    void* workspaces[max_one_shot_ranks] = {};
    // A word in pinned memory of the host, or null. Once it is not zero, kernels that wait give up and leave their
    // outputs as they are, so that a failed rank does not leave its peers spinning; the workspaces are useless then.
    const unsigned* aborted = nullptr;
};

// Rows in the workspaces start at multiples of 8 elements, and so do a rank's columns of a row.
constexpr int64_t one_shot_row_bytes(int hidden_size, Element type) {
    return int64_t{(hidden_size + 7) / 8} * 8 * size_bytes(type);
}
constexpr int two_shot_columns(int hidden_size, int size) { return ((hidden_size + 7) / 8 + size - 1) / size * 8; }
constexpr int64_t two_shot_row_bytes(int hidden_size, int size, Element type) {
    return int64_t{size} * two_shot_columns(hidden_size, size) * size_bytes(type);
}
// Whether a message is short enough for either way.
constexpr bool one_shot_takes(const OneShotPeers& peers, int64_t num_tokens, int hidden_size, Element type) {
    return num_tokens * one_shot_row_bytes(hidden_size, type) <= peers.one_shot_bytes ||
           num_tokens * two_shot_row_bytes(hidden_size, peers.size, type) <= peers.two_shot_bytes;
}
size_t one_shot_workspace_bytes(int size, int one_shot_bytes, int two_shot_bytes);

// Lets the current device, that of `rank`, write the memory (of cudaMalloc) of the devices of the others; each rank
// calls it. *connected: false where the system does not allow that, or where the device has too few SMs to run all
// blocks at once, without which ranks could wait for each other for ever. Then this kernel is not for these ranks.
cudaError_t connect_peers(const int* devices, int rank, int size, bool* connected);  // devices: [size]

// Whether the memory of peers is what it is said to be, before anything relies on it: some systems allow access that
// loses or misplaces what is written (PCIe switches that redirect). send_proof writes the mail of every peer; once all
// have done so, each counts in `wrong`, in its own memory and zero before, what has not come as it was sent.
cudaError_t send_proof(const OneShotPeers&, cudaStream_t);
cudaError_t count_wrong_proof(const OneShotPeers&, unsigned* wrong, cudaStream_t);

// x of rank 0 + x of rank 1 + .., in that order in float32, rounded to T; then as rms_norm: residual += that, rounded
// to T, and out = its norm times weight. The same bits on every rank, and those of an all_reduce in rank order followed
// by rms_norm. All ranks launch the same rounds with the same num_tokens, hidden_size and type, and hold the same
// residual. cudaErrorInvalidValue: size, or a message longer than both capacities.
struct OneShotArgs {
    OneShotPeers peers;
    const void* x;                                  // [num_tokens, hidden_size] T: this rank's part of the sum
    void* residual;                                 // [num_tokens, hidden_size] T
    const float* weight;                            // [hidden_size]
    void* out;                                      // [num_tokens, hidden_size] T; may be x
    int64_t x_stride, residual_stride, out_stride;  // elements between rows
    int num_tokens, hidden_size;                    // any: no alignment is needed, 16 bytes of all rows is faster
    float eps;
    Element type;
};
cudaError_t one_shot_all_reduce_add_rms_norm(const OneShotArgs&, cudaStream_t);

}  // namespace infinilm::cuda
