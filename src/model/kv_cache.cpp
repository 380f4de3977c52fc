#include "model/kv_cache.h"

#include <algorithm>
#include <array>

namespace infinilm {

namespace {
constexpr int64_t large_layer = 16 << 20;  // bytes
constexpr int64_t small_block = 256;       // tokens
}  // namespace

KvCache::KvCache(Backend& backend, const ModelSpec& model, const KvCacheSpec& spec) : spec_(spec) {
    if (spec.num_blocks < 1 || spec.block_size < 1)
        throw ConfigError(concat("a KV cache needs at least one block of one token, got ", spec.num_blocks,
                                 " blocks of ", spec.block_size));
    if (!is_floating(spec.dtype) && spec.dtype != DType::int8)
        throw ConfigError(concat("the KV cache can be float32, bfloat16, float16 or int8, got ", name(spec.dtype)));
    if (backend.device().kind == DeviceKind::cuda && spec.dtype != model.dtype)
        throw ConfigError(concat("on a GPU the KV cache has the dtype that the engine computes in, ", name(model.dtype),
                                 "; got ", name(spec.dtype)));
    int64_t elements = 0, heads = 0;  // of a token
    for (int layer = 0; layer < model.num_layers; ++layer) {
        const AttentionSpec attention = model.attention_of(layer);
        places_.push_back({attention.num_kv_heads, attention.head_dim, elements, heads});
        elements += attention.kv_dim();
        heads += attention.num_kv_heads;
    }
    k_ = backend.allocate(spec.dtype, std::array{spec.num_blocks, spec.block_size, elements});
    v_ = backend.allocate(spec.dtype, std::array{spec.num_blocks, spec.block_size, elements});
    if (spec.dtype == DType::int8) {
        k_scales_ = backend.allocate(DType::float32, std::array{spec.num_blocks, spec.block_size, heads});
        v_scales_ = backend.allocate(DType::float32, std::array{spec.num_blocks, spec.block_size, heads});
    }
    if (backend.device().kind == DeviceKind::cuda)
        workspace_ =
            backend.allocate(DType::uint8, std::array{workspace_bytes(model, spec.num_blocks * spec.block_size)});
    // Attention jumps from block to block, and small pages make each jump a walk of page tables. Where a layer is small
    // or rows are long, whole large pages would be taken for a few tokens.
    const bool dense = k_.bytes() / model.num_layers >= large_layer && spec.block_size <= small_block;
    if (dense && k_.device().kind == DeviceKind::cpu) {
        prefer_huge_pages(k_);
        prefer_huge_pages(v_);
    }
}

TensorView KvCache::rows(const Tensor& all, int layer) const {
    const Place& place = places_[static_cast<size_t>(layer)];
    const int64_t shape[] = {spec_.num_blocks, place.num_kv_heads, spec_.block_size, place.head_dim};
    const int64_t offset = spec_.num_blocks * spec_.block_size * place.elements_before;
    return {all.as<std::byte>() + offset * size_bytes(spec_.dtype), spec_.dtype, shape, all.device()};
}

TensorView KvCache::scales(const Tensor& all, int layer) const {
    if (!all) return {};
    const Place& place = places_[static_cast<size_t>(layer)];
    const int64_t shape[] = {spec_.num_blocks, place.num_kv_heads, spec_.block_size};
    return {all.as<float>() + spec_.num_blocks * spec_.block_size * place.heads_before, DType::float32, shape,
            all.device()};
}

int64_t KvCache::workspace_bytes(const ModelSpec& model, int64_t num_tokens) {
    if (model.dtype == DType::float32) return 0;
    int64_t most = 0;
    for (int layer = 0; layer < model.num_layers; ++layer)
        most = std::max(most, attention_workspace_bytes(heads_of(model.attention_of(layer)), num_tokens));
    return most;
}

int64_t KvCache::bytes_per_token(const ModelSpec& model, DType dtype) {
    const int64_t scale_bytes = dtype == DType::int8 ? size_bytes(DType::float32) : 0;  // of each head
    int64_t bytes = 0;
    for (int layer = 0; layer < model.num_layers; ++layer) {
        const AttentionSpec attention = model.attention_of(layer);
        bytes += 2 * (attention.kv_dim() * size_bytes(dtype) + attention.num_kv_heads * scale_bytes);
    }
    return bytes;
}

}  // namespace infinilm
