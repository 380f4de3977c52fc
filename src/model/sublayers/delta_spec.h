// The gated delta rule behind a causal convolution: what it says of itself. Its weights and math are in delta.h.
#pragma once

#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

// A causal convolution of q, k and v, then the rule, which reads q and updates a state with k and v. See
// CausalConvParams and DeltaRuleParams.
struct DeltaSpec {
    int num_k_heads = 0, num_v_heads = 0;  // of q and k, and of v
    int k_dim = 0, v_dim = 0;              // of a head
    int conv_size = 0;                     // tokens that the convolution sees

    int k_size() const { return num_k_heads * k_dim; }
    int v_size() const { return num_v_heads * v_dim; }
    int conv_dim() const { return 2 * k_size() + v_size(); }
    int in_dim() const { return conv_dim() + v_size() + 2 * num_v_heads; }  // with z, b and a
    int padded_in_dim() const { return (in_dim() + 7) / 8 * 8; }            // GPUs write 8 at a time

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const { return {{"key heads of linear attention", num_k_heads}}; }
    DeltaSpec local(Shard shard) const;
    CacheSpec cache() const;
    CostSpec cost() const;
    const char* only_on_cpus() const { return v_dim % 2 == 0 ? nullptr : "states of an odd number of columns"; }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_k_heads", &DeltaSpec::num_k_heads, "Heads of q and k.");
        f("num_v_heads", &DeltaSpec::num_v_heads, "");
        f("k_dim", &DeltaSpec::k_dim, "Elements of a head of q and k.");
        f("v_dim", &DeltaSpec::v_dim, "");
        f("conv_size", &DeltaSpec::conv_size, "Tokens that the convolution sees.");
    }
};

}  // namespace infinilm
