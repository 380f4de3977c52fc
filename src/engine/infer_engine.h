// The engine: loads weights, keeps the KV cache, runs steps. Python's scheduler decides what is in a step; the rank
// workers execute it, each its shard of the model. Every public function may be called from any thread and waits for
// its result.
//
// States: loading (until finish_loading), ready, dead, closed. What every rank refuses alike, such as a step that fails
// validation, leaves the engine as it was. With several ranks, one that fails alone, or while the others count on it,
// stops them all: the engine is dead, and every call throws EngineDeadError around the first cause. An engine of one
// rank does not die this way, as no other rank waits for it. A process that was forked from the engine's has none of
// its threads: every call throws EngineDeadError there, and close abandons what there is.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "dist/first_cause.h"
#include "dist/stage_link.h"
#include "engine/device_claim.h"
#include "engine/rank_worker.h"
#include "engine/step_graphs.h"
#include "model/batch.h"
#include "model/decoder.h"
#include "model/kv_cache.h"
#include "model/late_masks.h"
#include "model/params.h"
#include "ops/device_queue.h"
#include "ops/timed_backend.h"

namespace infinilm {

struct EngineOptions {
    std::vector<Device> devices{{}};  // of each rank, stage by stage of those here; several may name the same one
    int num_threads = 0;              // CPU threads of all ranks together; 0: one per physical core
    std::string isa;                  // CPU instruction set; "": INFINILM_CPU_ISA, else the fastest
    bool graphs = true;               // GPUs: decode steps are recorded and launched as one, see step_graphs.h
    std::string nccl_library;         // see GroupOptions
    PipelineOptions pipeline = {};
};

class InferEngine {
public:
    // ConfigError: a model, or a number of ranks for it, that cannot work. DeviceError: a device that cannot be used.
    InferEngine(const ModelSpec& spec, const EngineOptions& options);
    ~InferEngine() { close(); }

    const ModelSpec& spec() const { return spec_; }                    // of the whole model
    int num_ranks() const { return static_cast<int>(ranks_.size()); }  // of all stages that are here, one by one
    int ranks_per_stage() const { return ranks_per_stage_; }
    const std::vector<ParamRow>& param_rows() const { return ranks_[0]->params.rows(); }

