// What the memory plan asks before there is an engine: bytes of weights, and of all that the steps of a model take
// besides weights and cache. Each sum is computed beside the allocations that it describes; here they are added up.
#pragma once

#include "core/tensor.h"
#include "model/spec.h"

namespace infinilm {

// The largest steps of an engine.
struct StepLimits {
    int64_t num_tokens = 0;         // of a step
    int64_t num_rows = 0;           // of logits that tokens are drawn from
    int64_t num_returned_rows = 0;  // of logits that are returned, besides
    int64_t num_adapters = 0;       // in one step
    int64_t most_rank = 0;          // of them
};

// Where they run.
struct RankPlan {
    int num_ranks = 1;
    DeviceKind device = DeviceKind::cpu;  // of all ranks
    int num_threads = 0;                  // CPU threads of all ranks together; 0: one per physical core
};

// On a CPU the sum over all ranks of a stage, which share its memory; else one GPU. model: whole, or a stage.
int64_t workspace_bytes(const ModelSpec& model, const StepLimits& step, const RankPlan& plan);

// Experts that stay in memory of the host beside a GPU: what the largest steps take there besides their weights, and
// what these steps take on the GPU for that.
struct HostWorkspace {
    int64_t arrays = 0;     // HostExperts::bytes, once the largest step has run
    int64_t others = 0;     // scratch of the CPU's kernels, and pinned memory
    int64_t on_device = 0;  // where results arrive; a part of workspace_bytes
};
HostWorkspace host_workspace(const ModelSpec& model, int64_t num_tokens, int num_threads);

// Bytes of the rank that has most, as tensors of that dtype. model: whole, or a stage.
int64_t weight_bytes(const ModelSpec& model, DType dtype, int num_ranks);

}  // namespace infinilm
