// What joins gate and up in an MLP: out = activation(gate) * up. Declared here once, for the model and for kernels.
#pragma once

namespace infinilm {

// silu(x) = x / (1 + e^-x); gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and
// Gimpel 2016). clamped_swiglu is that of gpt-oss: gate is at most 7 and up in [-7, 7], and
// out = gate / (1 + e^(-1.702 gate)) * (up + 1). relu2(x) = max(x, 0)^2 (So et al. 2021). sigmoid(x) = 1 / (1 + e^-x)
// is of gates alone, not of an MLP. gelu(x) = x / 2 * (1 + erf(x / sqrt(2))), of which gelu_tanh is an approximation,
// and quick_gelu(x) = x / (1 + e^(-1.702 x)) another. relu(x) = max(x, 0).
// xielu (Huang and Schlag 2024, arXiv:2411.13010) is, with two learned numbers, alpha_p x^2 + x / 2 where x > 0, and
// else alpha_n (e^c - 1 - x) + x / 2 with c = min(x, -1e-6), as transformers has it.
enum class Activation : int { silu, gelu_tanh, clamped_swiglu, relu2, sigmoid, gelu, quick_gelu, relu, xielu };

// Whether the op act_mul alone computes it, and no linear of gate and up.
constexpr bool is_apart(Activation activation) {
    return activation == Activation::gelu || activation == Activation::quick_gelu || activation == Activation::relu ||
           activation == Activation::xielu;
}

}  // namespace infinilm
