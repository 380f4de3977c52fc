// The embedding of a token as a sum, as in BERT: its own row, that of its position and that of its type. The last two
// are added up when weights are prepared, so that a step looks up one row for both. See EmbeddingSumSpec.
#pragma once

#include "model/step.h"
#include "model/table.h"

namespace infinilm {

class EmbeddingSum {
public:
    explicit EmbeddingSum(const ModelSpec& model);
    void declare(ParamTable& table);
    void prepare(Backend& backend);  // once the tensors are there
    void clear() { rows_ = {}; }
    // Adds to the embedding in s.x.
    template <class Tap>
    void add(const Step<Tap>& s) const;

private:
    EmbeddingSumSpec spec_;
    int64_t hidden_size_;
    VectorWeights positions_;  // [num_positions, hidden_size]
    VectorWeights types_;      // [num_types, hidden_size]
    Tensor rows_;              // [num_types * num_positions, hidden_size] activation: see Batch::sum_rows
};

// For each token of a step its row of EmbeddingSum, [num_tokens] int32. RequestError: a position or a type that the
// model has not.
Tensor sum_rows(const EmbeddingSumSpec& spec, const TensorView& positions, const TensorView& token_types);

}  // namespace infinilm
