// Attention over the keys and values of each head. See AttentionSpec.
#pragma once

#include <optional>

#include "model/sublayers/indexer.h"

namespace infinilm {

namespace sites {
inline constexpr Site v_proj{"v_proj"};                    // [num_tokens, num_kv_heads, value_dim], with bias
inline constexpr Site q_norm{"q_norm"}, k_norm{"k_norm"};  // q and k after qk-norm, in models that have it
inline constexpr Site v_norm{"v_norm"};                    // and v after its norm
}  // namespace sites

class Attention {
public:
    static constexpr Site site = sites::o_proj;  // of what it gives

    Attention(const ModelSpec& model, const AttentionSpec& spec, BufferPlan& plan);
    // at: begins the names of its tensors. whole: of all ranks.
    void declare(ParamTable& table, const std::string& at, const AttentionSpec& whole);
    void declare(ParamTable& table);  // that of a layer
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // The part of begin() that puts keys and values into the cache.
    template <class Tap>
    void store(const Step<Tap>& s, Input in) const;
    // All up to what o_proj reads; then that.
    template <class Tap>
    void begin(const Step<Tap>& s, Input in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

    LinearWeights& qkv_proj() { return qkv_proj_; }

private:
    // Returns what is left to attention: norms of heads, RoPE and the cache, or nothing.
    template <class Tap>
    std::optional<RopeStoreParams> project(const Step<Tap>& s, Input in) const;
    // Norms of q and of k that are no part of the op of RoPE: over all heads, those of all ranks, or LayerNorm of each.
    template <class Tap>
    void norm_all_heads(const Step<Tap>& s, const TensorView& qkv) const;

    AttentionSpec spec_;
    PagedLayer own_;
    int64_t hidden_size_, in_size_;
    Buffer qkv_;           // [num_tokens, qkv_dim]
    Buffer mixed_;         // [num_tokens, mixed_dim]: what o_proj reads
    Buffer gate_;          // [num_tokens, gate_dim], or as many as are a multiple of 8; with output_gate
    Buffer ungated_;       // [num_tokens, mixed_dim]: what attention gives, before that multiplies it
    Buffer mean_squares_;  // [2 * num_tokens, 1] float32: of q and of k over all heads, where these are normed

    LinearWeights qkv_proj_;         // q, k, v: [qkv_dim, in_size]; or q alone
    LinearWeights gate_proj_;        // [gate_dim, in_size], with output_gate
    LinearWeights o_proj_;           // [hidden_size, mixed_dim]
    VectorWeights q_norm_, k_norm_;  // [head_dim], or of all heads, whether normed together or not; with qk_norm
    VectorWeights v_norm_;           // [head_dim] ones, with v_norm; no checkpoint has it
    VectorWeights sinks_;            // [num_heads] float32 once prepared
    std::optional<Indexer> indexer_;
};

}  // namespace infinilm
