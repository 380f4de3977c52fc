// An MLP: what it says of itself. Its weights and math are in mlp.h.
#pragma once

#include "core/activation.h"
#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

struct MlpSpec {
    int intermediate_size = 0;
    bool bias = false;
    bool gated = true;  // down(activation(gate) * up); else down(activation(up))
    Activation activation = Activation::silu;

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const { return {{"intermediate_size", intermediate_size, false}}; }
    MlpSpec local(Shard shard) const;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("intermediate_size", &MlpSpec::intermediate_size, "");
        f("bias", &MlpSpec::bias, "");
        f("gated", &MlpSpec::gated, "down(activation(gate) * up); else down(activation(up)).");
        f("activation", &MlpSpec::activation, "");
    }
};

}  // namespace infinilm
