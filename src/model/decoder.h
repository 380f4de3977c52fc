// The one forward pass, shared by every family and device. Owned by a rank worker; not thread-safe.
//
// Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a rank has some heads and some columns
// of the MLP, of whose results o_proj and down_proj give partial sums; these are added up over the ranks, and so are
// the parts of the embedding. The residual stream and its norms are the same on every rank. With one rank nothing is
// exchanged, and the residual and the norms belong to the linears.
#pragma once

#include <optional>

#include "dist/communicator.h"
#include "dist/stage_link.h"
#include "model/batch.h"
#include "model/buffers.h"
#include "model/kv_cache.h"
#include "model/logits.h"
#include "model/lora.h"
#include "model/params.h"
#include "model/spec.h"
#include "model/taps.h"

namespace infinilm {

// For steps whose linears are apart, since something happens between them: adapters add to what they give, and then
// hooks see it. Either may be absent.
struct StepTap {
    static constexpr bool active = true;
    const LoraStep* lora = nullptr;
    const HookTap* hooks = nullptr;
};

class Decoder {
public:
    // spec: of the rank, see local_spec. stages: of a rank that has not all layers.
    Decoder(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, Communicator& communicator,
            StageLink* stages = nullptr);
    // The logits of the rows that are wanted, as Logits::compute gives them; absent if there are none, or another stage
    // has them. Everything is on the backend's device. StepAborted: see batch.abort, which is asked before each half of
    // a layer and before the logits; or the stage before has stopped.
    template <class Tap>  // NoTap or StepTap
    Tensor forward(const Batch& batch, const KvCache& cache, const Tap& tap);
    // Of what forward() was last called with, and what it gave; batch.allowed, if there, is on the device now.
    // StepAborted: the last piece of a step that an abort may leave out.
    Tensor sample(const Batch& batch, const Tensor& logits);

