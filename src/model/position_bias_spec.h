// What is added to the scores of attention by the distance from a query to a key. Math and weights are in
// position_bias.h.
#pragma once

#include <vector>

#include "core/error.h"

namespace infinilm {

// Either slopes, as ALiBi has them, or learned rows: one for each bucket of distances.
struct PositionBiasSpec {
    std::vector<float> slopes;  // [num_heads]: times the distance, whichever way, is taken off
    int num_buckets = 0;        // learned rows
    std::vector<int> buckets;   // [2 * max_model_len - 1]: the bucket of each distance, key - query, ascending

    // ConfigError unless each head and each distance within a text has its own.
    void check(int num_heads, int max_model_len) const {
        if (slopes.empty() == (num_buckets == 0) || num_buckets < 0)
            throw ConfigError("model spec: a position bias has slopes or buckets");
        if (!slopes.empty() && static_cast<int>(slopes.size()) != num_heads)
            throw ConfigError(concat("model spec: ", slopes.size(), " slopes for ", num_heads, " heads"));
        const size_t distances = slopes.empty() ? 2 * static_cast<size_t>(max_model_len) - 1 : 0;
        if (buckets.size() != distances)
            throw ConfigError(concat("model spec: buckets of ", buckets.size(), " distances, expected ", distances));
        for (const int bucket : buckets)
            if (bucket < 0 || bucket >= num_buckets)
                throw ConfigError(concat("model spec: bucket ", bucket, " of ", num_buckets));
    }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("slopes", &PositionBiasSpec::slopes, "[num_heads] times the distance is taken off; empty: rows are learned.");
        f("num_buckets", &PositionBiasSpec::num_buckets, "Learned rows; 0: there are slopes.");
        f("buckets", &PositionBiasSpec::buckets, "[2 * max_model_len - 1]: the learned row of each distance.");
    }
};

}  // namespace infinilm
