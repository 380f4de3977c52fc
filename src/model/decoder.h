// The one forward pass, shared by every family and device. Owned by a rank worker; not thread-safe.
//
// Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a rank has some heads and some columns
// of the MLP, of whose results o_proj and down_proj give partial sums; these are added up over the ranks, and so are
// the parts of the embedding. The residual stream and its norms are the same on every rank. With one rank nothing is
// exchanged, and the residual and the norms belong to the linears.
#pragma once

#include "dist/communicator.h"
#include "model/batch.h"
#include "model/buffers.h"
#include "model/kv_cache.h"
#include "model/logits.h"
#include "model/params.h"
#include "model/spec.h"
#include "model/taps.h"

namespace infinilm {

class Decoder {
public:
    // spec: of the rank, see local_spec.
    Decoder(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, Communicator& communicator);
    // The logits of the rows that are wanted, as Logits::compute gives them; absent if there are none. Everything is on
    // the backend's device. StepAborted: see batch.abort, which is asked before each half of a layer and before the
    // logits.
    template <class Tap>  // NoTap or HookTap
    Tensor forward(const Batch& batch, const KvCache& cache, const Tap& tap);
    // Of what forward() was last called with, and what it gave; batch.allowed, if there, is on the device now.
    // StepAborted: the last piece of a step that an abort may leave out.
    Tensor sample(const Batch& batch, const Tensor& logits);

    // What is kept for steps of up to num_tokens tokens, without hooks and besides logits.
    static int64_t workspace_bytes(const ModelSpec& spec, DType activation, int64_t num_tokens);

private:
    // Activations of one step. Kept between steps and grown when a step has more tokens than any before.
    struct Workspace {
        int64_t capacity = 0;    // tokens
        Tensor x, normed, last;  // [num_tokens, hidden_size]: the residual stream, its norm, its rows for logits
        Tensor qkv;              // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        Tensor attn;             // [num_tokens, num_heads * head_dim]
        Tensor inner;            // [num_tokens, intermediate_size]
        Tensor cos_sin;          // [num_tokens, rotary_dim] float32
    };
    static std::vector<BufferShape<Workspace>> workspace_shapes(const ModelSpec& spec, DType activation);
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
    int num_ranks() const { return communicator_.size(); }
    void reserve_taps(int64_t num_tokens);
    Activations activations(int64_t num_tokens) const;
    void attend(int layer, const Activations& a, const Batch& batch, const KvCache& cache);
    void run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache);
    // The same op by op, with taps between: the same bits.
    void run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache, const HookTap& tap);
    RopeStoreParams rope_store(int layer, const Activations& a, const Batch& batch, const KvCache& cache) const;
    void embed(const Batch& batch, const TensorView& x);
    // Where sums are enqueued, the threads of all ranks meet before the first one of a step, and every few layers: then
    // none is ahead by more than a stream takes, which would block it in the driver (NVIDIA/nccl#613).
    void keep_together();
    // Of a value that is the same on every rank: the hooks, after which all have what rank 0 has.
    void tap_common(const HookTap& tap, Site site, int layer, const TensorView& view, const Tensor& parent);

    const ModelSpec& spec_;
    const ModelWeights& weights_;
    Backend& backend_;
    Communicator& communicator_;
    Tensor inv_freq_;  // [rotary_dim / 2] float32
    Workspace work_;
    TapWorkspace taps_;
    Logits logits_;
};

}  // namespace infinilm
