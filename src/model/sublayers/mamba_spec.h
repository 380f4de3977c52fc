// The state space of Mamba-2 behind a causal convolution: what it says of itself. Its weights and math are in mamba.h.
#pragma once

#include <limits>

#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

// What stands between the state space and the last linear, besides a gate: nothing, or an RMSNorm of each group of
// heads, of the product with the gate, or before that.
enum class GateNorm : uint8_t { none, behind_gate, before_gate };
constexpr std::string_view name(GateNorm norm) {
    switch (norm) {
        case GateNorm::none: return "none";
        case GateNorm::behind_gate: return "behind_gate";
        case GateNorm::before_gate: return "before_gate";
    }
    return "?";
}

// A causal convolution of x, B and C, then the state space. See CausalConvParams, SelectiveScanParams, GatedNormParams.
struct MambaSpec {
    int num_heads = 0, head_dim = 0;    // of x
    int num_groups = 0, state_dim = 0;  // of B and C; heads of a group have the same
    int conv_size = 0;                  // tokens that the convolution sees
    bool conv_bias = false, proj_bias = false;
    GateNorm norm = GateNorm::behind_gate;
    float dt_min = 0, dt_max = std::numeric_limits<float>::max();  // limits of a step
    // They multiply what the first linear gives, the gate, x, B, C and dt, and what the mixer adds.
    float gate_multiplier = 1, x_multiplier = 1, b_multiplier = 1, c_multiplier = 1, dt_multiplier = 1;
    float out_multiplier = 1;

    int size() const { return num_heads * head_dim; }
    int group_size() const { return num_groups * state_dim; }  // all of B, or of C
    int conv_dim() const { return size() + 2 * group_size(); }
    int in_dim() const { return size() + conv_dim() + num_heads; }  // the gate, x, B, C, dt
    int padded_in_dim() const { return (in_dim() + 7) / 8 * 8; }    // GPUs write 8 at a time

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const;
    MambaSpec local(Shard shard) const;
    CacheSpec cache() const;
    CostSpec cost() const;
    const char* only_on_cpus() const { return head_dim % 2 == 0 ? nullptr : "states of an odd number of columns"; }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_heads", &MambaSpec::num_heads, "Heads of x.");
        f("head_dim", &MambaSpec::head_dim, "Elements of a head of x.");
        f("num_groups", &MambaSpec::num_groups, "Groups of heads with the same B and C.");
        f("state_dim", &MambaSpec::state_dim, "Elements of a group of B, or of C.");
        f("conv_size", &MambaSpec::conv_size, "Tokens that the convolution sees.");
        f("conv_bias", &MambaSpec::conv_bias, "");
        f("proj_bias", &MambaSpec::proj_bias, "Whether both linears have one.");
        f("norm", &MambaSpec::norm, "RMSNorm of each group of heads: none, behind_gate or before_gate.");
        f("dt_min", &MambaSpec::dt_min, "The least step.");
        f("dt_max", &MambaSpec::dt_max, "");
        f("gate_multiplier", &MambaSpec::gate_multiplier, "Multiplies the gate that the first linear makes.");
        f("x_multiplier", &MambaSpec::x_multiplier, "");
        f("b_multiplier", &MambaSpec::b_multiplier, "");
        f("c_multiplier", &MambaSpec::c_multiplier, "");
        f("dt_multiplier", &MambaSpec::dt_multiplier, "");
        f("out_multiplier", &MambaSpec::out_multiplier, "Multiplies what it adds.");
    }
};

}  // namespace infinilm
