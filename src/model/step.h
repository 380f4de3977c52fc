// One step on its way through the decoder: the things that every sublayer runs on, and linears with adapters and hooks.
// It knows no kind of sublayer.
#pragma once

#include <span>

#include "dist/communicator.h"
#include "model/batch.h"
#include "model/buffers.h"
#include "model/kv_cache.h"
#include "model/lora.h"
#include "model/taps.h"
#include "model/weights.h"

namespace infinilm {

// The tap of steps with adapters or hooks: every linear runs on its own. Adapters add to what it gives, and hooks see
// the sum. Either may be absent.
struct StepTap {
    static constexpr bool active = true;
    const LoraStep* lora = nullptr;
    const HookTap* hooks = nullptr;
};

// What a sublayer reads, and the norm that is left to its first linear, if there is one.
struct Input {
    TensorView x;  // [num_tokens, hidden_size]
    NormPrologue norm = {};
};

// A linear that a sublayer runs, or several at once, as the memory plan counts them.
struct LinearCall {
    int64_t in_features;    // of each
    int64_t out_features;   // of the widest tensor that it joins
    int64_t rows = 1;       // of each token
    int64_t count = 1;      // linears that run at once
    bool adaptable = true;  // see takes_adapter
};

template <class Tap>  // NoTap or StepTap
struct Step {
    Backend& backend;
    Communicator& ranks;
    const Tap& tap;
    const Batch& batch;
    const KvCache& cache;
    const Buffers& buffers;
    TensorView lora_inner, lora_delta;  // scratch of LoraParams, in steps with adapters
    TensorView clip_in, clip_out;       // [num_tokens, as much as any linear reads, and gives], where linears clip
    std::span<const TensorView> ropes;  // [num_tokens, rotary_dim] float32: cosines and sines of each rope
    TensorView position_bias;           // [num_heads, distances] float32, of all layers; or absent: see PositionBias
    Tensor x, normed;                   // [num_tokens, hidden_size]: the residual stream, and its norm
    int layer = -1;                     // that runs; -1: none

    int64_t num_tokens() const { return x.shape(0); }
    int num_ranks() const { return ranks.size(); }
    TensorView view(const Buffer& buffer) const { return buffers.view(buffer, num_tokens()); }
    Tensor tensor(const Buffer& buffer) const { return buffers.tensor(buffer, num_tokens()); }
    // The input of several ops: its norm, if it is left to do, is done here.
    TensorView whole(const Input& in) const;

    // A copy of rows, which may be parts of wider ones.
    void copy_rows(const TensorView& from, const TensorView& to) const;

    // A linear and its adapters. With a tap its norm is an op before both, so that adapters read the normed input, too.
    void linear(const LinearWeights& weights, const TensorView& x, const TensorView& out, const NormPrologue& norm = {},
                const TensorView& residual = {}) const;
    // The same of one that clips what it reads and what it gives: each of its tensors has bounds of its own.
    void clipped_linear(const LinearWeights& weights, const TensorView& x, const TensorView& out) const;
    // Adds to `out`, the result for `x` of a linear that several layers share, what the layer that runs has beside it.
    void add_low_rank(const LinearWeights& weights, const TensorView& x, const TensorView& out) const;
    // The same of each head: x [num_tokens, num_heads, in_features], out [num_tokens, num_heads, out_features].
    void head_linear(const LinearWeights& weights, const TensorView& x, const TensorView& out) const;
    // Adds to `out`, a linear's result for `x`, what the step's adapters give: [num_tokens, all its outputs].
    // head: where a linear has weights for each head, the head that x and out belong to.
    void add_lora(const LinearWeights& weights, const TensorView& x, const TensorView& out, size_t head = 0) const;
    // Embeds token ids: rows of a table of vocab_size rows, which ranks divide. known_ids: if not 0, ids from this
    // one on count as id 0.
    void embed(const TensorView& ids, const LinearWeights& table, int64_t vocab_size, float multiplier,
               const TensorView& out, int64_t known_ids = 0) const;
    // Where sums are enqueued, the threads of all ranks meet before the first one of a step, and every few layers: then
    // none is ahead by more than a stream takes, which would block it in the driver (NVIDIA/nccl#613).
    void keep_together() const;

    // Calls the hooks of a value that is a rank's own: a part of the buffer.
    void tap_own(Site site, const TensorView& view, const Buffer& buffer) const {
        if constexpr (Tap::active)
            if (tap.hooks) (*tap.hooks)(backend, site, layer, view, tensor(buffer));
    }
    // Calls the hooks of a value that is the same on every rank, and then gives all ranks that of rank 0. parent: the
    // rows that the value is a part of.
    void tap_common(Site site, const TensorView& view, const Tensor& parent) const;
    void tap_common(Site site, const TensorView& view, const Buffer& buffer) const {
        if constexpr (Tap::active) tap_common(site, view, tensor(buffer));
    }
};

template <class Tap>
void Step<Tap>::tap_common(Site site, const TensorView& view, const Tensor& parent) const {
    if constexpr (Tap::active) {
        if (!tap.hooks) return;
        (*tap.hooks)(backend, site, layer, view, parent);
        if (num_ranks() > 1 && tap.hooks->wanted_anywhere(site, layer)) ranks.broadcast(parent, 0);
    }
}

extern template struct Step<NoTap>;
extern template struct Step<StepTap>;

}  // namespace infinilm
