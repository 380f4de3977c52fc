#include "model/lora.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>

#include "ops/device_queue.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

struct Place {
    int layer;
    size_t site;  // of lora_sites
};

// Where a weight is: "model.layers.3.mlp.up_proj.weight". WeightError: at none of lora_sites.
Place place_of(const std::string& name) {
    constexpr std::string_view prefix = "model.layers.", suffix = ".weight";
    if (name.starts_with(prefix) && name.ends_with(suffix)) {
        Place place{};
        const char* const end = name.data() + name.size();
        const auto [rest, error] = std::from_chars(name.data() + prefix.size(), end, place.layer);
        const std::string_view module(rest, static_cast<size_t>(end - rest) - suffix.size());
        for (; error == std::errc() && place.site < lora_sites.size(); ++place.site) {
            const Site site = lora_sites[place.site];
            const bool in_attention = site <= Site::o_proj;
            if (module == concat(in_attention ? ".self_attn." : ".mlp.", site_names[static_cast<size_t>(site)]))
                return place;
        }
    }
    throw WeightError(concat("an adapter cannot change '", name,
                             "': expected the weight of a linear of attention or of a dense MLP"));
}

void check_shapes(const ParamRow& row, const LoraTensors& tensors) {
    const auto refuse = [&](const char* which, const Tensor& tensor, const char* expected) {
        throw WeightError(concat("adapter of '", row.name, "': ", which, ": expected ", expected, " of a weight of ",
                                 shape_string(row.shape), ", in a floating dtype, got ", shape_string(tensor.shape()),
                                 " ", name(tensor.dtype())));
    };
    const Tensor &a = tensors.a, &b = tensors.b;
    if (a.ndim() != 2 || a.shape(0) < 1 || a.shape(1) != row.shape[1] || !is_floating(a.dtype()))
        refuse("A", a, "[rank, in_features]");
    if (b.ndim() != 2 || b.shape(0) != row.shape[0] || b.shape(1) != a.shape(0) || !is_floating(b.dtype()))
        refuse("B", b, "[out_features, rank]");
}

// Of the rows, or the columns, of a weight: on a device they are multiples of 8; more are zero.
Tensor with_whole_rank(Backend& backend, Tensor weight, int dim) {
    const int64_t rank = weight.shape(dim), padded = (rank + 7) / 8 * 8;
    if (backend.device().kind == DeviceKind::cpu || padded == rank) return weight;
    std::vector<int64_t> shape(weight.shape().begin(), weight.shape().end());
    shape[static_cast<size_t>(dim)] = padded;
    const Tensor out = allocate_host(weight.dtype(), shape);
    std::memset(out.data(), 0, static_cast<size_t>(out.bytes()));
    backend.copy(weight, out.slice(dim, 0, rank));
    return out;
}

std::unique_ptr<PreparedLinear> prepare(Backend& backend, Tensor weight, int rank_dim) {
    weight = with_whole_rank(backend, std::move(weight), rank_dim);
    return ops::prepare_linear(backend, {{.weight = std::move(weight), .bias = {}}}, LinearKind::plain);
}

}  // namespace

Adapter::Adapter(Backend& backend, const Params& params, const std::vector<LoraTensors>& tensors)
    : layers_(static_cast<size_t>(params.spec().num_layers)) {
    std::set<std::string_view> seen;
    for (const LoraTensors& own : tensors) {
        const Place place = place_of(own.name);
        const ParamRow* const row = params.find(own.name);
        if (!row) throw WeightError(concat("adapter of '", own.name, "': the model has no such weight"));
        check_shapes(*row, own);
        if (!seen.insert(own.name).second) throw WeightError(concat("adapter of '", own.name, "': it is there twice"));
        if (!params.is_of_stage(*row)) continue;
        Linear& linear = layers_[static_cast<size_t>(place.layer)][place.site];
        const bool columns = is_columns(row->cut);
        linear = {.a = prepare(backend, columns ? params.part(*row, own.a) : own.a, 0),
                  .b = prepare(backend, columns ? own.b : params.part(*row, own.b), 1),
                  .scale = own.scale};
        most_rank_ = std::max(most_rank_, linear.b->in_features);
    }
}

const Adapter::Linear* Adapter::find(Site site, int layer) const {
    const auto at = static_cast<size_t>(std::ranges::find(lora_sites, site) - lora_sites.begin());
    const Linear& linear = layers_[static_cast<size_t>(layer)][at];
    return linear.a ? &linear : nullptr;
}

LoraStep::LoraStep(const Adapters& adapters, const Batch& batch) {
    if (!batch.adapter_ids) return;
    const auto *ids = batch.adapter_ids.as<const int32_t>(), *starts = batch.cu_seqlens_q.as<const int32_t>();
    std::map<int32_t, size_t> group_of;
    for (int64_t s = 0; s < batch.adapter_ids.shape(0); ++s) {
        if (ids[s] < 0 || starts[s] == starts[s + 1]) continue;
        const auto found = adapters.find(ids[s]);
        if (found == adapters.end())
            throw RequestError(concat("forward: adapter_ids[", s, "] is ", ids[s], ", and no adapter has this id"));
        const auto [group, is_new] = group_of.emplace(ids[s], groups_.size());
        if (is_new) groups_.push_back({.adapter = found->second.get(), .rows = {}});
        for (int32_t row = starts[s]; row < starts[s + 1]; ++row) groups_[group->second].rows.push_back(row);
    }
    // Those of one rank side by side: a device computes them together.
    std::ranges::stable_sort(groups_, {}, [](const Group& group) { return group.adapter->most_rank(); });
    for (const Group& group : groups_) {
        num_rows_ += static_cast<int64_t>(group.rows.size());
        most_rank_ = std::max(most_rank_, group.adapter->most_rank());
    }
}

void LoraStep::stage(Backend& backend) {
    DeviceQueue* const queue = backend.queue();
    if (!queue || groups_.empty()) return;
    std::vector<int32_t> rows, items;
    for (size_t g = 0; g < groups_.size(); ++g) {
        listed_.first_item.push_back(static_cast<int>(items.size() / 4));
        const auto first = static_cast<int32_t>(rows.size()), count = static_cast<int32_t>(groups_[g].rows.size());
        for (int32_t i = 0; i < count; i += LoraRows::tile)
            items.insert(items.end(), {static_cast<int32_t>(g), first + i, std::min(LoraRows::tile, count - i), 0});
        rows.insert(rows.end(), groups_[g].rows.begin(), groups_[g].rows.end());
    }
    listed_.first_item.push_back(static_cast<int>(items.size() / 4));
    const int64_t num_rows = static_cast<int64_t>(rows.size()), num_items = static_cast<int64_t>(items.size() / 4);
    const std::array<TensorView, 2> arrays{TensorView(items.data(), DType::int32, {num_items, 4}),
                                           TensorView(rows.data(), DType::int32, {num_rows})};
    const std::vector<TensorView> uploaded = queue->upload(Upload::adapters, arrays);
    listed_.items = uploaded[0];
    listed_.rows = uploaded[1];
}

std::span<const LoraPart> LoraStep::parts(Site site, int layer) const {
    parts_.clear();
    for (const Group& group : groups_)
        if (const Adapter::Linear* const linear = group.adapter->find(site, layer))
            parts_.push_back({.a = linear->a.get(),
                              .b = linear->b.get(),
                              .scale = linear->scale,
                              .rows = TensorView(const_cast<int32_t*>(group.rows.data()), DType::int32,
                                                 {static_cast<int64_t>(group.rows.size())}),
                              .group = static_cast<int>(&group - groups_.data())});
    return parts_;
}

}  // namespace infinilm
