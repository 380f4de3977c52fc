// What joins gate and up in an MLP: out = activation(gate) * up.
#pragma once

#include <cstdint>
#include <string_view>

namespace infinilm {

// silu(x) = x / (1 + e^-x); gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and
// Gimpel 2016). clamped_swiglu is that of gpt-oss: gate is at most 7 and up in [-7, 7], and
// out = gate / (1 + e^(-1.702 gate)) * (up + 1). relu2(x) = max(x, 0)^2 (So et al. 2021). sigmoid(x) = 1 / (1 + e^-x)
// is of gates alone, not of an MLP.
enum class Activation : uint8_t { silu, gelu_tanh, clamped_swiglu, relu2, sigmoid };

constexpr Activation activations[] = {Activation::silu, Activation::gelu_tanh, Activation::clamped_swiglu,
                                      Activation::relu2, Activation::sigmoid};

constexpr std::string_view name(Activation activation) {
    switch (activation) {
        case Activation::silu: return "silu";
        case Activation::gelu_tanh: return "gelu_tanh";
        case Activation::clamped_swiglu: return "clamped_swiglu";
        case Activation::relu2: return "relu2";
        case Activation::sigmoid: return "sigmoid";
    }
    return "?";
}

}  // namespace infinilm
