// A block of attention and an MLP that several layers share, as in Zamba 2: what a layer that uses it says of it. Its
// weights and math are in shared_block.h.
#pragma once

#include "model/sublayers/attention_spec.h"
#include "model/sublayers/mlp_spec.h"

namespace infinilm {

// The block reads a norm of the residual stream and the embedding, one behind the other, and its attention and its MLP
// add nothing to a stream of their own. A linear of what the MLP gives joins the residual stream for the norm of the
// layer's mixer alone.
struct SharedBlockSpec {
    AttentionSpec attention;  // of rows of 2 * hidden_size
    MlpSpec mlp;
    int owner = 0;                    // the first layer that uses the block, under whose name its weights are
    int use = 0;                      // how many layers before this one use a block, whichever
    int adapter_rank = 0;             // of what the layer adds to the first linear of the MLP (see LowRank); 0: nothing
    bool attention_adapters = false;  // it adds such to q, k and v, too

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const;
    SharedBlockSpec local(Shard shard) const;
    const char* only_on_cpus() const { return attention.only_on_cpus(); }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("attention", &SharedBlockSpec::attention, "It reads rows of 2 * hidden_size.");
        f("mlp", &SharedBlockSpec::mlp, "");
        f("owner", &SharedBlockSpec::owner, "The first layer that uses the block, under whose name its weights are.");
        f("use", &SharedBlockSpec::use, "How many layers before this one use a block, whichever.");
        f("adapter_rank", &SharedBlockSpec::adapter_rank,
          "Rank of what the layer adds to the first linear of the MLP; 0: nothing.");
        f("attention_adapters", &SharedBlockSpec::attention_adapters, "It adds such to q, k and v, too.");
    }
};

}  // namespace infinilm
