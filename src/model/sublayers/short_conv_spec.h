// A gated short convolution: what it says of itself. Its weights and math are in short_conv.h.
#pragma once

#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

// A convolution of each channel over the last tokens, between two gates. See CausalConvParams.
struct ShortConvSpec {
    int channels = 0;
    int conv_size = 0;  // tokens that the convolution sees

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const { return {{"channels of short convolutions", channels}}; }
    ShortConvSpec local(Shard shard) const { return {channels / shard.size, conv_size}; }
    CacheSpec cache() const {
        return {.kind = CacheKind::none, .states = {{conv_size - 1, channels}}, .log_columns = int64_t{2} * channels};
    }
    // Operations: one for each gate, two for each tap.
    CostSpec cost() const { return {.of_token = int64_t{2} * (conv_size + 1) * channels}; }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("channels", &ShortConvSpec::channels, "");
        f("conv_size", &ShortConvSpec::conv_size, "Tokens that the convolution sees.");
    }
};

}  // namespace infinilm
