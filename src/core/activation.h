// Activations by their names.
#pragma once

#include <string_view>

#include "args/activation.h"

namespace infinilm {

constexpr std::string_view name(Activation activation) {
    switch (activation) {
        case Activation::silu: return "silu";
        case Activation::gelu_tanh: return "gelu_tanh";
        case Activation::clamped_swiglu: return "clamped_swiglu";
        case Activation::relu2: return "relu2";
        case Activation::sigmoid: return "sigmoid";
        case Activation::gelu: return "gelu";
        case Activation::quick_gelu: return "quick_gelu";
        case Activation::relu: return "relu";
        case Activation::xielu: return "xielu";
        case Activation::clamped_silu: return "clamped_silu";
        case Activation::softplus: return "softplus";
    }
    return "?";
}

}  // namespace infinilm
