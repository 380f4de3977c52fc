// How a router's logits become scores of experts.
#pragma once

#include <cstdint>
#include <string_view>

namespace infinilm {

enum class Scoring : uint8_t {
    softmax,  // over all experts
    sigmoid,  // of each
};

constexpr std::string_view name(Scoring scoring) {
    switch (scoring) {
        case Scoring::softmax: return "softmax";
        case Scoring::sigmoid: return "sigmoid";
    }
    return "?";
}

}  // namespace infinilm
