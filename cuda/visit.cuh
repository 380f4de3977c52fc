// From a runtime Type to a template argument: visit(type, [&](auto t) { using T = decltype(t); .. }).
#pragma once

#include "device.cuh"
#include "kernels.h"

namespace infinilm::cuda {

template <class F>
cudaError_t visit(Type type, F f) {
    switch (type) {
        case Type::f32: return f(float{});
        case Type::bf16: return f(bf16{});
        default: return f(f16{});
    }
}

}  // namespace infinilm::cuda
