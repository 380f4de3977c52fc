// What an encoder of images has besides its layers: patches in front, and what makes of its rows the embeddings of a
// model of texts. Math and weights are in tower.h.
#pragma once

#include <cstdint>
#include <vector>

#include "core/activation.h"

namespace infinilm {

struct ModelSpec;

// One of the linears that make a row of the result of neighbouring patches.
struct MergerLinear {
    int size = 0;  // outputs
    bool bias = false;
    float norm_eps = 0;      // of a LayerNorm with bias behind it; 0: there is none
    bool activated = false;  // the activation is behind that
    bool gated = false;      // it is two linears, and what the activation makes of the first multiplies the second
    Activation activation = Activation::gelu;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("size", &MergerLinear::size, "Outputs.");
        f("bias", &MergerLinear::bias, "");
        f("norm_eps", &MergerLinear::norm_eps, "The epsilon of a LayerNorm with bias behind it; 0: there is none.");
        f("activated", &MergerLinear::activated, "The activation is behind that.");
        f("gated", &MergerLinear::gated,
          "It is two linears, and what the activation makes of the first multiplies the second.");
        f("activation", &MergerLinear::activation, "");
    }
};

struct TowerSpec {
    int patch_dim = 0;  // numbers of a patch
    bool patch_bias = false;
    bool patch_norm = false;  // a norm of what embeds patches takes its place
    bool norm_first = false;  // positions are added behind this norm, and not before it
    int num_positions = 0;    // rows of the table of learned positions; 0: there are none
    // The last token of a sequence is no patch, but one that sees all patches, and no row is made of it. A vector of
    // the model is one more row of the table of positions, and all that it is made of.
    bool class_token = false;
    bool norm = true;  // there is a norm behind the layers
    // A row of the result is made of so many neighbouring patches: of all their numbers, or of their mean.
    int merged_patches = 1;
    bool pooled = false;  // of their mean, behind RMSNorm
    // The mean x, times pooled_scale, becomes (x - bias) * scale before this norm, by two vectors of the model.
    bool standardized = false;
    float pooled_scale = 1;
    bool pooled_norm_weight = true;    // this norm has a weight
    float pooled_norm_offset = 0;      // added to the weight of this norm
    std::vector<MergerLinear> merger;  // one behind the other; the last gives the row
    float eps = 0;                     // of the norms behind the layers
    std::vector<int> levels;           // layers whose results are merged, too, by weights of their own: see ModelSpec

    int num_levels() const { return 1 + static_cast<int>(levels.size()); }
    // Rows of the result of so many tokens of so many sequences.
    int64_t num_rows(int64_t num_tokens, int64_t num_seqs) const {
        return (num_tokens - (class_token ? num_seqs : 0)) / merged_patches;
    }
    int out_size() const { return merger.back().size; }  // of a level of a row: hidden_size of the model of texts
    void check(const ModelSpec& model) const;            // ConfigError: sizes that contradict each other

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("patch_dim", &TowerSpec::patch_dim, "Numbers of a patch.");
        f("patch_bias", &TowerSpec::patch_bias, "");
        f("patch_norm", &TowerSpec::patch_norm, "A norm of what embeds patches takes its place.");
        f("norm_first", &TowerSpec::norm_first, "Positions are added behind this norm, and not before it.");
        f("num_positions", &TowerSpec::num_positions, "Rows of the table of learned positions; 0: there are none.");
        f("class_token", &TowerSpec::class_token,
          "The last token of a sequence is a vector of the model, of which no row is made.");
        f("norm", &TowerSpec::norm, "There is a norm behind the layers.");
        f("merged_patches", &TowerSpec::merged_patches, "Neighbouring patches that become one row of the result.");
        f("pooled", &TowerSpec::pooled, "It is made of their mean, behind RMSNorm, and not of all their numbers.");
        f("standardized", &TowerSpec::standardized,
          "Their mean x, times pooled_scale, becomes (x - bias) * scale before this norm.");
        f("pooled_scale", &TowerSpec::pooled_scale, "Multiplies their mean.");
        f("pooled_norm_weight", &TowerSpec::pooled_norm_weight, "This norm has a weight.");
        f("pooled_norm_offset", &TowerSpec::pooled_norm_offset, "Added to the weight of this norm.");
        f("merger", &TowerSpec::merger, "The linears that make a row; the last one gives it.");
        f("eps", &TowerSpec::eps, "The epsilon of the norms behind the layers.");
        f("levels", &TowerSpec::levels, "Layers whose results are merged, too.");
    }
};

}  // namespace infinilm
