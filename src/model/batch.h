// One step of work: the tokens of any number of sequences, concatenated, and where their keys and values live.
// Prefill, chunked prefill and decode differ only in the numbers.
#pragma once

#include "core/tensor.h"
#include "model/block_table.h"
#include "model/kv_cache.h"
#include "model/spec.h"
#include "model/step_abort.h"
#include "ops/backend.h"

namespace infinilm {

struct Batch {
    Tensor input_ids;  // [num_tokens] int32
    // [num_tokens] int32, or absent. Where it is not negative, the token is the one that this row of the step before
    // sampled, and input_ids does not count: so a step can be made before the one before it is done. If that one failed
    // there is no such token, and any other takes its place: this step's result is thrown away.
    Tensor previous_rows;
    Tensor positions;     // [num_tokens] int32
    Tensor slot_mapping;  // [num_groups, num_tokens] int64: block * block_size + offset; groups: see KvCacheSpec
    Tensor block_table;   // [num_groups, num_seqs, max_blocks_per_seq] int32
    Tensor cu_seqlens_q;  // [num_seqs + 1] int32
    Tensor context_lens;  // [num_seqs] int32: tokens in the cache after this step
    // [num_seqs] int32, or absent: the same for the second group of layers, where their sequences are shorter: those of
    // a tower whose layers see windows of an image, and all of it (see Tower).
    Tensor window_lens;
    // [num_seqs] int32, or absent: where it is not 0, the tokens of the step see all tokens of their sequence up to its
    // last, as those of an image do in some models. See AttentionParams.
    Tensor two_way_seqs;
    Tensor adapter_ids;  // [num_seqs] int32, -1: none; or absent. See Adapters
    // Absent unless the model has layers with a state. See StateSteps.
    Tensor state_in;      // [num_seqs] int32
    Tensor state_out;     // [num_seqs] int32
    Tensor state_tokens;  // [num_seqs] int32, or absent: no sequence has drafts
    Tensor num_replayed;  // [num_seqs] int32, or absent: none
    // [num_tokens] int32, or absent. Present: this is a step of the MTP head, which goes on, for each token, from the
    // hidden state of this row of the step before, of the model or of the head. See MtpHead.
    Tensor hidden_rows;
    Tensor token_types;  // [num_tokens] int32, or absent: all are 0. See EmbeddingSumSpec
    // [num_axes, num_tokens] int32, or absent: on each axis a token's position is that in `positions`. See RopeSpec.
    Tensor rope_positions;
    // Embeddings of some tokens, whose ids do not count; both absent: of none. See Given.
    Tensor given;       // [num_given, given_levels * hidden_size] float32
    Tensor given_rows;  // [num_given] int32: which tokens they are of, none twice
    // The patches of a tower, which are its tokens, see Tower; else absent.
    Tensor patches;           // [num_tokens, patch_dim] float32
    Tensor position_rows;     // [num_tokens, n] int32: rows of the table of positions that a patch adds
    Tensor position_weights;  // [num_tokens, n] float32: times these
    Tensor logits_rows;       // [num_rows] int32: tokens whose logits are wanted, usually the last of each sequence

    // One per logits row; all absent: nothing is sampled. See SampleParams.
    Tensor temperature;  // [num_rows] float32
    Tensor top_k;        // [num_rows] int32
    Tensor top_p;        // [num_rows] float32
    Tensor min_p;        // [num_rows] float32
    Tensor random_val;   // [num_rows] float32 in [0, 1)
    // Which tokens a row may draw, see AllowedTokens; both absent: all may draw all. Only the sampler reads `allowed`,
    // so it may be filled while the forward pass runs: see LateMasks.
    Tensor allowed;      // [num_masks, ceil(vocab_size / 32)] int32
    Tensor allowed_row;  // [num_rows] int32, -1: no mask
    // What rows change in their logits before they sample, see LogitChanges; all absent: nothing.
    Tensor change_rows;    // [num_rows, 2] int32
    Tensor penalties;      // [num_rows, 3] float32
    Tensor change_tokens;  // [num_changes, 3] int32
    // [num_rows] int32; all -1 is as absent. Each row wants the log-probabilities of so many of the best, and of what
    // it samples, before changes and masks; at most max_candidates, -1: none. See LogProbsParams.
    Tensor num_logprobs;
    bool return_logits = false;  // as they were before changes and masks
    int mtp_module = 0;          // with hidden_rows: which module of the MTP head computes it
    // Set by stage() for models whose embedding is a sum, [num_tokens] int32: see EmbeddingSum.
    Tensor sum_rows = {};
    // Set by stage() for models whose tokens choose the keys that they read, where each token is a sequence of its own:
    // where it begins, [num_tokens + 1] int32, and how many keys it reads, [num_tokens] int32.
    Tensor token_starts = {};
    Tensor token_lens = {};
    // Set by stage() where embeddings are given: see Given.
    Tensor given_table = {};     // [given_levels, num_given + 1, hidden_size] activation
    Tensor given_of_token = {};  // [num_tokens] int32
    Tensor own_vector_ids = {};  // [num_tokens] int32, of models with OwnVectors: rows of their table
    // Set by Tower::place: what the positions of patches add, [num_tokens, hidden_size] activation, or absent.
    Tensor patch_positions = {};
    // Set by Tower::place, [num_patches] int32: where rows are made of means, the first patch of each row, then the
    // second of each, and so on; where there are class tokens, all patches but these; or absent.
    Tensor apart_rows = {};
    // Set by Tower::place where these means are standardised: ones, [num_rows, 1] float32, and what is added to each
    // mean, [num_rows, hidden_size] activation.
    Tensor unit_squares = {}, pooled_offsets = {};
    // Set by stage() on a device with a queue: for all layers that differ in it, what attention has to do.
    Tensor attention_work = {};                       // [num_elements, 4] int32, see AttentionWork
    std::vector<AttentionList> attention_lists = {};  // in its order
    // The same: each sequence has one token, and none reads a key that another one writes. See store_kv_and_attend().
    bool writes_apart = false;
    // Set by check_values(): what of block_table its sequences use and BlockTable has not.
    TableSpans table_spans = {};
    // Set by resolve().
    Tensor previous_ids = {};  // what previous_rows are rows of, where the backend is; absent: no token is taken
    int max_query_len = 0, max_context_len = 0;
    int width_logprobs = 0;  // 0: no row wants any; else columns of StepOutput::logprobs; a power of two more than one,
                             // so that few differ
    int num_candidates = 0;  // so many of the best logits of a row decide all that is wanted; 0: all of them may
    int64_t num_hidden = 0;  // rows of the step before, where hidden_rows are there
    StepAbort* abort = nullptr;  // asked between pieces of work; null: the step runs to its end