    // The full tensor, [out_features, in_features] or [features]; each rank takes its part. A linear is prepared with
    // its last tensor; returns the names of those that were, whose memory is not read again. blocks: see Params::load.
    // stage: where stages are on unlike devices (PipelineOptions::dtypes), the one that takes it, in a form that is
    // made for its device; else -1, for all that are here.
    std::vector<std::string> load_param(const std::string& name, const Tensor& tensor, const Blocks& blocks = {},
                                        int stage = -1);
    std::vector<std::string> loaded_params();  // names
    // Names that load_param takes and this engine needs, or one stage of it; those of stages elsewhere count as loaded.
    std::vector<std::string> own_params(int stage = -1) const;
    // The linears that are prepared, packed, by name (see PackedTensors); they count as not loaded then. One rank.
    std::vector<std::pair<std::string, Tensor>> take_packed();
    // Other values of parameters, behind the steps submitted before: see Params::update. The cache stays as it is, and
    // what is in it is of the old ones. stage: as for load_param. WeightError: see Params::check_update; nothing has
    // changed then.
    void update_params(const Params::NamedTensors& tensors, int stage = -1);
    // How often parameters were loaded or changed; answers are a function of them.
    int64_t weights_version() const { return weights_version_; }
    void load_dummy(DType dtype, uint64_t seed);  // random weights, for benchmarks
    void finish_loading();                        // all parameters are there: the engine can run
    // The tensors of each rank, read-only, by checkpoint name: its parts of them. WeightError: dummy weights that were
    // made on a device are not kept.
    using StateDict = std::vector<std::pair<std::string, Tensor>>;
    std::vector<StateDict> state_dict();
    // Adapters, which steps name by id (Batch::adapter_ids) from the next one on. All of one are there or none.
    // WeightError: see Adapter, or an id that is taken.
    void add_adapter(int32_t id, const std::vector<LoraTensors>& tensors);
    void remove_adapter(int32_t id);  // after the steps submitted before; one that is not there is left alone
    // A new cache, empty; none for a spec of zeros. When there is no room for it the old one stays as it was. dtypes:
    // of keys and values in each stage, where these differ; else empty.
    void reset_cache(const KvCacheSpec& cache, const std::vector<DType>& dtypes = {});
    // Blocks of a group of layers, in the caches of all ranks that are here, as bytes: of each rank [num_blocks, bytes]
    // uint8; and back, behind the steps submitted before. RequestError: a block or bytes that do not fit.
    std::vector<Tensor> read_blocks(int group, const std::vector<int32_t>& blocks);
    void write_blocks(int group, const std::vector<int32_t>& blocks, const std::vector<Tensor>& bytes);
    // The same of a state, [1, bytes]; it has seen `num_tokens`.
    std::vector<Tensor> read_state(int32_t state);
    void write_state(int32_t state, int32_t num_tokens, const std::vector<Tensor>& bytes);
    // Called inside forward at the named sites (taps.h) from the next step on; null: no more.
    void set_hooks(const Hook& hook, const HookNames& names);
    // Takes the time of every op of the first rank of each stage from the next step on, beginning at zero; or no more.
    // WeightError: parameters are missing. ConfigError: see TimedBackend.
    void time_ops(bool on);
    OpTimes op_times();  // so far, of the steps submitted before; none while it is off
    // Runs a step after those submitted before; the batch stays as it is until the result is there. `abort` ends the
    // step early, between two halves of a layer, and only this one: the output says so. A step of a graph that has
    // begun is ended before it samples, if at all. `masks`: batch.allowed is not complete yet, and the step waits for
    // it before it samples; needs an `abort`, which ends this wait, as does close(). In a pipeline the last stage gives
    // the output, the others an empty one; stages begin with the next step when they have done their part of this one.
    std::future<StepOutput> submit(const Batch& batch, std::shared_ptr<StepAbort> abort = nullptr,
                                   std::shared_ptr<LateMasks> masks = nullptr);
    // The same, for the result. Error: a row that cannot be sampled, which submit gives a SampleFault in place of an
    // id.
    StepOutput forward(const Batch& batch);
    int64_t weight_bytes() const;  // of all ranks
    // Bytes of host memory that arrays of experts have taken so far whose weights are there, beside a GPU; else 0.
    int64_t host_expert_bytes();
    // All ranks of a stage have the same. stage: one that is here; -1: the first one. ConfigError: there is none such.
    GraphCounts graph_counts(int stage = -1);
    void close();  // frees weights, cache and threads; idempotent
    // In place of close where threads cannot be waited for: leaves everything to the end of the process. A closed
    // engine is what remains.
    void abandon();

private:
    struct Joint;
    // A step that a device works on while the rank goes on.
    struct UnderWay {
        std::shared_ptr<Joint> joint;
        Arrival* arrival;
    };
    // What a rank has. Only its worker touches it.
    struct Rank {
        Rank(int index, const ModelSpec& stage, Shard shard, size_t stage_here)
            : index(index), rank_of_stage(shard.rank), stage_here(stage_here), params(stage, shard) {}

        const int index, rank_of_stage;
        const size_t stage_here;  // of those of this engine
        std::unique_ptr<Backend> backend;
        std::unique_ptr<Communicator> communicator;  // among the ranks of its stage
        std::unique_ptr<StageLink> stages;           // null: all layers are here
        Params params;
        std::unique_ptr<TimedBackend> timed;  // null: ops are not timed
        std::unique_ptr<Decoder> decoder;     // once all parameters are there
        std::unique_ptr<StepGraphs> graphs;
        Adapters adapters;
        KvCache cache;
        BlockTable table;  // of steps on a GPU
        // [num_rows] int32 where the backend is: what the last step samples; absent if it does not or failed. On a GPU
        // a view of memory of the decoder.
        Tensor previous_ids;
        int64_t num_hidden = 0;          // tokens of the last step, whose hidden states an MTP head may go on from
        std::unique_ptr<HookTap> tap;    // null: no hooks
        RankWorker* worker = nullptr;    // that this is a rank of
        Arrival* arrival = nullptr;      // of the step that has just been enqueued, if it is left under way
        std::deque<UnderWay> under_way;  // enqueued and not concluded: at most steps_under_way, the oldest first
        int64_t num_ahead = 0;           // steps enqueued behind one under way
    };
    using Task = std::function<StepOutput(Rank&)>;

