// How a router's logits become scores of experts.
#pragma once

#include <cstdint>
#include <string_view>

namespace infinilm {

enum class Scoring : uint8_t {
    softmax,  // over all experts
    sigmoid,  // of each
};

constexpr std::string_view name(Scoring scoring) { return scoring == Scoring::softmax ? "softmax" : "sigmoid"; }

}  // namespace infinilm
