#include "model/taps.h"

namespace infinilm {

std::string hook_name(Site site, int layer) {
    return layer < 0 ? std::string(site.name) : concat("layer", layer, "_", site.name);
}

HookTap::HookTap(Hook hook, const HookNames& names, const std::vector<ModelSite>& sites, int rank)
    : hook_(std::move(hook)), rank_(rank) {
    std::map<std::string, Wanted*> by_name;
    for (const auto& [site, layer] : sites) by_name[hook_name(site, layer)] = &wanted_[{layer, site.name}];
    const auto want = [&](const std::vector<std::string>& asked, Wanted where) {
        for (const std::string& name : asked) {
            const auto found = by_name.find(name);
            if (found == by_name.end())
                throw ConfigError(concat("no hook site '", name, "' in a model of ", sites.back().layer + 1,
                                         " layers; such as 'layer0_q_proj' or 'logits'"));
            *found->second = where;
        }
    };
    want(names.rank0, Wanted::rank0);
    want(names.all_ranks, Wanted::all_ranks);
}

HookTap::Wanted HookTap::wanted(Site site, int layer) const {
    const auto found = wanted_.find({layer, site.name});
    return found == wanted_.end() ? Wanted::nowhere : found->second;
}

bool HookTap::wanted_anywhere(Site site, int layer) const { return wanted(site, layer) != Wanted::nowhere; }

void HookTap::operator()(Backend& backend, Site site, int layer, const TensorView& view, const Tensor& parent) const {
    const Wanted where = wanted(site, layer);
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
