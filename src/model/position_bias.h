// A bias of scores by distance: of buckets of distances, as in T5 and MPNet, or ALiBi. All layers share it. When
// weights are prepared it becomes a row for each head with a number for each distance, so that attention looks up
// neighbours.
#pragma once

#include "model/position_bias_spec.h"
#include "model/spec.h"
#include "model/table.h"

namespace infinilm {

class PositionBias {
public:
    explicit PositionBias(const ModelSpec& model);
    void declare(ParamTable& table);
    void prepare(Backend& backend);  // once the tensor is there
    void clear() { by_distance_ = {}; }
    const Tensor& by_distance() const { return by_distance_; }

private:
    PositionBiasSpec spec_;
    int max_model_len_;
    VectorWeights learned_;  // [num_buckets, num_heads]
    Tensor by_distance_;     // [num_heads, 2 * max_model_len - 1] float32: see AttentionParams::position_bias
};

}  // namespace infinilm
