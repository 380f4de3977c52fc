// Layers of experts, and adapters, by linear_grouped: what the backend has for them besides its table of ops.
#pragma once

#include <memory>

#include "host.h"
#include "ops/backend.h"

namespace infinilm::cuda {

// Neighbouring parts of a linear that are blocks of one type, or numbers: what one launch multiplies.
struct CudaPiece {
    PackedWeight packed;
    int64_t first_output = 0;
    std::unique_ptr<DeviceMemory> data, bias;
};
struct CudaLinear : PreparedLinear {
    std::vector<CudaPiece> pieces;  // several of a plain linear alone
    struct Rows {
        size_t piece;
        Range rows;  // of it
    };
    std::vector<Rows> parts;
};
inline const std::vector<CudaPiece>& pieces(const PreparedLinear& weight) {
    return static_cast<const CudaLinear&>(weight).pieces;
}
// Of a linear that is one piece, as all but those that `linear` takes are.
inline const PackedWeight& packed(const PreparedLinear& weight) { return pieces(weight)[0].packed; }

// DeviceError: more experts than kernels take.
std::unique_ptr<PreparedExperts> make_experts(Backend::SharedLinears gate_up, Backend::SharedLinears down);
// These enqueue, and return the error of a launch.
cudaError_t run_route(const RouteParams& p, cudaStream_t stream);
cudaError_t run_experts(const ExpertsParams& p, Type type, cudaStream_t stream);
cudaError_t run_lora(const LoraParams& p, cudaStream_t stream);

}  // namespace infinilm::cuda
