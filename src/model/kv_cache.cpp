#include "model/kv_cache.h"

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
    const int64_t shape[] = {model.num_layers, spec.num_blocks, model.attention.num_kv_heads, spec.block_size,
                             model.attention.head_dim};
    k_ = backend.allocate(spec.dtype, shape);
    v_ = backend.allocate(spec.dtype, shape);
    if (spec.dtype == DType::int8) {
        k_scales_ = backend.allocate(DType::float32, std::span(shape).first(4));
        v_scales_ = backend.allocate(DType::float32, std::span(shape).first(4));
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

int64_t KvCache::workspace_bytes(const ModelSpec& model, int64_t num_tokens) {
    return model.dtype == DType::float32 ? 0 : attention_workspace_bytes(heads_of(model.attention), num_tokens);
}

int64_t KvCache::bytes_per_token(const ModelSpec& model, DType dtype) {
    const int64_t scale_bytes = dtype == DType::int8 ? size_bytes(DType::float32) : 0;  // of each head
    return 2 * model.num_layers * (model.kv_dim() * size_bytes(dtype) + model.attention.num_kv_heads * scale_bytes);
}

}  // namespace infinilm
