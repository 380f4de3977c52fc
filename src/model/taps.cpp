#include "model/taps.h"

namespace infinilm {

std::string hook_name(Site site, int layer) {
    const std::string_view name = site_names[static_cast<size_t>(site)];
    return layer < 0 ? std::string(name) : concat("layer", layer, "_", name);
}

HookTap::HookTap(Hook hook, const HookNames& names, int num_layers, int rank)
    : hook_(std::move(hook)), rank_(rank), wanted_(static_cast<size_t>(num_layers) + 1) {
    want(names.rank0, Wanted::rank0, num_layers);
    want(names.all_ranks, Wanted::all_ranks, num_layers);
}

void HookTap::want(const std::vector<std::string>& names, Wanted where, int num_layers) {
    for (const std::string& name : names) {
        bool found = false;
        for (int site = 0; site < num_sites; ++site)
            for (int layer = -1; layer < num_layers; ++layer) {
                if ((layer >= 0) != in_layer(static_cast<Site>(site))) continue;
                if (hook_name(static_cast<Site>(site), layer) != name) continue;
                wanted(static_cast<Site>(site), layer) = where;
                found = true;
            }
        if (!found)
            throw ConfigError(concat("no hook site '", name, "' in a model of ", num_layers,
                                     " layers; such as 'layer0_q_proj' or 'logits'"));
    }
}

bool HookTap::wanted_anywhere(Site site, int layer) const {
    return wanted_[static_cast<size_t>(layer + 1)][static_cast<size_t>(site)] != Wanted::nowhere;
}

void HookTap::operator()(Backend& backend, Site site, int layer, const TensorView& view, const Tensor& parent) const {
    const Wanted where = wanted_[static_cast<size_t>(layer + 1)][static_cast<size_t>(site)];
    if (where == Wanted::nowhere || (where == Wanted::rank0 && rank_ != 0)) return;
    if (view.device().kind == DeviceKind::cpu) return hook_(site, layer, Tensor(view, parent.owner), rank_);
    const Tensor host = allocate_host(parent.dtype(), parent.shape());
    backend.copy(parent, host);
    const auto offset = view.as<std::byte>() - parent.as<std::byte>();
    const TensorView part(host.as<std::byte>() + offset, view.dtype(), view.shape(), view.strides(), host.device());
    hook_(site, layer, Tensor(part, host.owner), rank_);
    backend.copy(host, parent);
}

}  // namespace infinilm
