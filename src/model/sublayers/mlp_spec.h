// An MLP: what it says of itself. Its weights and math are in mlp.h.
#pragma once

#include <optional>

#include "core/activation.h"
#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

struct MlpSpec {
    int intermediate_size = 0;
    bool bias = false;       // of all linears
    bool down_bias = false;  // of down alone
    bool gated = true;       // down(activation(gate) * up); else down(activation(up))
    Activation activation = Activation::silu;
    // Only what lies this many standard deviations above the mean of its row is left of the gate; absent: all of it.
    std::optional<float> gate_deviations = {};
    float limit = 0;                              // of clamped_silu, and of no other activation
    float in_multiplier = 1, out_multiplier = 1;  // of the norm that it reads, and of what it adds

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const { return {{"intermediate_size", intermediate_size, false}}; }
    MlpSpec local(Shard shard) const;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("intermediate_size", &MlpSpec::intermediate_size, "");
        f("bias", &MlpSpec::bias, "Whether all linears have one.");
        f("down_bias", &MlpSpec::down_bias, "Whether the last linear alone has one.");
        f("gated", &MlpSpec::gated, "down(activation(gate) * up); else down(activation(up)).");
        f("activation", &MlpSpec::activation, "");
        f("gate_deviations", &MlpSpec::gate_deviations,
          "Standard deviations above its mean from which on the gate of a token is left, less that; None: all of it.");
        f("limit", &MlpSpec::limit, "Of clamped_silu: what silu of the gate is at most, and up in both directions.");
        f("in_multiplier", &MlpSpec::in_multiplier, "Multiplies the norm that it reads.");
        f("out_multiplier", &MlpSpec::out_multiplier, "Multiplies what it adds.");
    }
};

}  // namespace infinilm
