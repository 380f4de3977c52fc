// Ranks on different GPUs, by NVIDIA's NCCL, which is opened at run time: nothing of it is needed to build, and only an
// engine of several GPUs needs it to run. The functions used are declared in nccl_library.h.
//
// A sum has the bits it has in process (in_process.h): NCCL carries the parts, and the backend adds them in rank order.
// NCCL does not notice when ranks call different collectives; they wait until the group is aborted.
#pragma once

#include "dist/communicator.h"

namespace infinilm {

// `library`: path of libnccl.so.2 as the nvidia-nccl wheel installs it, or "". See open_nccl for the order of places.
std::shared_ptr<CommunicatorGroup> make_nccl_group(int size, const std::string& library = "");

// What a rank keeps to exchange the parts of sums of up to numel elements.
int64_t nccl_workspace_bytes(int size, DType dtype, int64_t numel);

}  // namespace infinilm
