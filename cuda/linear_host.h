// What the kernels of a linear get of an op's parameters.
#pragma once

#include "grouped.h"
#include "packed_layout.h"

namespace infinilm::cuda {

inline LinearArgs linear_args(const LinearParams& p, Type type) {
    LinearArgs args;
    // Kernels write whole vectors of 8: rows of logits of any vocabulary are padded to that (Decoder).
    const int width = packed(p.weight).n / (p.weight.kind == LinearKind::act_mul && !p.gate_up_apart ? 2 : 1);
    require(p.out.stride(0) >= width, "linear: out has ", p.out.stride(0), " elements a row, ", width, " are written");
    args.x = p.x.data();
    args.x_stride = p.x.stride(0);
    args.num_tokens = static_cast<int>(p.x.shape(0));
    args.weight = packed(p.weight);
    args.residual = p.residual.data();
    args.residual_stride = p.residual ? p.residual.stride(0) : 0;
    args.out = p.out.data();
    args.out_stride = p.out.stride(0);
    args.activation = static_cast<cuda::Activation>(p.activation);
    args.gate_up_apart = p.gate_up_apart;
    args.out_float32 = p.out.dtype() == DType::float32 && type != Type::f32;
    return args;
}

}  // namespace infinilm::cuda
