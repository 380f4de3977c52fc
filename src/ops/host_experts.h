// Experts whose weights stay in memory of the host, beside a GPU that computes everything else of their layers: the op
// `experts` of a backend that has such a keeper brings what it reads to the host, runs there on the CPU's kernels, and
// takes the result back. The host waits for the rows of each such layer, so that a step with one is no graph.
#pragma once

#include <memory>

#include "ops/backend.h"

namespace infinilm {

class HostExperts {
public:
    explicit HostExperts(std::unique_ptr<Backend> cpu) : cpu_(std::move(cpu)) {}
    Backend& backend() { return *cpu_; }  // which prepares the weights

    // The op, of arrays on the device: their rows are widened here, exactly, and the result is rounded once.
    void run(Backend& device, const ExpertsParams& p);

    // Elements of each token in the arrays of a layer: what it reads and gives, and what its experts have and give.
    struct TokenSizes {
        int64_t x = 0, shared = 0, out = 0, inner = 0, parts = 0;
        int64_t top_k = 0;
    };
    // What steps of up to num_tokens tokens take at most. largest: each size is that of the layer with most.
    struct Bytes {
        int64_t arrays;     // of the CPU's op: see bytes()
        int64_t copies;     // of what comes from the device and goes back, in pinned memory
        int64_t on_device;  // where it arrives there
    };
    static Bytes bytes_of(const TokenSizes& largest, int64_t num_tokens, DType device_dtype);
    // Bytes of the arrays that calls have taken so far.
    int64_t bytes() const;

private:
    // Arrays of a call of the CPU's op, whose memory stays from step to step and grows: [rows, columns] float32.
    enum Use { x, shared, out, inner, parts, num_uses };
    TensorView floats(Use use, int64_t rows, int64_t columns);
    TensorView widened(Use use, const TensorView& rows);

    const std::unique_ptr<Backend> cpu_;
    Tensor memory_[num_uses];
    Tensor rounded_;  // the result, in the dtype of the device
};

// The backend that keeps the weights of experts.
inline Backend& keeper_of(Backend& backend, bool on_host) {
    return on_host ? backend.host_experts->backend() : backend;
}

}  // namespace infinilm
