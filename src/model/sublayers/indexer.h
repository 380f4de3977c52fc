// The part of attention that chooses the keys of each token. See IndexerSpec.
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
    // at: "model.layers.N.self_attn.". All ranks have all of an indexer of latents, so that all choose the same.
    void declare(ParamTable& table, const std::string& at, int64_t hidden_size, int64_t q_rank);
    // by_head: ranks have the heads of their heads of keys. q_rows: which of num_heads * head_dim rows that are.
    void declare_by_head(ParamTable& table, const std::string& at, int64_t hidden_size, int64_t num_heads,
                         const Cut& q_rows);
    std::vector<LinearCall> calls(int64_t hidden_size, int64_t q_rank) const;
    std::vector<Site> sites() const;

    // Makes queries, and stores the keys of the step's tokens. x: [num_tokens, hidden_size]; q_latent: [num_tokens,
    // q_rank], normed, or absent.
    template <class Tap>
    void store(const Step<Tap>& s, const TensorView& x, const TensorView& q_latent) const;
    // Chooses among all: slots [num_tokens, top_k] int32, as ChooseKeysParams has them, until the next call. by_head:
    // for this head of keys.
    template <class Tap>
    TensorView choose(const Step<Tap>& s, int head = 0) const;

private:
    // Turns and stores what qk has, after norms of heads where there are such.
    template <class Tap>
    void turn_and_store(const Step<Tap>& s) const;

    IndexerSpec spec_;
    int rope_;        // which of ModelSpec::ropes turns
    Buffer qk_;       // [num_tokens, (num_heads + 1) * head_dim]: heads of queries, then the key
    Buffer weights_;  // [num_tokens, num_heads, to a multiple of 8] float32; not by_head
    Buffer slots_;    // [num_tokens, top_k] int32; of the layer before, where that chose

    LinearWeights wq_b_;             // [num_heads * head_dim, q_rank]
    LinearWeights wk_;               // [head_dim, hidden_size]
    LinearWeights qk_proj_;          // by_head, both: [(num_heads + 1) * head_dim, hidden_size]
    VectorWeights q_norm_, k_norm_;  // [head_dim]; q_norm: by_head
    LinearWeights weights_proj_;     // [num_heads, hidden_size]; not by_head
};

}  // namespace infinilm
