// From a runtime Element to a template argument: visit(type, [&](auto t) { using T = decltype(t); .. }).
#pragma once

#include "cuda/core/device.cuh"
#include "cuda/core/types.h"

namespace infinilm::cuda {

template <class F>
cudaError_t visit(Element type, F f) {
    switch (type) {
        case Element::f32: return f(float{});
        case Element::bf16: return f(bf16{});
        default: return f(f16{});
    }
}

}  // namespace infinilm::cuda
