// The gated delta rule behind a causal convolution: what it says of itself. Its weights and math are in delta.h.
#pragma once

#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

// A causal convolution of q, k and v, then the rule, which reads q and updates a state with k and v. See
// CausalConvParams and DeltaRuleParams. With by_element what it gives is gated by a sigmoid, as in Kimi Linear.
struct DeltaSpec {
    int num_k_heads = 0, num_v_heads = 0;  // of q and k, and of v
    int k_dim = 0, v_dim = 0;              // of a head
    int conv_size = 0;                     // tokens that the convolution sees
    bool by_element = false;               // each row of a state has a decay of its own
    bool apart = false;                    // q, k and v have linears and convolutions of their own
    bool doubled_beta = false;
    float norm_eps = 0;     // of the norm of what it gives; 0: rms_norm_eps
    float lower_bound = 0;  // of the logarithms of decays, which come through a sigmoid then; 0: there is none
    int gate_rank = 0;  // with by_element: decays and the gate are made of so many elements each, by a second linear

    int k_size() const { return num_k_heads * k_dim; }
    int v_size() const { return num_v_heads * v_dim; }
    int conv_dim() const { return 2 * k_size() + v_size(); }
    int num_decays() const { return by_element ? num_v_heads * k_dim : num_v_heads; }
    int z_dim() const { return gate_rank > 0 ? gate_rank : v_size(); }
    int a_dim() const { return gate_rank > 0 ? gate_rank : num_decays(); }
    // The first linear gives q, k and v, z, b, a; where they are apart b is last.
    int in_dim() const { return conv_dim() + z_dim() + num_v_heads + a_dim(); }
    int padded_in_dim() const { return (in_dim() + 7) / 8 * 8; }  // GPUs write 8 at a time

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
        f("by_element", &DeltaSpec::by_element, "Each row of a state has a decay of its own.");
        f("apart", &DeltaSpec::apart, "Q, k and v have linears and convolutions of their own.");
        f("doubled_beta", &DeltaSpec::doubled_beta, "What a token changes of a state is twice as much.");
        f("norm_eps", &DeltaSpec::norm_eps, "Of the norm of what it gives; 0: rms_norm_eps.");
        f("lower_bound", &DeltaSpec::lower_bound,
          "Of the logarithms of decays, which come through a sigmoid then; 0: there is none.");
        f("gate_rank", &DeltaSpec::gate_rank, "Elements that decays and the gate are made of; 0: the hidden state.");
    }
};

}  // namespace infinilm
