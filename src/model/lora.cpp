#include "model/lora.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "model/params.h"
#include "ops/device_queue.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// Heads that have a matrix each in a weight; 1: it is one.
int64_t num_heads_of(const ParamRow& row) {
    return row.linear->kind == LinearKind::by_head ? row.shape[0] / row.linear->head_dim : 1;
}

void check_shapes(const ParamRow& row, const LoraTensors& tensors) {
    const auto refuse = [&](const char* which, const Tensor& tensor, const char* expected) {
        throw WeightError(concat("adapter of '", row.name, "': ", which, ": expected ", expected, " of a weight of ",
                                 shape_string(row.shape), ", in a floating dtype, got ", shape_string(tensor.shape()),
                                 " ", name(tensor.dtype())));
    };
    const Tensor &a = tensors.a, &b = tensors.b;
    const int64_t num_heads = num_heads_of(row), rank = b.ndim() == 2 ? b.shape(1) : 0;
    if (rank < 1 || !is_floating(b.dtype()) || (b.shape(0) != row.shape[0] && b.shape(0) * num_heads != row.shape[0]))
        refuse("B", b, "[out_features, rank]");
    const int64_t num_a = b.shape(0) == row.shape[0] ? 1 : num_heads;
    if (a.ndim() != 2 || a.shape(0) != num_a * rank || a.shape(1) != row.shape[1] || !is_floating(a.dtype()))
        refuse("A", a, "[rank, in_features]");
}

// A weight whose rows, or columns, are filled up with zeros to a multiple of 8, as devices need them.
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

std::shared_ptr<PreparedLinear> prepare(Backend& backend, Tensor weight, int rank_dim) {
    weight = with_whole_rank(backend, std::move(weight), rank_dim);
    return ops::prepare_linear(backend, {{.weight = std::move(weight), .bias = {}}}, LinearKind::plain);
}

}  // namespace

Adapter::Adapter(Backend& backend, const Params& params, const std::vector<LoraTensors>& tensors)
    : parts_(params.rows().size()) {
    std::set<std::string_view> seen;
    for (const LoraTensors& own : tensors) {
        const ParamRow* const row = params.find(own.name);
        if (!row) throw WeightError(concat("adapter of '", own.name, "': the model has no such weight"));
        if (!takes_adapter(*row))
            throw WeightError(concat("an adapter cannot change '", own.name,
                                     "': expected the weight of a linear that adapter_params() lists"));
        check_shapes(*row, own);
        if (!seen.insert(own.name).second) throw WeightError(concat("adapter of '", own.name, "': it is there twice"));
        if (!params.is_of_stage(*row)) continue;
        std::vector<Part>& parts = parts_[static_cast<size_t>(row - params.rows().data())];
        const auto add = [&](auto a, auto b, Range outputs) {
            parts.push_back({std::move(a), std::move(b), own.scale, outputs});
            most_rank_ = std::max(most_rank_, parts.back().b->in_features);
        };
        if (row->linear->kind != LinearKind::by_head) {
            const bool columns = row->cut.is_columns();
            add(prepare(backend, columns ? params.part(*row, own.a) : own.a, 0),
                prepare(backend, columns ? own.b : params.part(*row, own.b), 1), params.outputs(*row));
            continue;
        }
        // The heads share one of the two.
        const int64_t rank = own.b.shape(1), head_dim = row->linear->head_dim;
        const bool shares_b = own.b.shape(0) == head_dim;
        const auto shared = shares_b ? prepare(backend, own.b, 1) : prepare(backend, own.a, 0);
        const auto of_head = [&](const Tensor& all, int64_t head, int64_t size, int rank_dim) {
            return prepare(backend, {all.slice(0, head * size, (head + 1) * size), all.owner}, rank_dim);
        };
        const Range heads = params.heads(*row);
        for (int64_t head = heads.begin; head < heads.end; ++head)
            if (shares_b)
                add(of_head(own.a, head, rank, 0), shared, {0, head_dim});
            else
                add(shared, of_head(own.b, head, head_dim, 1), {0, head_dim});
    }
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
    // Groups of one rank lie side by side: a device computes them together.
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

LoraStep::Changes LoraStep::changes(size_t row, size_t head) const {
    parts_.clear();
    Range outputs;
    for (const Group& group : groups_)
        if (const Adapter::Part* const own = group.adapter->find(row, head)) {
            parts_.push_back({.a = own->a.get(),
                              .b = own->b.get(),
                              .scale = own->scale,
                              .rows = TensorView(const_cast<int32_t*>(group.rows.data()), DType::int32,
                                                 {static_cast<int64_t>(group.rows.size())}),
                              .group = static_cast<int>(&group - groups_.data())});
            outputs = own->outputs;
        }
    return {parts_, outputs};
}

}  // namespace infinilm
