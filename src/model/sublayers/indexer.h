// The part of latent attention that chooses the keys of each token. See IndexerSpec.
#pragma once

#include "model/sublayers/paged.h"

namespace infinilm {

namespace sites {
// Behind RoPE, [num_tokens, num_heads, head_dim] and [num_tokens, 1, head_dim] of the indexer; and [num_tokens,
// num_heads] float32, by which scores of its heads are added up.
inline constexpr Site index_q{"index_q"}, index_k{"index_k"}, index_weights{"index_weights"};
}  // namespace sites

class Indexer {
public:
    Indexer(const IndexerSpec& spec, int rope, BufferPlan& plan);
    // at: "model.layers.N.self_attn.". All ranks have all of it, so that all choose the same.
    void declare(ParamTable& table, const std::string& at, int64_t hidden_size, int64_t q_rank);
    std::vector<LinearCall> calls(int64_t hidden_size, int64_t q_rank) const;
    std::vector<Site> sites() const;

    // Stores the keys of the step's tokens, and chooses among all: slots [num_tokens, top_k] int32, as ChooseKeysParams
    // has them. x: [num_tokens, hidden_size]; q_latent: [num_tokens, q_rank], normed.
    template <class Tap>
    TensorView choose(const Step<Tap>& s, const TensorView& x, const TensorView& q_latent) const;

private:
    IndexerSpec spec_;
    int rope_;        // which of ModelSpec::ropes turns
    Buffer qk_;       // [num_tokens, (num_heads + 1) * head_dim]: heads of queries, then the key
    Buffer weights_;  // [num_tokens, num_heads, to a multiple of 8] float32
    Buffer slots_;    // [num_tokens, top_k] int32; of the layer before, where that chose

    LinearWeights wq_b_;          // [num_heads * head_dim, q_rank]
    LinearWeights wk_;            // [head_dim, hidden_size]
    VectorWeights k_norm_;        // [head_dim]
    LinearWeights weights_proj_;  // [num_heads, hidden_size]
};

}  // namespace infinilm
