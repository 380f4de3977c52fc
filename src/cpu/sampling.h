// Draws token ids from logits on the CPU, exactly as documented at SampleParams, and finds the best (FindBestParams).
// One Sampler per CpuBackend: it keeps the scratch of each worker from call to call.
#pragma once

#include <memory>
#include <vector>

#include "cpu/thread_pool.h"
#include "ops/backend.h"

namespace infinilm::cpu {

class RowSampler;

class Sampler {
public:
    explicit Sampler(ThreadPool& pool);
    ~Sampler();

    void sample(const SampleParams& params);

private:
    ThreadPool& pool_;
    std::vector<std::unique_ptr<RowSampler>> alone_;  // one per worker
    std::unique_ptr<RowSampler> together_;            // of all workers, for one row
};

void find_best(ThreadPool& pool, const FindBestParams& params);

}  // namespace infinilm::cpu