    void start(Rank& rank, const EngineOptions& options);
    // The first rank of a stage that is here; -1: of all. ConfigError: there is no such stage.
    const Rank& first_of(int stage) const;
    static bool is_of(const Rank& rank, int stage) {
        return stage < 0 || rank.stage_here == static_cast<size_t>(stage);
    }
    void check_parts(size_t count) const;  // RequestError: not one for each rank
    void prepare(Rank& rank);
    void make_decoder(Rank& rank, Backend& backend);
    StepOutput run(Rank& rank, const Batch& batch, StepAbort* abort, LateMasks* masks);
    StepOutput run_to_end(Rank& rank, const Batch& batch, StepAbort* abort, LateMasks* masks);
    // Runs the part of a step that a rank of a pipeline has. StepAborted: the stages behind are told.
    template <class F>
    static StepOutput run_stage(Rank& rank, const Batch& batch, F run_own);
    // Whether the outcome of a step is this rank's: of the first ones of stages, the last one here.
    bool gives_output(const Rank& rank) const { return rank.index == num_ranks() - ranks_per_stage_; }
    // On the device: all of a step without masks. The ids of one with masks are still missing: see sample_masked.
    template <class Tap>
    static StepOutput compute(Rank& rank, const Batch& staged, const Tap& tap);
    // The output of compute() with its ids, once the masks are there. masks: null if they were there from the start.
    StepOutput sample_masked(Rank& rank, const Batch& staged, const StepOutput& computed, LateMasks* masks);
    // Runs the task on every rank, after what was submitted before; the future has the output of gives_output().
    // is_step: it may begin while the device works on the step before.
    std::future<StepOutput> submit_to_ranks(Task task, bool is_step = false);
    void run_task(const std::shared_ptr<Joint>& joint, Rank& rank);
    // A part of a task on a rank, whose errors the task is told.
    template <class F>
    void attempt(Joint& joint, Rank& rank, F part);
    void conclude(Joint& joint);  // by each rank when it is done
    void settle(Rank& rank);      // waits for what is under way
    void settle_oldest(Rank& rank);
    void on_ranks(const std::function<void(Rank&)>& task);  // the same without an output, and waits
    template <class F>
    auto of_rank0(F f) {  // f(rank) on every rank; returns what it is on rank 0
        return of_rank(*ranks_[0], f);
    }
    template <class F>
    auto of_rank(const Rank& which, F f);
    // Runs f, in which ranks wait for each other: a rank that fails there stops them all.
    template <class F>
    auto together(F f) -> decltype(f());
    void fail(std::exception_ptr cause) noexcept;
    // Whether ranks wait for others, here or in another process.
    bool is_shared() const { return num_ranks() > 1 || !connections_.empty(); }
    // What a task comes to, from what each rank threw: null if all is well.
    std::exception_ptr outcome(const std::vector<std::exception_ptr>& errors);

    const OwnerProcess process_;
    ModelSpec spec_;
    const int num_threads_;  // of all ranks, on the CPU; also of an engine on GPUs
    const int ranks_per_stage_;
    std::optional<DeviceClaim> claim_;                            // until all memory of its devices is free
    std::vector<std::shared_ptr<CommunicatorGroup>> groups_;      // of each stage here
    std::vector<std::shared_ptr<StageConnections>> connections_;  // the same; none where there is one stage
    std::vector<std::shared_ptr<Rank>> ranks_;
    FirstCause cause_;
    std::atomic<int64_t> weights_version_ = 0;
    std::atomic<bool> dead_ = false;
    std::atomic<bool> closing_ = false;                 // no step waits for masks any more
    std::mutex mutex_;                                  // guards workers_; tasks reach all queues in the same order
    std::vector<std::unique_ptr<RankWorker>> workers_;  // one per rank; none once closed
};

}  // namespace infinilm
