// The one forward pass, shared by every family and device. Owned by a rank worker; not thread-safe.
#pragma once

#include "cache/kv_cache.h"
#include "engine/batch.h"
#include "model/params.h"
#include "model/spec.h"
#include "model/taps.h"

namespace infinilm {

class Decoder {
public:
    Decoder(const ModelSpec& spec, const ModelWeights& weights, Backend& backend);
    // Everything is on the backend's device; ids are valid until the next step. Rows of logits are padded to a multiple
    // of 8, as kernels of GPUs want them: [num_rows, >= vocab_size].
    template <class Tap>  // NoTap or HookTap
    StepOutput forward(const Batch& batch, const KvCache& cache, const Tap& tap);

private:
    // Activations of one step. Kept between steps and grown when a step has more tokens than any before.
    struct Workspace {
        int64_t num_tokens = 0;
        Tensor x, normed, last;  // [num_tokens, hidden_size]: the residual stream, its norm, its rows for logits
        Tensor qkv;              // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        Tensor attn;             // [num_tokens, num_heads * head_dim]
        Tensor inner;            // [num_tokens, intermediate_size]
        Tensor cos_sin;          // [num_tokens, rotary_dim] float32
        Tensor ids;              // [num_tokens] int32, as many as are sampled
    };
    // What only a forward pass with hooks needs.
    struct TapWorkspace {
        int64_t num_tokens = 0;
        Tensor branch;    // [num_tokens, hidden_size]: o_proj or down_proj before the residual is added
        Tensor gate_up;   // [num_tokens, 2 * intermediate_size]
        Tensor identity;  // [num_tokens, rotary_dim] float32: cosines of one, sines of zero
        Tensor no_slots;  // [num_tokens] int64, all -1
    };
    // The activations of one step: the first rows of the workspace.
    struct Activations {
        TensorView x, normed, qkv, q, attn, inner, cos_sin;  // q: [num_tokens, num_heads, head_dim], a part of qkv
    };
    void reserve(int64_t num_tokens);
    void reserve_taps(int64_t num_tokens);
    Activations activations(int64_t num_tokens) const;
    void attend(int layer, const Activations& a, const Batch& batch, const KvCache& cache);
    void run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache);
    // The same op by op, the same bits, with taps between.
    void run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache, const HookTap& tap);
    RopeStoreParams rope_store(int layer, const Activations& a, const Batch& batch, const KvCache& cache) const;

    const ModelSpec& spec_;
    const ModelWeights& weights_;
    Backend& backend_;
    Tensor inv_freq_;  // [rotary_dim / 2] float32
    Workspace work_;
    TapWorkspace taps_;
    Tensor logits_;  // [num_rows, >= vocab_size] float32, kept while nobody asks for it
};

}  // namespace infinilm
