// Layers of experts, and adapters, by linear_grouped: what the backend has for them besides its table of ops.
#pragma once

#include <memory>

#include "host.h"
#include "ops/backend.h"

namespace infinilm::cuda {

struct CudaLinear : PreparedLinear {
    PackedWeight packed;
    std::unique_ptr<DeviceMemory> data, bias;
    std::vector<Range> rows_of_blocks = {};  // of each part, where they came in blocks
};
inline const PackedWeight& packed(const PreparedLinear& weight) {
    return static_cast<const CudaLinear&>(weight).packed;
}

// DeviceError: more experts than kernels take.
std::unique_ptr<PreparedExperts> make_experts(Backend::SharedLinears gate_up, Backend::SharedLinears down);
// These enqueue, and return the error of a launch.
cudaError_t run_route(const RouteParams& p, cudaStream_t stream);
cudaError_t run_experts(const ExpertsParams& p, Type type, cudaStream_t stream);
cudaError_t run_lora(const LoraParams& p, cudaStream_t stream);

}  // namespace infinilm::cuda
