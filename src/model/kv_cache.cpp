#include "model/kv_cache.h"

#include <algorithm>
#include <array>

#include "model/batch.h"
#include "ops/values.h"

namespace infinilm {

namespace {
constexpr int64_t large_layer = 16 << 20;  // bytes
constexpr int64_t small_block = 256;       // tokens

constexpr int64_t num_score_rows = 128;  // tokens that a GPU lets choose keys at once: a block for each

// That a token of a cache of so many sees.
int64_t most_keys(const ModelSpec& model, int64_t num_tokens) {
    return std::min<int64_t>(num_tokens, model.max_model_len);
}

// Whether a layer has its rows where the first one has: in encoders, whose steps read nothing of those before, layers
// use the same memory one after the other.
bool takes_turns(const ModelSpec& model, int layer) {
    const int begin = model.own_layers().begin;
    const CacheSpec first = model.layer(begin).cache(), own = model.layer(layer).cache();
    return layer > begin && first.two_way && own.two_way && own.num_kv_heads == first.num_kv_heads &&
           own.head_dim == first.head_dim;
}

}  // namespace

KvCache::KvCache(Backend& backend, const ModelSpec& model, const KvCacheSpec& spec) : spec_(spec) {
    if (spec.num_blocks < 1 || spec.block_size < 1)
        throw ConfigError(concat("a KV cache needs at least one block of one token, got ", spec.num_blocks,
                                 " blocks of ", spec.block_size));
    const DeviceKind device = backend.device().kind;
    if (!is_floating(spec.dtype) && !has_row_scales(spec.dtype))
        throw ConfigError(
            concat("the KV cache can be float32, bfloat16, float16, int8 or fp8, got ", name(spec.dtype)));
    if (device == DeviceKind::cpu && spec.dtype == DType::fp8)
        throw ConfigError("on a CPU the KV cache cannot be fp8; int8 takes as much memory");
    if (device == DeviceKind::cuda && spec.dtype != model.dtype && !has_row_scales(spec.dtype))
        throw ConfigError(concat("on a GPU the KV cache has the dtype that the engine computes in, ", name(model.dtype),
                                 ", or is int8 or fp8; got ", name(spec.dtype)));
    layers_ = model.caches();
    const LayerRange all_layers = model.own_layers();
    for (int layer = all_layers.begin; layer < all_layers.end; ++layer)
        if (takes_turns(model, layer) && spec.num_groups() == 2 && spec.num_window_blocks != spec.num_blocks)
            throw ConfigError(concat("num_window_blocks: layers of this model use the same memory, so that it must be ",
                                     "num_blocks, which is ", spec.num_blocks, "; got ", spec.num_window_blocks));
    const int64_t num_with_state = std::ranges::count_if(layers_, &CacheSpec::has_state);
    const bool any_state = num_with_state > 0;
    if ((spec.num_states > 0) != any_state)
        throw ConfigError(concat("a cache of a model with ", num_with_state, " layers that have a state, got ",
                                 spec.num_states, " states"));
    if (spec.num_window_blocks < 0 || spec.num_window_blocks > spec.num_blocks)
        throw ConfigError(concat("num_window_blocks: expected 0 to num_blocks, which is ", spec.num_blocks, ", got ",
                                 spec.num_window_blocks));
    // The sums over layers below are numbers if all that they keep is one tensor that can be.
    const std::array<int64_t, 3> all{spec.num_blocks, spec.block_size,
                                     bytes_per_token(model, spec.dtype, device, false)};
    static_cast<void>(TensorView(nullptr, DType::uint8, all));
    for (const CacheSpec& layer : layers_) {
        groups_.push_back(spec.group_of(layer));
        const AttentionLayer reads = attention_layer(layer);
        if (reads.chosen) top_k_ = layer.top_k, run_keys_ = layer.run_keys;
        const bool needs_list = layer.has_rows() && model.dtype != DType::float32;
        if (needs_list && std::ranges::find(attention_layers_, reads) == attention_layers_.end())
            attention_layers_.push_back(reads);
    }
    Before first, second, index;
    std::vector<int64_t> states;  // elements of a sequence, of each tensor of a state
    int64_t log_columns = 0;
    places_.resize(layers_.size());
    const LayerRange own = model.own_layers_and_head();
    for (int layer = own.begin; layer < own.end; ++layer) {
        const CacheSpec& cache = layers_[static_cast<size_t>(layer)];
        Place& here = places_[static_cast<size_t>(layer)];
        if (cache.kind == CacheKind::shared) {
            here = place(cache.owner);
            continue;
        }
        if (takes_turns(model, layer)) {
            here = place(own.begin);
            continue;
        }
        owners_.push_back(layer);
        const int64_t num_blocks = spec.blocks_of(group(layer));
        here = {.num_blocks = num_blocks,
                .num_kv_heads = cache.num_kv_heads,
                .first_dim = cache.first_dim(),
                .second_dim = cache.second_dim(),
                .index_dim = cache.index_dim,
                .first = first,
                .second = second,
                .index = index,
                .states = states,
                .log_columns = log_columns};
        states.resize(std::max(states.size(), cache.states.size()));
        for (size_t i = 0; i < cache.states.size(); ++i) states[i] += elements_of(cache.states[i]);
        log_columns += cache.log_columns;
        const auto add = [&](Before& before, int64_t dim, int64_t num_heads) {
            before.elements += num_blocks * num_heads * dim;
            if (dim > 0) before.heads += num_blocks * num_heads;
        };
        add(first, cache.first_dim(), cache.num_kv_heads);
        add(second, cache.second_dim(), cache.num_kv_heads);
        add(index, cache.index_dim, 1);
    }
    const auto allocate = [&](Tensor& rows, Tensor& scales, const Before& all) {
        rows = backend.allocate(spec.dtype, std::array{spec.block_size, all.elements});
        if (has_row_scales(spec.dtype))
            scales = backend.allocate(DType::float32, std::array{spec.block_size, all.heads});
    };
    allocate(k_, k_scales_, first);
    allocate(v_, v_scales_, second);
    allocate(index_keys_, index_scales_, index);
    if (any_state) {
        for (const int64_t elements : states)
            states_.push_back(backend.allocate(DType::float32, std::array{spec.num_states, elements}));
        if (spec.num_log_rows > 0)
            log_ = backend.allocate(backend.activation_dtype(),
                                    std::array{spec.num_states * spec.num_log_rows, log_columns});
        seen_.resize(static_cast<size_t>(spec.num_states));
    }
    if (device == DeviceKind::cuda) {
        const int64_t num_tokens = spec.num_blocks * spec.block_size;
        if (const int64_t bytes = wide_bytes_per_token(model, spec.dtype, device); bytes > 0)
            wide_cache_ = backend.allocate(DType::uint8, std::array{num_tokens * bytes});
        workspace_ = backend.allocate(DType::uint8, std::array{attention_bytes(model, num_tokens)});
        if (top_k() > 0)
            index_scores_ = backend.allocate(DType::float32, std::array{num_score_rows, most_keys(model, num_tokens)});
    }
    // Attention jumps from block to block, and small pages make each jump a walk of page tables. Where a layer is small
    // or rows are long, whole large pages would be taken for a few tokens.
    const bool dense = k_.bytes() / own.size() >= large_layer && spec.block_size <= small_block;
    if (dense && k_.device().kind == DeviceKind::cpu) {
        prefer_huge_pages(k_);
        for (const Tensor* rows : {&v_, &index_keys_})
            if (rows->bytes() > 0) prefer_huge_pages(*rows);
    }
}

TensorView KvCache::rows(const Tensor& all, const Place& place, const Before& before, int64_t dim,
                         int num_heads) const {
    if (dim == 0) return {};
    const int64_t shape[] = {place.num_blocks, num_heads ? num_heads : place.num_kv_heads, spec_.block_size, dim};
    const int64_t offset = spec_.block_size * before.elements;
    return {all.as<std::byte>() + offset * size_bytes(spec_.dtype), spec_.dtype, shape, all.device()};
}

TensorView KvCache::scales(const Tensor& all, const Place& place, const Before& before, int num_heads) const {
    if (!all) return {};
    const int64_t shape[] = {place.num_blocks, num_heads ? num_heads : place.num_kv_heads, spec_.block_size};
    return {all.as<float>() + spec_.block_size * before.heads, DType::float32, shape, all.device()};
}

TensorView KvCache::state(int layer, size_t index) const {
    const std::vector<int64_t>&before = place(layer).states, &own = layers_[static_cast<size_t>(layer)].states[index];
    const Tensor& all = states_[index];
    std::vector<int64_t> shape{spec_.num_states};
    shape.insert(shape.end(), own.begin(), own.end());
    const int64_t offset = index < before.size() ? spec_.num_states * before[index] : 0;
    return {all.as<float>() + offset, DType::float32, shape, all.device()};
}

TensorView KvCache::log(int layer) const {
    if (!log_) return {};
    const int64_t shape[] = {spec_.num_states, spec_.num_log_rows, layers_[static_cast<size_t>(layer)].log_columns};
    const int64_t offset = spec_.num_states * spec_.num_log_rows * place(layer).log_columns;
    return {log_.as<std::byte>() + offset * size_bytes(log_.dtype()), log_.dtype(), shape, log_.device()};
}

std::vector<TensorView> KvCache::blocks_of(int group) const {
    std::vector<TensorView> tensors;
    for (const int layer : owners_)
        if (this->group(layer) == group && layers_[static_cast<size_t>(layer)].owns_rows())
            for (const TensorView& tensor :
                 {k(layer), v(layer), index_keys(layer), k_scales(layer), v_scales(layer), index_scales(layer)})
                if (tensor) tensors.push_back(tensor);
    return tensors;
}

std::vector<TensorView> KvCache::states() const {
    std::vector<TensorView> tensors;
    for (const int layer : owners_)
        for (size_t i = 0; i < layers_[static_cast<size_t>(layer)].states.size(); ++i)
            tensors.push_back(state(layer, i));
    return tensors;
}

int KvCache::widest_window(int group) const {
    int widest = 0;
    for (const CacheSpec& layer : layers_) {
        if (!layer.has_rows() || spec_.group_of(layer) != group) continue;
        if (layer.sliding_window == 0) return 0;
        widest = std::max(widest, layer.sliding_window);
    }
    return widest;
}

int64_t KvCache::workspace_bytes(const ModelSpec& model, int64_t num_tokens) {
    const std::vector<CacheSpec> layers = model.caches();
    const bool any = std::ranges::any_of(layers, [](const CacheSpec& own) { return own.top_k > 0; });
    return attention_bytes(model, num_tokens) +
           (any ? num_score_rows * most_keys(model, num_tokens) * size_bytes(DType::float32) : 0);
}

int64_t KvCache::attention_bytes(const ModelSpec& model, int64_t num_tokens) {
    if (model.dtype == DType::float32) return 0;
    const std::vector<CacheSpec> layers = model.caches();
    const int row_floats = attention_row_floats(std::ranges::max(layers, {}, &CacheSpec::head_dim).head_dim);
    int64_t most = 0;
    const LayerRange own = model.own_layers_and_head();
    for (int layer = own.begin; layer < own.end; ++layer)
        if (const CacheSpec& cache = layers[static_cast<size_t>(layer)]; cache.has_rows())
            most = std::max(most, attention_workspace_bytes(attention_layer(cache).heads, num_tokens, row_floats));
    return most;
}

int64_t KvCache::state_bytes(const ModelSpec& model, DType activation, int64_t num_log_rows) {
    int64_t bytes = 0;
    const LayerRange own = model.own_layers();
    for (int layer = own.begin; layer < own.end; ++layer) {
        const CacheSpec cache = model.layers[static_cast<size_t>(layer)].cache();
        bytes += cache.state_elements() * size_bytes(DType::float32) +
                 num_log_rows * cache.log_columns * size_bytes(activation);
    }
    return bytes;
}

void KvCache::check_states(const Batch& batch) const {
    if (seen_.empty()) return;
    Check check("forward");
    check.tensor("context_lens", batch.context_lens, {"num_seqs"}, DType::int32);
    check.tensor("cu_seqlens_q", batch.cu_seqlens_q, {check["num_seqs"] + 1}, DType::int32);
    check.tensor("state_in", batch.state_in, {"num_seqs"}, DType::int32);
    check.tensor("state_out", batch.state_out, {"num_seqs"}, DType::int32);
    if (batch.state_tokens) check.tensor("state_tokens", batch.state_tokens, {"num_seqs"}, DType::int32);
    if (batch.num_replayed) check.tensor("num_replayed", batch.num_replayed, {"num_seqs"}, DType::int32);
    const StateSteps sequences = state_steps(batch);
    check_state_steps(check, sequences, batch.input_ids.shape(0), spec_.num_states, spec_.num_log_rows);
    if (batch.state_tokens && log_) check_log_rows(check, sequences, spec_.num_log_rows);
    const auto *lens = batch.context_lens.as<const int32_t>(), *starts = batch.cu_seqlens_q.as<const int32_t>(),
               *in = batch.state_in.as<const int32_t>();
    const auto* replayed = batch.num_replayed ? batch.num_replayed.as<const int32_t>() : nullptr;
    for (int64_t s = 0; s < check["num_seqs"]; ++s) {
        const int32_t cached = lens[s] - (starts[s + 1] - starts[s]), count = replayed ? replayed[s] : 0;
        const Seen seen = in[s] < 0 ? Seen{0, 0} : seen_[static_cast<size_t>(in[s])];
        if (seen.num_tokens >= 0 && seen.num_tokens + count == cached && count <= seen.num_logged) continue;
        throw RequestError(
            concat("forward: sequence ", s, " would go on from ", cached,
                   " tokens, but this model keeps a state of each sequence, and this one ",
                   seen.num_tokens < 0 ? "is of a step that failed" : concat("has seen ", seen.num_tokens),
                   count ? concat(" (num_replayed is ", count, ", and its log has ", seen.num_logged, ")") : "",
                   "; begin at 0"));
    }
}

void KvCache::begin_states(const Batch& batch) {
    if (seen_.empty()) return;
    const auto* out = batch.state_out.as<const int32_t>();
    for (int64_t s = 0; s < batch.state_out.shape(0); ++s) seen_[static_cast<size_t>(out[s])] = {};
}

void KvCache::end_states(const Batch& batch) {
    if (seen_.empty()) return;
    const auto *out = batch.state_out.as<const int32_t>(), *lens = batch.context_lens.as<const int32_t>(),
               *starts = batch.cu_seqlens_q.as<const int32_t>();
    const auto* certain = batch.state_tokens ? batch.state_tokens.as<const int32_t>() : nullptr;
    for (int64_t s = 0; s < batch.state_out.shape(0); ++s) {
        const int32_t num_drafts = certain ? starts[s + 1] - starts[s] - certain[s] : 0;
        seen_[static_cast<size_t>(out[s])] = {lens[s] - num_drafts, log_ ? num_drafts : 0};
    }
}

int64_t KvCache::wide_bytes_per_token(const ModelSpec& model, DType dtype, DeviceKind device) {
    if (device != DeviceKind::cuda || !has_row_scales(dtype) || model.dtype == DType::float32) return 0;
    int64_t most = 0;
    const LayerRange own = model.own_layers_and_head();
    for (int layer = own.begin; layer < own.end; ++layer) {
        const CacheSpec cache = model.layer(layer).cache();
        if (!cache.owns_rows()) continue;
        most = std::max(most, cache.num_kv_heads * (cache.first_dim() + cache.second_dim()) * size_bytes(model.dtype));
    }
    return most;
}

int64_t KvCache::bytes_per_token(const ModelSpec& model, DType dtype, DeviceKind device, bool windows_only) {
    const int64_t scale_bytes = has_row_scales(dtype) ? size_bytes(DType::float32) : 0;  // of each head
    int64_t bytes = windows_only ? 0 : wide_bytes_per_token(model, dtype, device);
    const LayerRange own = model.own_layers_and_head();
    for (int layer = own.begin; layer < own.end; ++layer) {
        const CacheSpec cache = model.layer(layer).cache();
        if (!cache.owns_rows() || takes_turns(model, layer) || (windows_only && cache.sliding_window == 0)) continue;
        const auto add = [&](int64_t dim, int64_t num_heads) {
            if (dim > 0) bytes += num_heads * (dim * size_bytes(dtype) + scale_bytes);
        };
        add(cache.first_dim(), cache.num_kv_heads);
        add(cache.second_dim(), cache.num_kv_heads);
        add(cache.index_dim, 1);
    }
    return bytes;
}

}  // namespace infinilm
