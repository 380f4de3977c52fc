// What an encoder of images has besides its layers: patches in front, and what makes of its rows the embeddings of a
// model of texts. Math and weights are in tower.h.
#pragma once

#include <vector>

#include "core/activation.h"

namespace infinilm {

struct ModelSpec;

struct TowerSpec {
    int patch_dim = 0;  // numbers of a patch
    bool patch_bias = false;
    int num_positions = 0;  // rows of the table of learned positions; 0: there are none
    // A row of the result is made of so many neighbouring patches: out(activation(inner(all of them))).
    int merged_patches = 1;
    int merger_size = 0;  // of the inner one
    int out_size = 0;     // of the result: hidden_size of the model of texts
    Activation activation = Activation::gelu;
    std::vector<int> levels;  // layers whose results are merged, too, each by weights of its own: see ModelSpec

    int num_levels() const { return 1 + static_cast<int>(levels.size()); }
    void check(const ModelSpec& model) const;  // ConfigError: sizes that contradict each other

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("patch_dim", &TowerSpec::patch_dim, "Numbers of a patch.");
        f("patch_bias", &TowerSpec::patch_bias, "");
        f("num_positions", &TowerSpec::num_positions, "Rows of the table of learned positions; 0: there are none.");
        f("merged_patches", &TowerSpec::merged_patches, "Neighbouring patches that become one row of the result.");
        f("merger_size", &TowerSpec::merger_size, "Outputs of the first of the two linears that make a row.");
        f("out_size", &TowerSpec::out_size, "hidden_size of the model of texts.");
        f("activation", &TowerSpec::activation, "Between these linears.");
        f("levels", &TowerSpec::levels, "Layers whose results are merged, too.");
    }
};

}  // namespace infinilm
