// The GPUs of an engine that has ranks on several. Kernels of its ranks wait for each other there, and keep their
// places on the GPUs meanwhile. Those of two engines could take each other's: one GPU full of what waits for A, another
// one of what waits for B, and nothing would ever end (NCCL's user guide warns of it, "Using multiple NCCL
// communicators concurrently"). So of the engines of several GPUs in a process, one alone has a GPU at a time. Those of
// other processes are another matter: without MPS, a GPU does not run kernels of two processes at once.
#pragma once

#include <span>
#include <vector>

#include "core/tensor.h"

namespace infinilm {

class DeviceClaim {
public:
    // ConfigError: another engine of several GPUs has one of these. Nothing is claimed where ranks are on one GPU
    // alone.
    explicit DeviceClaim(std::span<const Device> devices);
    ~DeviceClaim();
    DeviceClaim(const DeviceClaim&) = delete;
    DeviceClaim& operator=(const DeviceClaim&) = delete;

private:
    std::vector<int> indices_;  // of the GPUs, each once
};

}  // namespace infinilm