    const Tensor& lens_of(int group) const { return group == 1 && window_lens ? window_lens : context_lens; }
};

inline StateSteps state_steps(const Batch& batch) {
    return {.cu_seqlens_q = batch.cu_seqlens_q,
            .state_in = batch.state_in,
            .state_out = batch.state_out,
            .state_tokens = batch.state_tokens,
            .num_replayed = batch.num_replayed};
}

// The pieces of a step that an abort may fall between; the 0th is what comes before the first layer.
inline void begin_attention(const Batch& batch, int layer) {
    if (batch.abort) batch.abort->begin(static_cast<uint32_t>(2 * layer + 1));
}
inline void begin_mlp(const Batch& batch, int layer) {
    if (batch.abort) batch.abort->begin(static_cast<uint32_t>(2 * layer + 2));
}

struct StepOutput {
    // What was sampled, as one array that one transfer takes to the host: [1 + 2 * width, num_rows] int32, absent when
    // nothing was.
    Tensor sampled;
    // [num_rows, vocab_size] float32, absent unless asked for; without an lm_head [num_rows, hidden_size], see
    // ModelSpec::lm_head.
    Tensor logits;
    bool aborted = false;  // nothing else is here, and the cache may hold some of the step's keys and values, or none
};

// The parts of StepOutput::sampled, in place.
struct Sampled {
    explicit Sampled(const Tensor& all);
    Tensor ids;          // [num_rows] int32
    Tensor logprob_ids;  // [num_rows, width] int32: the token that was sampled, then the best; absent if width is 0
    Tensor logprobs;     // [num_rows, width] float32, the same
};

// The batch with the fields that are set here. previous_ids: the tokens that the step before sampled, [num_rows] int32
// where the backend is, or absent. They may still be on their way: stage() puts them into their places.
Batch resolve(const Batch& batch, const Tensor& previous_ids);
// Checks that the step has slots and tables for each group of the cache.
void check_groups(const Batch& batch, const KvCacheSpec& cache);
// Checks positions on axes and given embeddings. RequestError: the model takes no such, or they are of another shape.
void check_given(const Batch& batch, const ModelSpec& spec);
// Checks a step of the MTP head. RequestError: the model has none, or hidden_rows are no rows of the step before.
void check_draft(const Batch& batch, const ModelSpec& spec);
// Whether a step of the MTP head stores keys and values and does no more: it wants no logits, and no module comes
// behind this one. Then the hidden states stay those of the step before.
bool stores_alone(const Batch& batch, const ModelSpec& spec);
// Checks what the arrays hold, in host memory: where the ops cannot read them, and where one rank that refuses a step
// that others run would let them wait. All ranks find the same. table: of the rank; what it has was checked before.
void check_values(Batch& batch, const ModelSpec& spec, const KvCache& cache, const BlockTable& table);
// The batch, checked, on the backend's device, in one transfer, valid until the next call; but for `allowed`, which
// stays. The tokens of the step before are in their places. spec: of the rank.
Batch stage(Backend& backend, const ModelSpec& spec, const KvCache& cache, BlockTable& table, const Batch& batch);
// A staged batch with `allowed` on the device, too, valid until the next call.
Batch stage_allowed(Backend& backend, const Batch& staged);
// Bytes that it takes on a device, at most, for steps with so many masks; nothing on a CPU.
int64_t stage_allowed_bytes(int64_t vocab_size, int64_t num_masks);
// Bytes that change_tokens of so many rows take on a device, at most but for steps with millions of them.
int64_t stage_changes_bytes(const ModelSpec& spec, int64_t num_rows);
// The output in host memory; the step is done then. Where the device has a queue, a step that gives no logits
// need not be waited for: DeviceQueue::fetch. num_logits: of a row, see ModelSpec.
StepOutput to_host(Backend& backend, const StepOutput& output, int64_t num_logits);

}  // namespace infinilm
