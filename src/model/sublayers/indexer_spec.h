// An indexer, by which a token chooses the keys that it reads: what it says of itself. Its weights and math are in
// indexer.h.
#pragma once

#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

// Small heads score all keys that a token sees, and it reads the best top_k. RoPE turns the first elements of queries
// and of the key, of which there is one for all heads. There are two forms:
//
// - Of latent attention (DeepSeek V3.2): those with the largest sum over heads of weight * relu(q . k). A head's query
//   is made of the latent of queries, its weight of the hidden state, and the key of the hidden state, too, by a
//   LayerNorm.
// - by_head, of attention with heads of keys (MiniMax-M3): each head chooses for one of them, by q . k alone, runs of
//   neighbouring keys as ChooseKeysParams has them. Queries and keys are made of the hidden state, by an RMSNorm each.
struct IndexerSpec {
    int num_heads = 0, head_dim = 0;
    int top_k = 0;
    bool shared = false;  // it has no weights: a token reads the keys that it chose in the layer before
    float norm_eps = 0;
    bool by_head = false;
    int run_keys = 1, last_runs = 0;  // see ChooseKeysParams

    void check_of_latents(int q_rank, int rope_dim) const;  // of the latent attention that it is part of
    void check_by_head(int num_kv_heads) const;             // of the attention that it is part of
    const char* only_on_cpus() const;
    int64_t cost_of_pair() const { return shared ? 0 : int64_t{num_heads} * head_dim; }
    int heads_at_once() const { return by_head ? 1 : num_heads; }  // whose scores one choice is made by

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_heads", &IndexerSpec::num_heads, "");
        f("head_dim", &IndexerSpec::head_dim, "");
        f("top_k", &IndexerSpec::top_k, "Keys that a token reads.");
        f("shared", &IndexerSpec::shared, "A token reads the keys that it chose in the layer before.");
        f("norm_eps", &IndexerSpec::norm_eps, "Epsilon in the norms of keys and of queries.");
        f("by_head", &IndexerSpec::by_head, "Each head chooses for one head of keys, by its own scores.");
        f("run_keys", &IndexerSpec::run_keys, "Neighbouring keys that are chosen together.");
        f("last_runs", &IndexerSpec::last_runs, "Runs at the end of what a token sees that it always reads.");
    }
};

}  // namespace infinilm
