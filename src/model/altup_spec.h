// Alternating updates (AltUp): what they say of themselves. Their weights and math are in altup.h.
#pragma once

namespace infinilm {

struct ModelSpec;

// Beside the residual stream that sublayers read and add to, which is the active one, a token has others. A layer
// predicts what it does to all of them, computes the active one, and corrects the others by what that has become.
struct AltUpSpec {
    int num_streams = 0;  // with the active one

    void check(const ModelSpec& model) const;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_streams", &AltUpSpec::num_streams, "Residual streams, with the one that sublayers read and add to.");
    }
};

}  // namespace infinilm
