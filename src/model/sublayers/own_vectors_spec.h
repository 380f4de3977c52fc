// Vectors that a token has for each layer: what they say of themselves. Their weights and math are in own_vectors.h.
#pragma once

#include "core/activation.h"
#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

// A token has a vector for each layer, from a table of its own and from its embedding, and each layer has a third
// sublayer, which reads it.
struct OwnVectorsSpec {
    int size = 0;        // of the vector for one layer
    int vocab_size = 0;  // rows of the table; ids beyond it have the vectors of id 0
    int pad_id = 0;      // the row of tokens whose embedding is given: see Given
    Activation activation = Activation::silu;

    void check(const ModelSpec& model) const;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("size", &OwnVectorsSpec::size, "Elements of the vector for one layer.");
        f("vocab_size", &OwnVectorsSpec::vocab_size, "Rows of the table; ids beyond it have the vectors of id 0.");
        f("activation", &OwnVectorsSpec::activation, "");
        f("pad_id", &OwnVectorsSpec::pad_id, "The row of tokens whose embedding is given.");
    }
};

}  // namespace infinilm
