// What a backend does unless it says otherwise. A file of its own: the CUDA library is linked with it, too.
#include <algorithm>

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

void Backend::update_step(const UpdateStepParams& p) {
    const auto *rows = p.rows.as<const int32_t>(), *previous = p.previous_ids.as<const int32_t>();
    for (int64_t t = 0; rows && t < p.ids.shape(0); ++t)
        if (rows[t] >= 0) p.ids.as<int32_t>()[t] = std::max(previous[rows[t]], 0);
    const auto* entries = p.entries.as<const int32_t>();
    for (int64_t i = 0; entries && i < p.entries.shape(0); ++i)
        p.table.as<int32_t>()[entries[2 * i]] = entries[2 * i + 1];
}

static DeviceError no_experts(const Backend& backend) {
    return DeviceError(concat("models with experts do not run on ", to_string(backend.device())));
}

std::unique_ptr<PreparedExperts> Backend::prepare_experts(SharedLinears, SharedLinears) { throw no_experts(*this); }
void Backend::route(const RouteParams&) { throw no_experts(*this); }
void Backend::experts(const ExpertsParams&) { throw no_experts(*this); }

static DeviceError no_states(const Backend& backend) {
    return DeviceError(concat("layers with a state do not run on ", to_string(backend.device()),
                              " in this version; use device 'cpu'"));
}

void Backend::causal_conv(const CausalConvParams&) { throw no_states(*this); }
void Backend::delta_rule(const DeltaRuleParams&) { throw no_states(*this); }
void Backend::head_linear(const HeadLinearParams&) {
    throw DeviceError(
        concat("layers with a latent cache do not run on ", to_string(device()), " in this version; use device 'cpu'"));
}
void Backend::lora(const LoraParams&) {
    throw DeviceError(concat("LoRA adapters do not run on ", to_string(device())));
}

}  // namespace infinilm
