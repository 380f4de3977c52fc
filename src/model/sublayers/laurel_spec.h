// A learned augmented residual layer (LAuReL): what it says of itself. Its weights and math are in laurel.h.
#pragma once

#include "model/sublayers/sublayer_spec.h"

namespace infinilm {

struct LaurelSpec {
    int rank = 0;

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const { return {}; }
    LaurelSpec local(Shard) const { return *this; }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("rank", &LaurelSpec::rank, "Elements between its two linears.");
    }
};

}  // namespace infinilm
