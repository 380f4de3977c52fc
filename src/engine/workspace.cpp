#include "engine/workspace.h"

#include <algorithm>

#include "core/topology.h"
#include "cpu/cpu_backend.h"
#include "dist/nccl.h"
#include "model/batch.h"
#include "model/decoder.h"
#include "model/given.h"
#include "model/params.h"
#include "model/sublayers/experts.h"
#include "ops/cuda_library.h"

namespace infinilm {

int64_t workspace_bytes(const ModelSpec& model, const StepLimits& step, const RankPlan& plan) {
    const bool on_cpu = plan.device == DeviceKind::cpu;
    const int size = plan.num_ranks;
    const Model rank(local_spec(model, {size - 1, size}));  // where parts are not equal, the last is the largest
    const ModelSpec& spec = rank.spec;
    const DType activation = on_cpu ? cpu::activation_dtype : spec.dtype;
    const int64_t of_a_rank =
        Decoder::workspace_bytes(rank, activation, std::max(step.num_tokens, step.num_rows), step.most_rank) +
        (spec.tower             ? 2 * step.num_tokens / spec.tower->merged_patches * spec.tower->num_levels() *
                                      spec.tower->out_size() * size_bytes(DType::float32)
         : !spec.lm_head        ? 2 * step.num_returned_rows * spec.hidden_size * size_bytes(DType::float32)
         : spec.is_last_stage() ? Logits::workspace_bytes(spec, size, step.num_rows, step.num_returned_rows)
                                : 0);
    if (!on_cpu) {
        const int64_t exchanged = step.num_tokens * spec.hidden_size;
        return of_a_rank + stage_allowed_bytes(spec.vocab_size, step.num_rows) +
               stage_changes_bytes(spec, step.num_rows) + stage_given_bytes(spec, step.num_tokens) +
               host_workspace(spec, step.num_tokens, plan.num_threads).on_device +
               KvCache::workspace_bytes(spec, step.num_rows * spec.max_model_len) +
               (spec.is_last_stage() ? 0 : exchanged * size_bytes(activation)) +  // StageLink's outbox
               (spec.fp8_inputs ? fp8_inputs_bytes : 0) +
               (size > 1 ? nccl_workspace_bytes(size, activation, exchanged) : 0);
    }
    std::vector<cpu::LargestCalls::Linears> linears{{.num_tokens = step.num_tokens, .in_features = spec.hidden_size}};
    for (const LinearCall& call : rank.calls()) {
        linears.push_back(
            {.num_tokens = step.num_tokens * call.rows, .in_features = call.in_features, .count = call.count});
        if (call.adaptable && step.num_adapters > 0)
            linears.push_back(
                {.num_tokens = step.num_tokens, .in_features = call.in_features, .count = step.num_adapters});
    }
    if (step.num_adapters > 0)
        linears.push_back({.num_tokens = step.num_tokens, .in_features = step.most_rank, .count = step.num_adapters});
    CacheSpec widest;  // of all layers that read rows
    for (const CacheSpec& layer : spec.caches())
        for (const auto size : {&CacheSpec::num_heads, &CacheSpec::num_kv_heads, &CacheSpec::head_dim,
                                &CacheSpec::value_dim, &CacheSpec::index_dim, &CacheSpec::top_k})
            widest.*size = std::max(widest.*size, layer.*size);
    const cpu::ScratchBytes scratch =
        cpu::scratch_bytes({.num_threads = plan.num_threads, .isa = "", .compute_dtype = spec.dtype},
                           {.num_tokens = step.num_tokens,
                            .linears = std::move(linears),
                            .num_heads = widest.num_heads,
                            .num_kv_heads = widest.num_kv_heads,
                            .head_dim = widest.head_dim,
                            .value_dim = widest.value_dim,
                            .max_context_len = spec.max_model_len,
                            .index_head_dim = widest.index_dim,
                            .index_top_k = widest.top_k});
    const int threads = std::max(size, plan.num_threads > 0 ? plan.num_threads : default_num_threads());
    return size * (of_a_rank + scratch.shared) + threads * scratch.of_a_thread;
}

HostWorkspace host_workspace(const ModelSpec& model, int64_t num_tokens, int num_threads) {
    HostExperts::TokenSizes largest;
    std::vector<cpu::LargestCalls::Linears> linears;
    for (const LayerSpec& layer : model.layers) {
        if (!layer.experts || !layer.experts->on_host) continue;
        const HostExperts::TokenSizes own = sizes_on_host(model, *layer.experts);
        for (const auto size :
             {&HostExperts::TokenSizes::x, &HostExperts::TokenSizes::shared, &HostExperts::TokenSizes::out,
              &HostExperts::TokenSizes::inner, &HostExperts::TokenSizes::parts, &HostExperts::TokenSizes::top_k})
            largest.*size = std::max(largest.*size, own.*size);
        for (const int64_t in_features : {own.x, int64_t{layer.experts->expert.intermediate_size}})
            linears.push_back({.num_tokens = num_tokens * layer.experts->top_k,
                               .in_features = in_features,
                               .count = layer.experts->count});
    }
    if (linears.empty()) return {};
    const cpu::ScratchBytes scratch =
        cpu::scratch_bytes({.num_threads = num_threads, .isa = "", .compute_dtype = model.dtype},
                           {.num_tokens = num_tokens, .linears = std::move(linears)});
    const HostExperts::Bytes bytes = HostExperts::bytes_of(largest, num_tokens, model.dtype);
    const int threads = num_threads > 0 ? num_threads : default_num_threads();
    return {.arrays = bytes.arrays,
            .others = bytes.copies + scratch.shared + threads * scratch.of_a_thread,
            .on_device = bytes.on_device};
}

int64_t weight_bytes(const ModelSpec& model, DType dtype, int num_ranks) {
    int64_t most = 0;
    for (int rank = 0; rank < num_ranks; ++rank)
        most = std::max(most, Params(model, {rank, num_ranks}).prepared_bytes(dtype));
    return most;
}

}  // namespace infinilm
