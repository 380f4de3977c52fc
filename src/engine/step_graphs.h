// Decode steps as graphs, and small steps with drafts: a step of a shape that came before is one launch instead of
// hundreds. Used by InferEngine::run; each rank has one, which only its worker touches. Devices without graphs run
// every step eagerly.
//
// The first step of a shape runs eagerly, which allocates whatever the shape needs; the second is recorded; all from
// then on are launched. A shape is what sizes and grids of the step's kernels depend on (Key): the longest context
// counts as the next power of two. What attention has to do is a list that comes with the step's arrays, and its length
// is a power of two. The block table stays where it is (model/block_table.h).
//
// Masks come while the step runs, so a graph of a step with masks ends with the logits, and its tokens are sampled
// behind it.
//
// A graph holds addresses. The decoder and the backend keep theirs until they ask for more memory, and so does the
// buffer that the arrays of a step are taken to (DeviceQueue::upload). GraphRecorder::generation() tells when anything
// asks for memory, whatever it is for, and all graphs go; reset_cache clears them itself, see there.
//
// Ranks: all record and launch in the same steps. They get the same batches, and whether memory is asked for depends
// on shapes, which are the same on every rank; a failed attempt counts, too. A step that does
// more than to launch a graph begins when the one before has ended, so no kernel of a peer waits for this rank then.
// Whenever it has made or destroyed graphs, all meet at a barrier of the host before any enqueues more: the driver
// takes or gives back memory, for which it may wait for devices, and a kernel of a peer that were ahead would wait for
// this rank. Behind the barrier a launch allocates nothing (graph.cpp). Ideas: graphs for decode steps of padded
// shapes, vLLM (vllm/worker/model_runner.py); PyTorch does not free memory while ranks of a process launch NCCL's
// kernels (torch/csrc/cuda/nccl.cpp).
//
// Stages of a pipeline: a graph has the layers of its stage. The residual stream comes before it is launched, with the
// arrays of the step (Stage), and goes on behind it (Finish), since the host waits for another stage there.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "model/batch.h"
#include "ops/device_queue.h"

namespace infinilm {

// What has become of graphs, for tests and benchmarks.
struct GraphCounts {
    int64_t recorded = 0, launched = 0;
    int64_t launched_ahead = 0;  // of these, of steps without masks, behind a step that was under way
    int64_t kept = 0;
    std::string failure;  // why steps could not be recorded and all run eagerly; "": nothing failed
};

class StepGraphs {
public:
    // Runs a step whose arrays are on the device; the output is there too, valid until the next step.
    using Compute = std::function<StepOutput(const Batch& staged)>;

    StepGraphs(Backend& backend, Communicator& communicator, bool wanted)
        : communicator_(communicator),
          recorder_(wanted && communicator.capturable() && backend.queue() ? backend.queue()->recorder() : nullptr) {}

    // Takes a batch in host memory to the device.
    using Stage = std::function<Batch(const Batch& batch)>;
    // What follows the graph, which waits for the host: the output of compute() and what it lacks.
    using Finish = std::function<StepOutput(const Batch& staged, const StepOutput& computed)>;
    // Waits for the step before, if it is still under way.
    using Settle = std::function<void()>;
    // The batch is in host memory. A graph that is there is launched behind the step before.
    StepOutput run(const Batch& batch, const Stage& stage, const Settle& settle, const Compute& compute,
                   const Finish& finish);
    void clear() { keep(0); }
    GraphCounts counts() const;

private:
    struct Key {
        int64_t num_seqs, num_tokens;
        int query_len;  // most tokens of a sequence
        int64_t num_rows, context_len;
        std::vector<int64_t> most_items;  // of attention's decode and prefill, for each of its lists
        int width_logprobs;
        int num_candidates;      // of a rank, where there are several
        bool samples, masked;    // sampling with masks is no part of the graph
        bool drafts;             // a step of the MTP head
        int mtp_module;          // of that head
        bool writes_apart;       // see Batch
        bool verifies, replays;  // states do not take in drafts, and take in those of the step before that were right
        bool changes, returns;   // logits, before they are sampled from; as they were before that
        bool operator==(const Key&) const = default;
    };
    struct Entry {
        Key key;
        std::unique_ptr<Graph> graph;  // null: the shape came once
        StepOutput output;             // of the graph; views
    };
    // Drops what an allocation may have made invalid.
    void check_generation(const Settle& settle);
    void keep(size_t count);  // the entries of latest use
    // The entry of a shape that came before, which becomes the first; else null.
    Entry* find(const Key& key);
    // False: it cannot be, now or later.
    bool record(Entry& entry, const Batch& staged, const Compute& compute);

    Communicator& communicator_;
    GraphRecorder* recorder_;     // null: every step runs eagerly
    uint64_t generation_ = 0;     // of the entries
    std::vector<Entry> entries_;  // latest use first
    GraphCounts counts_;
};

}  // namespace infinilm
