// The kernels' name of an activation. A switch and not a cast: the compiler tells when one of the two lists grows.
#pragma once

#include "core/activation.h"
#include "cpu/kernels/kernels.h"

namespace infinilm::cpu {

constexpr Activation activation_of(infinilm::Activation activation) {
    switch (activation) {
        case infinilm::Activation::silu: return Activation::silu;
        case infinilm::Activation::gelu_tanh: return Activation::gelu_tanh;
        case infinilm::Activation::clamped_swiglu: return Activation::clamped_swiglu;
        case infinilm::Activation::relu2: return Activation::relu2;
        case infinilm::Activation::sigmoid: return Activation::sigmoid;
    }
    return Activation::silu;  // there is no other
}

}  // namespace infinilm::cpu
