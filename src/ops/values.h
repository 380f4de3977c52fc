// Checks of what arrays hold, not only of their shapes: ids, slots, blocks, lengths and sampling parameters stay inside
// what they index. Done where the host can read the arrays: by the ops on a CPU, and by the engine before a step's
// arrays leave for another device. Both check shapes and dtypes first, which are templates here for the same reason.
#pragma once

#include <vector>

#include "core/check.h"
#include "ops/backend.h"

namespace infinilm {

inline bool readable(const TensorView& view) { return view.device().kind == DeviceKind::cpu; }

void check_ids(const Check&, std::string_view argument, const TensorView& ids, int64_t vocab_size);  // RequestError
void check_slots(const Check&, std::string_view argument, const TensorView& slot_mapping, int64_t num_slots);
void check_rows(const Check&, std::string_view argument, const TensorView& rows, int64_t num_tokens);

// The sampling parameters of a step, those of SampleParams, which Batch has too: [num_rows] each.
template <class AnyCheck, class Params>
void check_sampling_arrays(AnyCheck& check, const Params& p) {
    check.tensor("temperature", p.temperature, {"num_rows"}, DType::float32);
    check.tensor("top_k", p.top_k, {"num_rows"}, DType::int32);
    check.tensor("top_p", p.top_p, {"num_rows"}, DType::float32);
    check.tensor("min_p", p.min_p, {"num_rows"}, DType::float32);
    check.tensor("random_val", p.random_val, {"num_rows"}, DType::float32);
}
// AllowedTokens of token ids below num_ids, which Batch has too.
template <class AnyCheck>
void check_mask_arrays(AnyCheck& check, const TensorView& allowed, const TensorView& allowed_row, int64_t num_ids) {
    check.require(static_cast<bool>(allowed) == static_cast<bool>(allowed_row),
                  "allowed and allowed_row belong together: expected both or neither");
    if (!allowed) return;
    check.tensor("allowed", allowed, {"num_masks", "num_words"}, DType::int32);
    check.tensor("allowed_row", allowed_row, {"num_rows"}, DType::int32);
    check.require(32 * check["num_words"] >= num_ids, "allowed: expected at least ", (num_ids + 31) / 32,
                  " words, the bits of token ids up to ", num_ids - 1, "; got ", check["num_words"]);
}
// LogitChanges, which Batch has too.
template <class AnyCheck, class Params>
void check_change_arrays(AnyCheck& check, const Params& p) {
    check.tensor("change_rows", p.change_rows, {"num_rows", 2}, DType::int32);
    check.tensor("penalties", p.penalties, {"num_rows", 3}, DType::float32);
    check.tensor("change_tokens", p.change_tokens, {"num_changes", 3}, DType::int32);
}
// Each row has its own tokens, which are below num_ids, and penalties that can be computed with.
void check_changes(const Check&, const LogitChanges&, int64_t num_ids);
void check_masks(const Check&, const TensorView& allowed, const TensorView& allowed_row);  // each row has its mask
// Each row asks for the log-probabilities of so many of its best tokens: -1 to `most`.
void check_counts(const Check&, const TensorView& num_logprobs, int64_t most);
void check_sampling(const Check&, const TensorView& temperature, const TensorView& top_p, const TensorView& min_p,
                    const TensorView& random_val);

// The sequences of a step, as AttentionParams and Batch have them.
template <class AnyCheck, class Params>
void check_sequence_arrays(AnyCheck& check, const Params& p) {
    check.tensor("block_table", p.block_table, {"num_seqs", "max_blocks_per_seq"}, DType::int32);
    check.tensor("cu_seqlens_q", p.cu_seqlens_q, {check["num_seqs"] + 1}, DType::int32);
    check.tensor("context_lens", p.context_lens, {"num_seqs"}, DType::int32);
}
// Entries [begin, end) of a row of a block table.
struct TableSpan {
    int64_t row, begin, end;
};
// Queries, keys and blocks of every sequence; see AttentionParams.
struct SequenceValues {
    TensorView block_table, cu_seqlens_q, context_lens;
    int64_t num_tokens, num_blocks, block_size;
    int sliding_window;
    TensorView known_table = {};  // [rows, columns] int32: entries that are as here are right, and are not looked at
    std::vector<TableSpan>* others = nullptr;  // gets those that are looked at
};
void check_sequences(const Check&, const SequenceValues&);

// StateSteps, of num_tokens tokens and num_states states; Batch has the same.
// log_rows: of a state.
void check_state_steps(const Check&, const StateSteps&, int64_t num_tokens, int64_t num_states, int64_t log_rows = 0);
// That each sequence has no more drafts than the log has rows.
void check_log_rows(const Check&, const StateSteps&, int64_t log_rows);

}  // namespace infinilm
