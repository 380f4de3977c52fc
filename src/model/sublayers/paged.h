// What Attention and Latent share: rows of a paged cache, which a step writes and all heads read.
#pragma once

#include <optional>

#include "model/sublayers/mixer.h"

namespace infinilm {

namespace sites {
inline constexpr Site q_proj{"q_proj"}, k_proj{"k_proj"};  // [num_tokens, num_heads or num_kv_heads, head_dim]
inline constexpr Site q_rope{"q_rope"}, k_rope{"k_rope"};  // the same after RoPE
}  // namespace sites

// A layer that reads a paged cache. Sizes are those of the rank.
struct PagedLayer {
    CacheSpec cache;
    float softmax_scale = 0, score_cap = 0;
    int rope = -1, q_rope = -1;  // see AttentionSpec
    float eps = 0;               // of the norms of heads
};

// Norms of heads, RoPE and the cache of a layer; norms are left to the caller. qkv: [num_tokens, qkv_dim].
template <class Tap>
RopeStoreParams rope_store(const Step<Tap>& s, const PagedLayer& layer, const TensorView& qkv);

// Attention of the queries in qkv, [num_tokens, qkv_dim], over what the cache has. out: [num_tokens, num_heads,
// value_dim]. slots: those of the rows that each token reads, see ChooseKeysParams, for heads of queries that read this
// head of keys alone; absent: all heads read all that a token sees. store: what is still to be done of qkv before.
template <class Tap>
void attend(const Step<Tap>& s, const PagedLayer& layer, const TensorView& qkv, const TensorView& sinks,
            const TensorView& out, const TensorView& slots = {}, int kv_head = 0,
            const std::optional<RopeStoreParams>& store = {});

// [num_tokens, count, size] of rows that have `stride` elements of each head: `size` of them, from `begin` on.
TensorView of_heads(const TensorView& rows, int64_t count, int64_t stride, int64_t begin, int64_t size);

}  // namespace infinilm
