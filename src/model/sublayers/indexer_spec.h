// An indexer, by which a token chooses the keys that it reads: what it says of itself. Its weights and math are in
// indexer.h.
#pragma once

#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

// Small heads score all keys that a token sees, and it reads the best top_k: those with the largest sum over heads of
// weight * relu(q . k). A head's query is made of the latent of queries, its weight of the hidden state, and the key,
// of which there is one for all heads, of the hidden state, too, by a LayerNorm. RoPE turns the first elements of both.
struct IndexerSpec {
    int num_heads = 0, head_dim = 0;
    int top_k = 0;
    bool shared = false;  // it has no weights: a token reads the keys that it chose in the layer before
    float norm_eps = 0;

    void check(int q_rank, int rope_dim) const;  // of the latent attention that it is part of
    const char* only_on_cpus() const;
    int64_t cost_of_pair() const { return shared ? 0 : int64_t{num_heads} * head_dim; }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_heads", &IndexerSpec::num_heads, "");
        f("head_dim", &IndexerSpec::head_dim, "");
        f("top_k", &IndexerSpec::top_k, "Keys that a token reads.");
        f("shared", &IndexerSpec::shared, "A token reads the keys that it chose in the layer before.");
        f("norm_eps", &IndexerSpec::norm_eps, "Epsilon in the LayerNorm of keys.");
    }
};

}  // namespace infinilm
