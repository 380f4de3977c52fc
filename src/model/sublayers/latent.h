// Attention whose keys and values are made of one cached latent of each token. See LatentSpec.
#pragma once

#include <optional>

#include "model/sublayers/indexer.h"

namespace infinilm {

class Latent {
public:
    static constexpr Site site = sites::o_proj;  // of what it gives

    Latent(const ModelSpec& model, const LatentSpec& spec, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // The part of begin() that puts keys and values into the cache.
    template <class Tap>
    void store(const Step<Tap>& s, const Input& in) const;
    // All up to what o_proj reads; then that.
    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    template <class Tap>
    TensorView project(const Step<Tap>& s, const TensorView& x) const;

    PagedLayer own_;
    LatentSpec spec_;
    int64_t hidden_size_, num_heads_;
    Buffer qkv_;       // [num_tokens, (num_heads + 1) * row_dim]: heads of queries, then the row of the cache
    Buffer mixed_;     // [num_tokens, num_heads * v_dim]: what o_proj reads
    Buffer q_latent_;  // [num_tokens, q_rank]
    Buffer queries_;   // [num_tokens, num_heads * query_dim]
    Buffer latents_;   // [num_tokens, num_heads * kv_rank]: what attention gives
    Buffer gate_;      // [num_tokens, num_heads], or as many as are a multiple of 8; with head_gate

    LinearWeights q_a_;            // [q_rank, hidden_size], where there is a latent of queries
    VectorWeights q_latent_norm_;  // [q_rank]
    LinearWeights q_b_;            // [num_heads * query_dim, q_rank or hidden_size]
    LinearWeights kv_a_;           // [row_dim, hidden_size]
    VectorWeights latent_norm_;    // [kv_rank]
    LinearWeights k_b_;            // [num_heads * kv_rank, nope_dim]
    LinearWeights v_b_;            // [num_heads * v_dim, kv_rank]
    LinearWeights gate_proj_;      // [num_heads, hidden_size], with head_gate
    LinearWeights o_proj_;         // [hidden_size, num_heads * v_dim]
    std::optional<Indexer> indexer_;
};

}  // namespace infinilm
