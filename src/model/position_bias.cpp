#include "model/position_bias.h"

#include <cmath>

#include "model/prepare_vectors.h"

namespace infinilm {

PositionBias::PositionBias(const ModelSpec& model) : spec_(*model.position_bias), max_model_len_(model.max_model_len) {}

void PositionBias::declare(ParamTable& table) {
    if (spec_.num_buckets == 0) return;
    const int64_t num_heads = table.model().layer(0).mixer_of<AttentionSpec>().num_heads;
    const auto as_loaded = [](Backend&, const VectorWeights&) { return Tensor(); };  // prepare() reads it
    table.tensor(learned_, "model.relative_attention_bias.weight", {spec_.num_buckets, num_heads},
                 Cut::columns(equal_parts), as_loaded);
}

void PositionBias::prepare(Backend& backend) {
    const Tensor learned = learned_.loaded ? widened(backend, learned_.loaded) : Tensor();
    const int64_t num_heads = learned ? learned.shape(1) : static_cast<int64_t>(spec_.slopes.size());
    const int64_t distances = 2 * int64_t{max_model_len_} - 1;
    const Tensor all = allocate_host(DType::float32, {num_heads, distances});
    for (int64_t i = 0; i < all.numel(); ++i) {
        const int64_t head = i / distances, column = i % distances;
        all.as<float>()[i] =
            learned ? learned.as<const float>()[spec_.buckets[static_cast<size_t>(column)] * num_heads + head]
                    : -spec_.slopes[static_cast<size_t>(head)] * static_cast<float>(std::abs(column - distances / 2));
    }
    by_distance_ = backend.allocate(all.dtype(), all.shape());
    backend.copy(all, by_distance_);
}

}  // namespace infinilm
