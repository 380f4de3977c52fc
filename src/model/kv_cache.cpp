#include "model/kv_cache.h"

namespace infinilm {

KvCache::KvCache(Backend& backend, const ModelSpec& model, const KvCacheSpec& spec) : spec_(spec) {
    if (spec.num_blocks < 1 || spec.block_size < 1)
        throw ConfigError(concat("a KV cache needs at least one block of one token, got ", spec.num_blocks,
                                 " blocks of ", spec.block_size));
    const int64_t shape[] = {model.num_layers, spec.num_blocks, model.attention.num_kv_heads, spec.block_size,
                             model.attention.head_dim};
    k_ = backend.allocate(model.dtype, shape);
    v_ = backend.allocate(model.dtype, shape);
}

int64_t KvCache::bytes_per_token(const ModelSpec& model) {
    return int64_t{2} * model.num_layers * model.kv_dim() * size_bytes(model.dtype);
}

}  // namespace infinilm
