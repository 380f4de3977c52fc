#include "cuda/sampling/sampling_host.h"

#include "cuda/sampling/kernels.h"

namespace infinilm::cuda {

SamplingWorkspace::SamplingWorkspace(cudaStream_t stream) {
    check(sampling_places(places_), "sampling_places");
    if (places_ == 0) return;
    const size_t bytes = sampling_workspace_bytes(places_);
    memory_ = std::make_unique<DeviceMemory>(bytes, "sampling");
    check(cudaMemsetAsync(memory_->data, 0, bytes, stream), "memory for sampling");
}

static AllowedArgs allowed_args(const AllowedTokens& mask) {
    return {.allowed = mask.allowed.as<const uint32_t>(),
            .allowed_stride = mask.allowed ? mask.allowed.stride(0) : 0,
            .allowed_row = mask.allowed_row.as<const int>()};
}

cudaError_t run_change_logits(const ChangeLogitsParams& p, cudaStream_t stream) {
    return change_logits({.logits = p.logits.as<float>(),
                          .logits_stride = p.logits.stride(0),
                          .num_rows = static_cast<int>(p.logits.shape(0)),
                          .n = static_cast<int>(p.logits.shape(1)),
                          .first_id = p.first_id,
                          .rows = p.changes.change_rows.as<const int>(),
                          .penalties = p.changes.penalties.as<const float>(),
                          .tokens = p.changes.change_tokens.as<int>(),
                          .input_ids = p.input_ids.as<const int>(),
                          .logits_rows = p.logits_rows.as<const int>(),
                          .undo = p.undo},
                         stream);
}

cudaError_t run_find_best(const FindBestParams& p, const SamplingWorkspace& workspace, cudaStream_t stream) {
    return find_best({.logits = p.logits.as<const float>(),
                      .logits_stride = p.logits.stride(0),
                      .num_rows = static_cast<int>(p.logits.shape(0)),
                      .n = static_cast<int>(p.logits.shape(1)),
                      .k = static_cast<int>(p.best.shape(1)),
                      .first_id = p.first_id,
                      .best = p.best.as<float>(),
                      .ids = p.ids.as<int>(),
                      .mask = allowed_args(p.mask),
                      .blocks = workspace.blocks()},
                     stream);
}

cudaError_t run_log_probs(const LogProbsParams& p, const SamplingWorkspace& workspace, cudaStream_t stream) {
    const int64_t width = p.ids.shape(1);
    if (width > 1 + max_candidates)
        throw DeviceError(concat("log_probs: a GPU finds ", max_candidates, " of the best at most, got ", width - 1));
    return log_probs({.logits = p.logits.as<const float>(),
                      .logits_stride = p.logits.stride(0),
                      .num_rows = static_cast<int>(p.logits.shape(0)),
                      .vocab_size = static_cast<int>(p.logits.shape(1)),
                      .width = static_cast<int>(width),
                      .drawn = p.drawn.as<const int>(),
                      .num_logprobs = p.num_logprobs.as<const int>(),
                      .ids = p.ids.as<int>(),
                      .logprobs = p.logprobs.as<float>(),
                      .blocks = workspace.blocks()},
                     stream);
}

cudaError_t run_sample(const SampleParams& p, const SamplingWorkspace& workspace, cudaStream_t stream) {
    return sample({.logits = p.logits.as<const float>(),
                   .logits_stride = p.logits.stride(0),
                   .num_rows = static_cast<int>(p.logits.shape(0)),
                   .vocab_size = static_cast<int>(p.logits.shape(1)),
                   .temperature = p.temperature.as<const float>(),
                   .top_k = p.top_k.as<const int>(),
                   .top_p = p.top_p.as<const float>(),
                   .min_p = p.min_p.as<const float>(),
                   .random_val = p.random_val.as<const float>(),
                   .ids = p.ids.as<int>(),
                   .token_ids = p.token_ids.as<const int>(),
                   .token_ids_stride = p.token_ids ? p.token_ids.stride(0) : 0,
                   .mask = allowed_args(p.mask),
                   .blocks = workspace.blocks()},
                  stream);
}

}  // namespace infinilm::cuda
