// How a router's logits become scores of experts, and weights: see RouteParams.
#pragma once

#include <cstdint>
#include <string_view>

namespace infinilm {

enum class Scoring : uint8_t {
    softmax,       // over all experts
    sigmoid,       // of each
    sparse_mixer,  // of those near the best that is left, one after the other
};

constexpr std::string_view name(Scoring scoring) {
    switch (scoring) {
        case Scoring::softmax: return "softmax";
        case Scoring::sigmoid: return "sigmoid";
        case Scoring::sparse_mixer: return "sparse_mixer";
    }
    return "?";
}

}  // namespace infinilm
