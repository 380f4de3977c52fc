#include "model/tower.h"

#include <algorithm>
#include <array>
#include <ranges>

#include "core/check.h"
#include "model/prepare_vectors.h"
#include "model/spec.h"
#include "ops/ops.h"

namespace infinilm {

void TowerSpec::check(const ModelSpec& model) const {
    require_spec(patch_dim > 0 && num_positions >= 0 && merged_patches > 0 && !merger.empty() &&
                     std::ranges::all_of(merger, [](const MergerLinear& linear) { return linear.size > 0; }),
                 "a tower with patches of ", patch_dim, ", ", num_positions, " positions, ", merged_patches,
                 " patches to merge, by ", merger.size(), " linears");
    require_spec(!model.lm_head && !model.embedding_sum && !model.own_vectors && !model.mtp,
                 "a tower has neither tokens nor logits");
    require_spec(std::ranges::all_of(levels, [&](int layer) { return layer >= 0 && layer < model.num_layers; }) &&
                     std::ranges::is_sorted(levels, std::ranges::less_equal()),
                 "levels of a tower are different layers of it, in their order");
    require_spec(std::ranges::none_of(merger, [](const MergerLinear& own) { return own.gated && !own.activated; }) &&
                     !merger.back().gated,
                 "a linear of a merger that has a gate is activated, and not the last");
    require_spec(standardized <= pooled && pooled_scale > 0, "standardized: what is not pooled has no mean");
    require_spec(norm_first <= (patch_norm && num_positions > 0), "norm_first: there are no norm and no positions");
    require_spec(!class_token || (num_positions > 0 && levels.empty()),
                 "class_token: of a tower with positions and no levels");
    require_spec(!pooled || (levels.empty() && model.hidden_size % 8 == 0),
                 "a tower that takes means has no levels, and a hidden_size that is a multiple of 8");
}

namespace {

// Columns of a buffer that is there for each patch, in which each row of the result has `size`.
int64_t of_a_patch(const TowerSpec& spec, int64_t size) {
    return (size + spec.merged_patches - 1) / spec.merged_patches;
}

// Columns of what a linear of the merger gives: of its gate, too.
int64_t columns_of(const MergerLinear& linear) { return int64_t{linear.gated ? 2 : 1} * linear.size; }

int64_t largest(const TowerSpec& spec) { return std::ranges::max(spec.merger | std::views::transform(columns_of)); }

// Whether it takes both buffers of the merger in turn.
bool takes_turns(const TowerSpec& spec) {
    return spec.merger.size() > 2 || std::ranges::any_of(spec.merger, &MergerLinear::gated);
}

// [num_rows, columns] in the memory of a larger buffer.
TensorView beginning(const TensorView& room, int64_t num_rows, int64_t columns) {
    return {room.data(), room.dtype(), {num_rows, columns}, room.device()};
}

}  // namespace

Tower::Tower(const ModelSpec& model, BufferPlan& plan)
    : spec_(*model.tower),
      hidden_size_(model.hidden_size),
      layer_eps_(model.rms_norm_eps),
      inner_{plan.add({.name = "merger_even", .columns = of_a_patch(spec_, largest(spec_))}),
             plan.add({.name = "merger_odd", .columns = takes_turns(spec_) ? of_a_patch(spec_, largest(spec_)) : 0})},
      apart_(plan.add({.name = "patches_apart", .columns = spec_.pooled || spec_.class_token ? hidden_size_ : 0})),
      result_(
          plan.add({.name = "merged", .columns = of_a_patch(spec_, int64_t{spec_.num_levels()} * spec_.out_size())})),
      mergers_(static_cast<size_t>(spec_.num_levels())) {}

void Tower::declare(ParamTable& table) {
    const auto linear = [&](LinearWeights& weights, const std::string& name, int64_t in, int64_t out, bool bias,
                            bool gated = false) {
        std::vector<ParamTable::Part> parts{{gated ? name + "_gate" : name, out}};
        if (gated) parts.push_back({name + "_up", out});
        table.linear(weights, {.name = name,
                               .in_features = in,
                               .parts = std::move(parts),
                               .timed = "other",
                               .bias = bias,
                               .adaptable = false});
    };
    linear(patches_, "model.embed_patches", spec_.patch_dim, hidden_size_, spec_.patch_bias);
    if (spec_.patch_norm) table.norm(patch_norm_, "model.patch_norm", hidden_size_);
    const auto as_loaded = [](Backend&, const VectorWeights&) { return Tensor(); };  // prepare() reads it
    if (spec_.num_positions > 0)
        table.tensor(table_, "model.embed_positions.weight", {spec_.num_positions, hidden_size_}, {}, as_loaded);
    if (spec_.class_token) table.tensor(class_, "model.class_embedding", {hidden_size_}, {}, as_loaded);
    if (spec_.standardized) {
        // A sum of patches times this is their mean times pooled_scale and scale.
        table.wide(scale_, "model.std_scale", hidden_size_, {},
                   spec_.pooled_scale / static_cast<float>(spec_.merged_patches));
        table.tensor(bias_, "model.std_bias", {hidden_size_}, {}, as_loaded);
    }
    if (spec_.pooled && spec_.pooled_norm_weight)
        table.norm(mergers_[0].norm, "model.merger_norm", hidden_size_,
                   NormForm{NormKind::rms, spec_.pooled_norm_offset});
    if (spec_.pooled && !spec_.pooled_norm_weight)
        table.made(mergers_[0].norm, [size = hidden_size_](Backend&, const VectorWeights&) {
            return ones_like(allocate_host(DType::float32, {size}));
        });
    for (size_t i = 0; i < mergers_.size(); ++i) {
        const std::string at = i == 0 ? "model.merger_" : concat("model.level", i - 1, "_");
        if (i > 0) table.norm(mergers_[i].norm, at + "norm", input_size());
        mergers_[i].linears.resize(spec_.merger.size());
        mergers_[i].norms.resize(spec_.merger.size());
        int64_t in = input_size();
        for (size_t j = 0; j < spec_.merger.size(); ++j) {
            const MergerLinear& own = spec_.merger[j];
            linear(mergers_[i].linears[j], concat(at, j), in, own.size, own.bias, own.gated);
            if (own.norm_eps > 0)
                table.norm(mergers_[i].norms[j], concat(at, j, "_norm"), own.size, NormForm{NormKind::layer_bias});
            in = own.size;
        }
    }
}

void Tower::prepare(Backend& backend) {
    if (table_.loaded) {
        positions_ = allocate_host(DType::float32, {num_positions(), hidden_size_});
        backend.copy(widened(backend, table_.loaded), positions_.slice(0, 0, spec_.num_positions));
        if (class_.loaded) backend.copy(widened(backend, class_.loaded), positions_.select(0, spec_.num_positions));
    }
    if (!bias_.loaded) return;
    const Tensor scale = widened(backend, scale_.loaded);
    offsets_ = widened(backend, bias_.loaded, -1);
    for (int64_t i = 0; i < hidden_size_; ++i) offsets_.as<float>()[i] *= scale.as<const float>()[i];
}

std::vector<LinearCall> Tower::calls() const {
    const auto call = [](int64_t in, int64_t out) {
        return LinearCall{.in_features = in, .out_features = out, .adaptable = false};
    };
    // The inputs of a row are those of its patches, one by one.
    std::vector<LinearCall> calls{call(spec_.patch_dim, hidden_size_)};
    int64_t in = hidden_size_;
    for (const MergerLinear& own : spec_.merger) {
        calls.push_back(call(in, columns_of(own)));
        in = own.size;
    }
    return calls;
}

void Tower::place(DType activation, Batch& b) const {
    Check check("forward");
    check.tensor("input_ids", b.input_ids, {"num_tokens"}, DType::int32);
    const int64_t num_tokens = check["num_tokens"];
    check.tensor("patches", b.patches, {"num_tokens", spec_.patch_dim}, DType::float32);
    const auto* starts = b.cu_seqlens_q.as<const int32_t>();
    const int64_t num_seqs = b.context_lens.shape(0), num_rows = spec_.num_rows(num_tokens, num_seqs);
    for (int64_t s = 0; s <= num_seqs; ++s)
        check.require((starts[s] - (spec_.class_token ? s : 0)) % spec_.merged_patches == 0, "cu_seqlens_q[", s,
                      "] is ", starts[s], ", but ", spec_.merged_patches, " neighbouring patches become one row");
    if (activation != DType::float32) {
        const Tensor narrow = allocate_host(activation, b.patches.shape());
        visit_floating(activation, [&]<class T>(T) {
            std::transform(b.patches.as<const float>(), b.patches.as<const float>() + b.patches.numel(), narrow.as<T>(),
                           [](float x) { return from_float<T>(x); });
        });
        b.patches = narrow;
    }
    if (spec_.pooled || spec_.class_token) {
        std::vector<int32_t> patches;
        for (int64_t s = 0; s < num_seqs; ++s)
            for (int32_t token = starts[s]; token < starts[s + 1] - (spec_.class_token ? 1 : 0); ++token)
                patches.push_back(token);
        b.apart_rows = allocate_host(DType::int32, {num_rows * spec_.merged_patches});
        auto* apart = b.apart_rows.as<int32_t>();
        const int64_t places = spec_.pooled ? spec_.merged_patches : 1;
        for (int64_t place = 0; place < places; ++place)
            for (size_t i = static_cast<size_t>(place); i < patches.size(); i += static_cast<size_t>(places))
                *apart++ = patches[i];
    }
    if (spec_.standardized) {
        b.unit_squares = allocate_host(DType::float32, {num_rows, 1});
        std::fill_n(b.unit_squares.as<float>(), num_rows, 1.0f);
        b.pooled_offsets = allocate_host(activation, {num_rows, hidden_size_});
        visit_floating(activation, [&]<class T>(T) {
            for (int64_t row = 0; row < num_rows; ++row)
                std::transform(offsets_.as<const float>(), offsets_.as<const float>() + hidden_size_,
                               b.pooled_offsets.as<T>() + row * hidden_size_, [](float x) { return from_float<T>(x); });
        });
    }
    check.require(static_cast<bool>(b.position_rows) == (spec_.num_positions > 0),
                  "position_rows: of towers with learned positions, and there always");
    if (!b.position_rows) return;
    check.tensor("position_rows", b.position_rows, {"num_tokens", "num_taps"}, DType::int32);
    check.tensor("position_weights", b.position_weights, {"num_tokens", "num_taps"}, DType::float32);
    const int64_t num_taps = check["num_taps"], size = hidden_size_;
    const auto* const rows = b.position_rows.as<const int32_t>();
    const auto* const weights = b.position_weights.as<const float>();
    for (int64_t i = 0; i < num_tokens * num_taps; ++i)
        check.require(rows[i] >= 0 && rows[i] < num_positions(), "position_rows: ", rows[i],
                      " is no row of the table, which has ", num_positions());
    b.patch_positions = allocate_host(activation, {num_tokens, size});
    visit_floating(activation, [&]<class T>(T) {
        std::vector<float> sum(static_cast<size_t>(size));
        for (int64_t t = 0; t < num_tokens; ++t) {
            std::ranges::fill(sum, 0.0f);
            for (int64_t i = t * num_taps; i < (t + 1) * num_taps; ++i) {
                const float* const row = positions_.as<const float>() + rows[i] * size;
                for (int64_t j = 0; j < size; ++j) sum[static_cast<size_t>(j)] += weights[i] * row[j];
            }
            std::ranges::transform(sum, b.patch_positions.as<T>() + t * size, [](float x) { return from_float<T>(x); });
        }
    });
}

// On a CPU it has memory of its own, since the caller may read it while the next step runs; a GPU copies it.
template <class Tap>
Tensor Tower::result(const Step<Tap>& s) const {
    const int64_t columns = int64_t{spec_.num_levels()} * spec_.out_size();
    if (s.backend.device().kind == DeviceKind::cpu)
        return s.backend.allocate(s.x.dtype(), std::array{num_rows(s), columns});
    return {beginning(s.view(result_), num_rows(s), columns), nullptr};
}

template <class Tap>
void Tower::embed(const Step<Tap>& s) const {
    s.linear(patches_, s.batch.patches, s.x, {}, spec_.norm_first ? TensorView() : s.batch.patch_positions.view());
    if (spec_.patch_norm)
        ops::rms_norm(s.backend, {.x = s.x, .weight = patch_norm_.prepared, .out = s.x, .eps = layer_eps_});
    if (spec_.norm_first)
        ops::add_rms_norm(s.backend,
                          {.x = s.batch.patch_positions, .residual = s.x, .weight = {}, .out = s.normed, .eps = 0});
}

// A mean and its sum are normed alike, where eps is as many times larger as the square of the sum. What standardises a
// mean is an RMSNorm whose mean square is said to be one, and so multiplies by its weight, and a sum.
template <class Tap>
TensorView Tower::pool(const Step<Tap>& s, const TensorView& apart) const {
    const int64_t num_rows = this->num_rows(s), k = spec_.merged_patches;
    const TensorView sums = beginning(s.normed, num_rows, hidden_size_);
    ops::sum_parts(s.backend, {.parts = apart.reshape({k, num_rows * hidden_size_}),
                               .out = sums.reshape({num_rows * hidden_size_})});
    const TensorView weight = mergers_[0].norm.prepared;
    if (spec_.standardized) {
        ops::rms_norm(
            s.backend,
            {.x = sums, .weight = scale_.prepared, .out = sums, .eps = 0, .mean_square = s.batch.unit_squares});
        const TensorView normed = beginning(apart, num_rows, hidden_size_);
        ops::add_rms_norm(
            s.backend,
            {.x = s.batch.pooled_offsets, .residual = sums, .weight = weight, .out = normed, .eps = spec_.eps});
        return normed;
    }
    const float of_mean = static_cast<float>(k) / spec_.pooled_scale;
    ops::rms_norm(s.backend, {.x = sums, .weight = weight, .out = sums, .eps = spec_.eps * of_mean * of_mean});
    return sums;
}

template <class Tap>
void Tower::run(const Step<Tap>& s, const Merger& merger, int level, const TensorView& x,
                const TensorView& result) const {
    const int64_t num_rows = x.shape(0), out_size = spec_.out_size();
    TensorView in = x;
    int turn = 0;
    const auto room = [&](int64_t columns) { return beginning(s.view(inner_[turn++ % 2]), num_rows, columns); };
    for (size_t i = 0; i < merger.linears.size(); ++i) {
        const MergerLinear& own = spec_.merger[i];
        const bool is_last = i + 1 == merger.linears.size();
        const TensorView out =
            is_last ? result.slice(1, level * out_size, (level + 1) * out_size) : room(columns_of(own));
        s.linear(merger.linears[i], in, out);
        if (own.norm_eps > 0)
            ops::rms_norm(s.backend, {.x = out, .weight = merger.norms[i].prepared, .out = out, .eps = own.norm_eps});
        in = own.gated ? room(own.size) : out;
        if (own.activated) ops::act_mul(s.backend, {.gate_up = out, .out = in, .activation = own.activation});
    }
}

template <class Tap>
void Tower::merge_level(const Step<Tap>& s, const TensorView& result) const {
    const auto found = std::ranges::find(spec_.levels, s.layer);
    if (found == spec_.levels.end()) return;
    const int level = 1 + static_cast<int>(found - spec_.levels.begin());
    const Merger& merger = mergers_[static_cast<size_t>(level)];
    const int64_t shape[] = {s.num_tokens() / spec_.merged_patches, merged_size()};
    const TensorView normed = s.normed.view().reshape({shape[0], shape[1]});
    ops::rms_norm(s.backend, {.x = s.x.view().reshape({shape[0], shape[1]}),
                              .weight = merger.norm.prepared,
                              .out = normed,
                              .eps = spec_.eps});
    run(s, merger, level, normed, result);
}

template <class Tap>
void Tower::merge(const Step<Tap>& s, const VectorWeights& norm, const TensorView& result) const {
    if (spec_.norm) {
        ops::rms_norm(s.backend, {.x = s.x, .weight = norm.prepared, .out = s.normed, .eps = spec_.eps});
        s.tap_common(sites::final_norm, s.normed, s.normed);
    }
    TensorView left = spec_.norm ? s.normed : s.x;
    if (s.batch.apart_rows) {
        const TensorView apart = beginning(s.view(apart_), s.batch.apart_rows.shape(0), hidden_size_);
        ops::gather_rows(s.backend, {.x = left, .rows = s.batch.apart_rows, .out = apart});
        left = apart;
    }
    const TensorView merged = spec_.pooled ? pool(s, left) : left.reshape({num_rows(s), merged_size()});
    run(s, mergers_[0], 0, merged, result);
}

template Tensor Tower::result(const Step<NoTap>&) const;
template Tensor Tower::result(const Step<StepTap>&) const;
template void Tower::embed(const Step<NoTap>&) const;
template void Tower::embed(const Step<StepTap>&) const;
template void Tower::merge_level(const Step<NoTap>&, const TensorView&) const;
template void Tower::merge_level(const Step<StepTap>&, const TensorView&) const;
template void Tower::merge(const Step<NoTap>&, const VectorWeights&, const TensorView&) const;
template void Tower::merge(const Step<StepTap>&, const VectorWeights&, const TensorView&) const;

}  // namespace infinilm
