// What an encoder of images has besides its layers: patches in front, and what makes of its rows the embeddings of a
// model of texts. Math and weights are in tower.h.
#pragma once

#include <vector>

#include "core/activation.h"

namespace infinilm {

struct ModelSpec;

// One of the linears that make a row of the result of neighbouring patches.
struct MergerLinear {
    int size = 0;  // outputs
    bool bias = false;
    bool activated = false;  // TowerSpec::activation is behind it

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("size", &MergerLinear::size, "Outputs.");
        f("bias", &MergerLinear::bias, "");
        f("activated", &MergerLinear::activated, "The activation of the tower is behind it.");
    }
};

struct TowerSpec {
    int patch_dim = 0;  // numbers of a patch
    bool patch_bias = false;
    bool patch_norm = false;  // a norm of what embeds patches takes its place
    int num_positions = 0;    // rows of the table of learned positions; 0: there are none
    // A row of the result is made of so many neighbouring patches: of all their numbers, or of their mean.
    int merged_patches = 1;
    bool pooled = false;               // of their mean, behind RMSNorm
    float pooled_norm_offset = 0;      // added to the weight of this norm
    std::vector<MergerLinear> merger;  // one behind the other; the last gives the row
    Activation activation = Activation::gelu;
    float eps = 0;            // of the norms behind the layers
    std::vector<int> levels;  // layers whose results are merged, too, each by weights of its own: see ModelSpec

    int num_levels() const { return 1 + static_cast<int>(levels.size()); }
    int out_size() const { return merger.back().size; }  // of a level of a row: hidden_size of the model of texts
    void check(const ModelSpec& model) const;            // ConfigError: sizes that contradict each other

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("patch_dim", &TowerSpec::patch_dim, "Numbers of a patch.");
        f("patch_bias", &TowerSpec::patch_bias, "");
        f("patch_norm", &TowerSpec::patch_norm, "A norm of what embeds patches takes its place.");
        f("num_positions", &TowerSpec::num_positions, "Rows of the table of learned positions; 0: there are none.");
        f("merged_patches", &TowerSpec::merged_patches, "Neighbouring patches that become one row of the result.");
        f("pooled", &TowerSpec::pooled, "It is made of their mean, behind RMSNorm, and not of all their numbers.");
        f("pooled_norm_offset", &TowerSpec::pooled_norm_offset, "Added to the weight of this norm.");
        f("merger", &TowerSpec::merger, "The linears that make a row; the last one gives it.");
        f("activation", &TowerSpec::activation, "Behind those of these linears that say so.");
        f("eps", &TowerSpec::eps, "The epsilon of the norms behind the layers.");
        f("levels", &TowerSpec::levels, "Layers whose results are merged, too.");
    }
};

}  // namespace infinilm
