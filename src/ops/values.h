// Checks of what arrays hold, not only of their shapes: ids, slots, blocks, lengths and sampling parameters stay inside
// what they index. Done where the host can read the arrays: by the ops on a CPU, and by the engine before a step's
// arrays leave for another device. Shapes and dtypes are valid already.
#pragma once

#include "core/check.h"

namespace infinilm {

inline bool readable(const TensorView& view) { return view.device().kind == DeviceKind::cpu; }

void check_ids(const Check&, std::string_view argument, const TensorView& ids, int64_t vocab_size);  // RequestError
void check_slots(const Check&, std::string_view argument, const TensorView& slot_mapping, int64_t num_slots);
void check_rows(const Check&, std::string_view argument, const TensorView& rows, int64_t num_tokens);
void check_sampling(const Check&, const TensorView& temperature, const TensorView& top_p, const TensorView& min_p,
                    const TensorView& random_val);

// Queries, keys and blocks of every sequence; see AttentionParams.
struct SequenceValues {
    TensorView block_table, cu_seqlens_q, context_lens;
    int64_t num_tokens, num_blocks, block_size;
    int sliding_window;
};
void check_sequences(const Check&, const SequenceValues&);

}  // namespace infinilm
