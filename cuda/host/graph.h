// Graphs of a backend's stream: what ops enqueue is captured instead of run, and launched as one afterwards.
#pragma once

#include <cuda_runtime.h>

#include "ops/device_queue.h"

namespace infinilm::cuda {

class StreamRecorder final : public GraphRecorder {
public:
    explicit StreamRecorder(const cudaStream_t& stream) : stream_(stream) {}  // of the backend, which has this

    std::unique_ptr<Graph> record(const std::function<void()>& work) override;
    uint64_t generation() const override { return generation_; }
    void memory_asked_for() { ++generation_; }

private:
    const cudaStream_t& stream_;
    uint64_t generation_ = 0;
};

}  // namespace infinilm::cuda
