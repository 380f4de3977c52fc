// The engine: loads weights, keeps the KV cache, runs steps. Python's scheduler decides what is in a step; the rank
// worker executes it. Every public function may be called from any thread and waits for its result.
//
// States: loading (until finish_loading), ready, closed. A step that fails validation leaves the engine ready.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/batch.h"
#include "engine/rank_worker.h"
#include "model/decoder.h"
#include "model/params.h"

namespace infinilm {

struct EngineOptions {
    Device device;
    int num_threads = 0;  // CPU threads of the rank; 0: one per available core
    std::string isa;      // CPU instruction set; "": INFINILM_CPU_ISA, else the fastest
    // CUDA: a row's result never depends on the number of rows, also where faster kernels exist for many. CPUs always
    // hold to that.
    bool batch_invariant = true;
};

class InferEngine {
public:
    InferEngine(const ModelSpec& spec, const EngineOptions& options);
    ~InferEngine() { close(); }

    const ModelSpec& spec() const { return spec_; }
    const std::vector<ParamRow>& param_rows() const { return params_.rows(); }

    void load_param(const std::string& name,
                    Tensor tensor);               // the full tensor, [out_features, in_features] or [features]
    void load_dummy(DType dtype, uint64_t seed);  // random weights, for benchmarks
    void finish_loading();                        // all parameters are there: the engine can run
    // The tensors as loaded, read-only, by checkpoint name. WeightError: dummy weights made on a device are not kept.
    std::vector<std::pair<std::string, Tensor>> state_dict();
    // A new cache, empty; none for a spec of zeros. When there is no room for it the old one stays as it was.
    void reset_cache(const KvCacheSpec& cache);
    // Called inside forward at the named sites (taps.h) from the next step on; null: no more.
    void set_hooks(Hook hook, const std::vector<std::string>& names);
    // Runs a step after those submitted before; the batch stays as it is until the result is there.
    std::future<StepOutput> submit(const Batch& batch);
    StepOutput forward(const Batch& batch) { return submit(batch).get(); }
    int64_t weight_bytes() const { return params_.bytes(); }
    void close();  // frees weights, cache and threads; idempotent

private:
    template <class F>
    auto on_worker(F task) -> decltype(task());
    template <class F>
    auto submit_to_worker(F task) -> std::future<decltype(task())>;

    ModelSpec spec_;
    Params params_;
    std::unique_ptr<Backend> backend_;
    std::unique_ptr<Decoder> decoder_;
    KvCache cache_;
    Tensor previous_ids_;           // [num_rows] int32: what the last step sampled; absent if it did not or failed
    std::unique_ptr<HookTap> tap_;  // null: no hooks
    std::mutex mutex_;              // guards worker_
    std::unique_ptr<RankWorker> worker_;  // null once closed
};

}  // namespace infinilm
