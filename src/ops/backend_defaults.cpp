// What a backend does unless it says otherwise. A file of its own: the CUDA library is linked with it, too.
#include "ops/backend.h"

namespace infinilm {

void Backend::check_packed(const PackedSource&) const {
    throw WeightError(concat("packed weights are laid out for the kernels of CPUs, and this device is ",
                             to_string(device()), "; load the checkpoint that they were packed from"));
}

std::unique_ptr<PreparedLinear> Backend::adopt_linear(const PackedSource& source) {
    check_packed(source);
    return nullptr;
}

static DeviceError no_experts(const Backend& backend) {
    return DeviceError(concat("models with experts do not run on ", to_string(backend.device())));
}

std::unique_ptr<PreparedExperts> Backend::prepare_experts(SharedLinears, SharedLinears) { throw no_experts(*this); }
void Backend::route(const RouteParams&) { throw no_experts(*this); }
void Backend::experts(const ExpertsParams&) { throw no_experts(*this); }
void Backend::lora(const LoraParams&) {
    throw DeviceError(concat("LoRA adapters do not run on ", to_string(device())));
}

}  // namespace infinilm
