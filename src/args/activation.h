// What joins gate and up in an MLP: out = activation(gate) * up. Declared here once, for the model and for kernels.
#pragma once

namespace infinilm {

// silu(x) = x / (1 + e^-x); gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and
// Gimpel 2016). clamped_swiglu is that of gpt-oss: gate is at most 7 and up in [-7, 7], and
// out = gate / (1 + e^(-1.702 gate)) * (up + 1). relu2(x) = max(x, 0)^2 (So et al. 2021). sigmoid(x) = 1 / (1 + e^-x)
// and softplus(x) = ln(1 + e^x) are of gates alone, not of an MLP. gelu(x) = x / 2 * (1 + erf(x / sqrt(2))), of which
// gelu_tanh is an approximation, and quick_gelu(x) = x / (1 + e^(-1.702 x)) another. relu(x) = max(x, 0). xielu (Huang
// and Schlag 2024, arXiv:2411.13010) is, with two learned numbers, alpha_p x^2 + x / 2 where x > 0, and else alpha_n
// (e^c - 1 - x) + x / 2 with c = min(x, -1e-6), as transformers has it. clamped_silu is that of Step 3.5 and 3.7:
// silu(gate) is at most a limit and up in [-limit, limit], and out is their product.
enum class Activation : int {
    silu,
    gelu_tanh,
    clamped_swiglu,
    relu2,
    sigmoid,
    gelu,
    quick_gelu,
    relu,
    xielu,
    clamped_silu,
    softplus
};

// Whether the op act_mul alone computes it, and no linear of gate and up.
constexpr bool is_apart(Activation activation) {
    return activation == Activation::gelu || activation == Activation::quick_gelu || activation == Activation::relu ||
           activation == Activation::xielu || activation == Activation::clamped_silu ||
           activation == Activation::softplus;
}

// Whether it is of gates alone, which may be shared by neighbours.
constexpr bool is_gate(Activation activation) {
    return activation == Activation::sigmoid || activation == Activation::softplus;
}

}  // namespace infinilm
