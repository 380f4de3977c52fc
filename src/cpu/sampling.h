// Draws token ids from logits on the CPU, exactly as documented at SampleParams; finds the best (FindBestParams), and
// tells log-probabilities (LogProbsParams). One Sampler per CpuBackend: it keeps the scratch of each worker from call
// to call.
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
    void log_probs(const LogProbsParams& params);

private:
    // f(sampler, row) for every row; each thread takes rows of its own, but all work on the last few of a large
    // vocabulary.
    template <class F>
    void for_rows(int64_t num_rows, int64_t vocab_size, F f);

    ThreadPool& pool_;
    std::vector<std::unique_ptr<RowSampler>> alone_;  // one per worker
    std::unique_ptr<RowSampler> together_;            // of all workers, for one row
};

void find_best(ThreadPool& pool, const FindBestParams& params);

}  // namespace infinilm::cpu
