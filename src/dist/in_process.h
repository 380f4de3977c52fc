// Ranks that exchange tensors through the memory of the host: CPU ranks, which read and write each other's tensors
// where they are, and ranks that share a GPU, whose tensors are copied to the host and back (a loopback: for tests).
//
// A sum is taken in rank order, ((r0 + r1) + r2) .., in float32, and rounded once: the same bits on all ranks, in every
// run, for every size of message. int32 wraps around.
#pragma once

#include "dist/communicator.h"

namespace infinilm {

// threads_per_rank as in GroupOptions.
std::shared_ptr<CommunicatorGroup> make_in_process_group(int size, int threads_per_rank = 1);

}  // namespace infinilm
