// Weights as the decoder runs them. What loading, packing and adapters need to know of them besides is in the table of
// parameters (table.h).
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "model/buffers.h"
#include "ops/backend.h"

namespace infinilm {

// A vector, such as that of a norm.
struct VectorWeights {
    Tensor loaded, bias;  // as in the checkpoint
    Tensor prepared;      // as ops want it
    // Prepares the vector once all tensors are loaded. It returns an absent tensor where there is nothing to prepare.
    std::function<Tensor(Backend&, const VectorWeights&)> make = {};
};

// Bounds of the inputs and outputs of one of the tensors of a linear: input_min, input_max, output_min,
// output_max.
struct Clip {
    struct Bounds {
        float low, high;
        bool operator==(const Bounds&) const = default;
    };
    int64_t outputs = 0;       // of the tensor
    VectorWeights loaded[4];   // numbers, which the host reads
    Bounds input{}, output{};  // once they are prepared
};

struct LowRank;

// A linear, made of one checkpoint tensor or of several that are joined.
struct LinearWeights {
    std::shared_ptr<PreparedLinear> prepared;  // absent until all of its tensors are loaded
    size_t first_row = 0, end_row = 0;         // of the table: its weights and biases, by which adapters know it
    std::vector<Clip> clips = {};              // of each tensor, where the model's linears clip; else none
    std::list<LowRank> beside = {};            // what layers that share the linear add to it; their addresses stay
};

// What one of the layers that share a linear adds to some of its outputs: up(down(x)). See SharedBlock.
struct LowRank {
    int layer = -1;
    int64_t begin = 0, end = 0;  // of a rank's outputs
    Buffer inner;                // [num_tokens, rank]: what down gives
    LinearWeights down, up;      // [rank, in_features], [end - begin, rank]
};

}  // namespace infinilm