    // What is kept for steps of up to num_tokens tokens, without hooks and besides logits. most_rank: of adapters; 0:
    // there are none.
    static int64_t workspace_bytes(const ModelSpec& spec, DType activation, int64_t num_tokens, int64_t most_rank = 0);

private:
    // Activations of one step. Kept between steps and grown when a step has more tokens than any before.
    struct Workspace {
        int64_t capacity = 0;    // tokens
        Tensor x, normed, last;  // [num_tokens, hidden_size]: the residual stream, its norm, its rows for logits
        Tensor qkv;              // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], of the widest layer
        Tensor attn;             // [num_tokens, mixed_dim], the same: what o_proj reads
        Tensor gated;            // [num_tokens, 2 * num_heads * head_dim], the same: gate, then what attention gives
        Tensor q_latent;         // [num_tokens, q_rank] of LatentSpec
        Tensor queries;          // [num_tokens, num_heads * query_dim] of it
        Tensor latents;          // [num_tokens, num_heads * kv_rank] of it: what attention gives
        Tensor delta_in;         // [num_tokens, in_dim] of DeltaSpec
        Tensor conv;             // [num_tokens, conv_dim]
        Tensor delta_gates;      // [num_tokens, 2 * num_v_heads] float32
        Tensor mean_squares;     // [2 * num_tokens, 1] float32: of q and of k over all heads, where these are normed
        Tensor inner;            // [num_tokens, intermediate_size] of the MLP, or of the expert of all tokens
        // Of layers with experts:
        Tensor router_logits;   // [num_tokens, num_experts rounded up to 8] float32
        Tensor expert_ids;      // [num_tokens, top_k] int32
        Tensor expert_weights;  // [num_tokens, top_k] float32
        Tensor expert_inner;    // [num_tokens * top_k, intermediate_size] of an expert
        Tensor expert_parts;    // [num_tokens * top_k, hidden_size]
        Tensor expert_lists;    // [num_tokens * top_k, expert_list_ints] int32
        Tensor shared;          // [num_tokens, hidden_size]: of the expert of all tokens, or of experts beside an MLP
        Tensor shared_gate;     // [num_tokens, 8] float32, of which the first column is it
        // Of models with vectors of each layer:
        Tensor per_layer;            // [num_tokens, num_layers, per_layer_size]: these, of all layers
        Tensor per_layer_projected;  // the same: of them, what comes from the embedding
        Tensor per_layer_gate;       // [num_tokens, per_layer_size]
        Tensor cos_sin;              // [num_tokens, sum of the ropes' rotary_dim] float32, see cos_sin()
    };
    static std::vector<BufferShape<Workspace>> workspace_shapes(const ModelSpec& spec, DType activation);
    // What only a forward pass with hooks or adapters needs.
    struct TapWorkspace {
        int64_t capacity = 0;  // tokens
        Tensor branch;         // [num_tokens, hidden_size]: o_proj or down_proj before the residual is added
        Tensor gate_up;        // [num_tokens, 2 * intermediate_size], of the widest MLP
    };
    static std::vector<BufferShape<TapWorkspace>> tap_shapes(const ModelSpec& spec, DType activation);
    // What only one with adapters needs. See LoraParams.
    struct LoraWorkspace {
        int64_t capacity = 0;  // rows that adapters change
        Tensor inner;          // [rows, most_rank]
        Tensor delta;          // [rows, out_features of the widest linear]
    };
    static std::vector<BufferShape<LoraWorkspace>> lora_shapes(const ModelSpec& spec, DType activation,
                                                               int64_t most_rank);
    // The activations of one step: the first rows of the workspace.
    struct Activations {
        TensorView x, normed;
    };
    struct Step {
        Activations a;
        const Batch& batch;
        const KvCache& cache;
    };
    // What a sublayer begins with, and the norm that is left to its first linear.
    struct Input {
        TensorView x;
        NormPrologue norm;
    };
    // What a sublayer ends with.
    struct Branch {
        const VectorWeights& post_norm;   // of its result, if the model has it
        TensorView next_norm;             // that the next sublayer begins with, if it begins with one
        std::optional<Site> branch_site;  // of its result
        Site norm_site, sum_site;
        bool is_whole = false;  // its result is not a rank's part of a sum
        float scale = 1;        // of the residual stream it leaves
    };
    int num_ranks() const { return communicator_.size(); }
    // Whether a sublayer ends with the norm of the next. Else the sum is part of its last linear, the norm of the next
    // one's first.
    bool normed_ahead() const {
        return num_ranks() > 1 || spec_.post_norms || spec_.residual_multiplier != 1 || spec_.parallel_blocks;
    }
    void reserve_lora(const LoraStep& step);
    // What the adapters of the step, if it has any, add to what a linear gave of x: [num_tokens, all its outputs].
    // head: which of a linear of each head, x and out being its.
    template <class Tap>
    void add_lora(const Tap& tap, const LinearWeights& weights, const TensorView& x, const TensorView& out,
                  size_t head = 0);
    // A linear, with what adapters add to it. With a tap its norm comes first, so that they read what it reads.
    template <class Tap>
    void linear(const Tap& tap, const LinearWeights& weights, TensorView x, const TensorView& out,
                NormPrologue norm = {}, const TensorView& residual = {});
    // The same of each head: x [num_tokens, num_heads, in_features], out [num_tokens, num_heads, out_features].
    template <class Tap>
    void head_linear(const Tap& tap, const LinearWeights& weights, const TensorView& x, const TensorView& out);
    Activations activations(int64_t num_tokens) const;
    // The first rows of a buffer, as wide as a layer needs.
    static TensorView part(const Tensor& buffer, const Step& s, int64_t columns);
    TensorView qkv(const Step& s, int layer) const;          // [num_tokens, qkv_dim]
    TensorView attn(const Step& s, int layer) const;         // [num_tokens, mixed_dim]: what o_proj reads
    TensorView gated(const Step& s, int layer) const;        // [num_tokens, 2 * q_dim]
    TensorView inner(const Step& s, int layer) const;        // [num_tokens, intermediate_size] of its MLP
    TensorView cos_sin(int64_t num_tokens, int rope) const;  // [num_tokens, rotary_dim] of one of the ropes
    RopeStoreParams rope_store(const Step& s, int layer) const;
    void embed(const TensorView& ids, const LinearWeights& table, int64_t vocab_size, float multiplier,
               const TensorView& out);
    // The vectors that a token has for each layer: (row of a table of its own + norm of a linear of its embedding) /
    // 2^.5.
    template <class Tap>
    void embed_layers(const Step& s, const Tap& tap);
    // Where sums are enqueued, the threads of all ranks meet before the first one of a step, and every few layers: then
    // none is ahead by more than a stream takes, which would block it in the driver (NVIDIA/nccl#613).
    void keep_together();
    template <class Tap>
    void run_layer(const Step& s, const Tap& tap, int layer);
    template <class Tap>
    Input normed_input(const Step& s, const Tap& tap, int layer, const VectorWeights& norm, Site site);
    template <class Tap>
    void project_qkv(const Step& s, const Tap& tap, int layer);
    // RMSNorm over all heads of q, and of k: those of all ranks.
    void norm_all_heads(const Step& s, int layer);
    template <class Tap>
    void project_latent(const Step& s, const Tap& tap, int layer);
    template <class Tap>
    void attend(const Step& s, const Tap& tap, int layer);
    template <class Tap>
    void run_delta_rule(const Step& s, const Tap& tap, int layer);
    template <class Tap>
    Input mlp_input(const Step& s, const Tap& tap, int layer);
    // Of the MLP, or of the expert of all tokens, which has no hooks.
    template <class Tap>
    void project_gate_up(const Step& s, const Tap& tap, int layer, const Input& in, const TensorView& inner);
    // Once choose_experts has normed it.
    TensorView expert_input(const Step& s) const { return spec_.pre_norms ? s.a.normed : s.a.x; }
    template <class Tap>
    void choose_experts(const Step& s, const Tap& tap, int layer);
    template <class Tap>
    void run_experts(const Step& s, const Tap& tap, int layer, const TensorView& residual, const TensorView& out);
    // Of a layer that has both: out is norm(what the MLP gives) + norm(what the experts give), whole on every rank.
    template <class Tap>
    void run_mlp_and_experts(const Step& s, const Tap& tap, int layer, const TensorView& out);
    // The third sublayer of models with vectors of each layer: projection(activation(gate(x)) * the token's own).
    template <class Tap>
    void read_own_vector(const Step& s, const Tap& tap, int layer, const TensorView& out);
    template <class Tap, class Project>
    void add_branch(const Step& s, const Tap& tap, int layer, const Branch& branch, Project project);
    // The hooks of a value that is a rank's own. parent: the rows of `owner` that `view` is a part of.
    template <class Tap>
    void tap_own(const Tap& tap, Site site, int layer, const TensorView& view, const TensorView& parent,
                 const Tensor& owner);
    // The hooks of a value that is the same on every rank, after which all have what rank 0 has.
    template <class Tap>
    void tap_common(const Tap& tap, Site site, int layer, const TensorView& view, const Tensor& parent);

    const ModelSpec& spec_;
    const ModelWeights& weights_;
    Backend& backend_;
    Communicator& communicator_;
    StageLink* const stages_;       // null: all layers are here
    std::vector<Tensor> inv_freq_;  // of each rope: [rotary_dim / 2] float32
    Workspace work_;
    TapWorkspace taps_;
    LoraWorkspace lora_;
    Logits logits_;
};

template <class Tap>
void Decoder::tap_own(const Tap& tap, Site site, int layer, const TensorView& view, const TensorView& parent,
                      const Tensor& owner) {
    if constexpr (Tap::active)
        if (tap.hooks) (*tap.hooks)(backend_, site, layer, view, Tensor(parent, owner.owner));
}

template <class Tap>
void Decoder::tap_common(const Tap& tap, Site site, int layer, const TensorView& view, const Tensor& parent) {
    if constexpr (Tap::active) {
        if (!tap.hooks) return;
        (*tap.hooks)(backend_, site, layer, view, parent);
        if (num_ranks() > 1 && tap.hooks->wanted_anywhere(site, layer)) communicator_.broadcast(parent, 0);
    }
}

}  // namespace infinilm
