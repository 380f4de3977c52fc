// Latent attention (DeepSeek-AI 2024, arXiv:2405.04434): what it says of itself. Its weights and math are in latent.h.
#pragma once

#include <optional>

#include "model/sublayers/indexer_spec.h"

namespace infinilm {

// The keys and values of all heads are made of one latent of each token, and of one short key that RoPE turns; the
// cache has these two. Instead of each key, its query is brought to the latent, and instead of each value, what
// attention gives: all heads read the same row, [rope_dim + kv_rank], and as values its last kv_rank elements.
struct LatentSpec {
    int num_heads = 0;
    int q_rank = 0;                  // of the latent that queries are made of; 0: they are made of the hidden state
    int kv_rank = 0;                 // of the cached latent
    int rope_dim = 0, nope_dim = 0;  // elements of a query that RoPE turns, and others
    int v_dim = 0;                   // of a head's values
    float norm_eps = 0;              // of the norms of latents
    float softmax_scale = 0;
    int rope = -1;     // which of ModelSpec::ropes turns
    int q_scale = -1;  // which scales whole queries by their position, and turns nothing; -1: none
    bool latent_bias = false, out_bias = false;
    bool head_gate = false;  // what a head gives is multiplied by the sigmoid of a linear of the hidden state
    std::optional<IndexerSpec> indexer;  // by which each token chooses what it reads; absent: it reads all that it sees

    int query_dim() const { return rope_dim + nope_dim; }
    int row_dim() const { return rope_dim + kv_rank; }

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const { return {{"attention heads", num_heads}}; }
    LatentSpec local(Shard shard) const;
    CacheSpec cache() const;
    const char* only_on_cpus() const { return indexer ? indexer->only_on_cpus() : nullptr; }
    // Where rows are chosen, as many count for each token as it may choose.
    CostSpec cost() const {
        const int64_t of_row = int64_t{num_heads} * (row_dim() + kv_rank);
        if (!indexer) return {.of_pair = of_row};
        return {.of_pair = indexer->cost_of_pair(), .of_token = 2 * indexer->top_k * of_row};
    }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_heads", &LatentSpec::num_heads, "");
        f("q_rank", &LatentSpec::q_rank, "0: queries are made of the hidden state.");
        f("kv_rank", &LatentSpec::kv_rank, "");
        f("rope_dim", &LatentSpec::rope_dim, "Elements of a query that RoPE turns.");
        f("nope_dim", &LatentSpec::nope_dim, "And what it does not.");
        f("v_dim", &LatentSpec::v_dim, "Elements of a heads values.");
        f("norm_eps", &LatentSpec::norm_eps, "Epsilon in the norms of latents.");
        f("softmax_scale", &LatentSpec::softmax_scale, "");
        f("rope", &LatentSpec::rope, "An index into ModelSpec.ropes.");
        f("q_scale", &LatentSpec::q_scale, "The rope that scales whole queries by their position; -1: none.");
        f("latent_bias", &LatentSpec::latent_bias, "The linears that make latents have biases.");
        f("out_bias", &LatentSpec::out_bias, "");
        f("head_gate", &LatentSpec::head_gate, "What a head gives is multiplied by the sigmoid of a linear.");
        f("indexer", &LatentSpec::indexer, "By which each token chooses what it reads; None: it reads all.");
    }
};

}  // namespace infinilm
