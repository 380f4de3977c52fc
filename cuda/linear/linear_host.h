// What the kernels of a linear get of an op's parameters.
#pragma once

#include "cuda/core/host.h"
#include "cuda/linear/kernels.h"
#include "cuda/linear/prepared.h"

namespace infinilm::cuda {

// Enqueues, and returns the error of the launch.
cudaError_t run_head_linear(const HeadLinearParams& p, cudaStream_t stream);

inline std::unique_ptr<DeviceMemory> make_split_workspace(cudaStream_t stream) {
    auto workspace = std::make_unique<DeviceMemory>(split_workspace_bytes, "sums of linears whose tiles are shared");
    check(cudaMemsetAsync(workspace->data, 0, split_counter_bytes, stream), "split_workspace");
    return workspace;
}

// Arguments for a piece of a linear, which has some columns of `out`. workspace: for blocks that share a tile, or null.
inline LinearArgs linear_args(const LinearParams& p, const CudaPiece& piece, Element type,
                              const DeviceMemory* workspace) {
    const PackedWeight& weight = piece.packed;
    // Where gate and up are a piece each, the second one finds the gates in out.
    const bool joins = p.weight.kind == LinearKind::act_mul && !p.gate_up_apart;
    const bool take_turns = weight.order == RowOrder::gate_up, gate_in_out = joins && piece.first_output > 0;
    const int64_t first = gate_in_out ? 0 : piece.first_output;
    const auto begin = [&](const TensorView& rows) {
        return rows ? rows.as<std::byte>() + first * size_bytes(rows.dtype()) : nullptr;
    };
    LinearArgs args;
    // Kernels write whole vectors of 8: rows of logits of any vocabulary are padded to that (Decoder).
    const int64_t width = first + weight.n / (joins && take_turns ? 2 : 1);
    require(take_turns || !joins || (!p.residual && p.out.dtype() != DType::float32),
            "linear: gate and up of different types take no residual, and give 16 bits");
    require(p.out.stride(0) >= width, "linear: out has ", p.out.stride(0), " elements a row, ", width, " are written");
    args.x = p.x.data();
    args.x_stride = p.x.stride(0);
    args.num_tokens = static_cast<int>(p.x.shape(0));
    args.weight = weight;
    args.residual = begin(p.residual);
    args.residual_stride = p.residual ? p.residual.stride(0) : 0;
    args.out = begin(p.out);
    args.out_stride = p.out.stride(0);
    args.activation = p.activation;
    args.gate_up_apart = p.gate_up_apart;
    args.gate_in_out = gate_in_out;
    args.out_float32 = p.out.dtype() == DType::float32 && type != Element::f32;
    args.workspace = workspace ? workspace->data : nullptr;
    return args;
}

}  // namespace infinilm::cuda
