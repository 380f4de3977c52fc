// What is added to the embedding of a token: a row for its position, one for its type. Math and weights are in
// embedding_sum.h.
#pragma once

#include <cstdint>

#include "core/error.h"

namespace infinilm {

struct EmbeddingSumSpec {
    int num_positions = 0;    // learned positions; 0: there are none
    int position_offset = 0;  // which of them is that of a text's first token
    int num_types = 0;        // types of tokens, such as those of the two texts of a pair; 0: there are none

    // Rows of all that may be added: those of each type behind those of the one before.
    int64_t num_rows() const {
        return int64_t{num_positions > 0 ? num_positions : 1} * (num_types > 0 ? num_types : 1);
    }
    // ConfigError unless a text of so many tokens has a position for each.
    void check(int max_model_len) const {
        if (num_positions < 0 || position_offset < 0 || num_types < 0 || (num_positions == 0 && num_types == 0))
            throw ConfigError(concat("model spec: an embedding is a sum with ", num_positions, " positions from ",
                                     position_offset, " on and ", num_types, " types of tokens"));
        if (num_positions > 0 && max_model_len > num_positions - position_offset)
            throw ConfigError(concat("max_model_len is ", max_model_len, ", but the model has learned ",
                                     num_positions - position_offset, " positions; lower it"));
        if (num_rows() >= int64_t{1} << 31)
            throw ConfigError("model spec: more than 2**31 sums of positions and types");
    }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_positions", &EmbeddingSumSpec::num_positions, "Learned positions; 0: there are none.");
        f("position_offset", &EmbeddingSumSpec::position_offset, "The learned position of a text's first token.");
        f("num_types", &EmbeddingSumSpec::num_types, "Types of tokens; 0: there are none.");
    }
};

}  // namespace infinilm
