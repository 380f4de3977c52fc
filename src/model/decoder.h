// The one forward pass, shared by every family and device. Owned by a rank worker; not thread-safe.
//
// Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a rank has some heads and some columns
// of the MLP, of whose results o_proj and down_proj give partial sums; these are added up over the ranks, and so are
// the parts of the embedding. The residual stream and its norms are the same on every rank. With one rank nothing is
// exchanged, and the residual and the norms belong to the linears.
#pragma once

#include "cache/kv_cache.h"
#include "dist/communicator.h"
#include "engine/batch.h"
#include "model/params.h"
#include "model/spec.h"
#include "model/taps.h"

namespace infinilm {

class Decoder {
public:
    // spec: of the rank, see local_spec.
    Decoder(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, Communicator& communicator);
    // The logits of the rows that are wanted, of all ranks: [num_rows, >= vocab_size] float32, padded to a multiple of
    // 8, as kernels of GPUs want them; absent if there are none. Everything is on the backend's device, valid until
    // the next step, on the CPU longer with batch.return_logits. Absent too where several ranks need only the best of
    // them to sample. StepAborted: see batch.abort, which is asked before each half of a layer and before the logits.
    template <class Tap>  // NoTap or HookTap
    Tensor forward(const Batch& batch, const KvCache& cache, const Tap& tap);
    // Token ids of them, [num_rows] int32, valid until the next step; absent if the batch has no sampling parameters.
    // Every rank draws the same.
    Tensor sample(const Batch& batch, const Tensor& logits);

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
    // The parts of the logits, which only several ranks need. A rank's part of the vocabulary is a row of `part`.
    struct LogitsParts {
        int64_t num_rows = 0;
        Tensor own;  // [num_rows, part] float32
        Tensor all;  // [size * num_rows, part] float32: those of rank 0, then those of rank 1, ..
        // The best of each rank, as far as they are wanted: logits, by their bits, then ids. Memory for k =
        // max_candidates, so that other k take no more.
        Tensor best;      // [2 * num_rows, k] int32
        Tensor all_best;  // [size * 2 * num_rows, k] int32
        Tensor arranged;  // [2 * num_rows, size * k] int32
    };
    // What several ranks sample from where that is enough: the best of rank 0, then those of rank 1, ..
    struct Candidates {
        TensorView logits;  // [num_rows, size * k] float32
        TensorView ids;     // [num_rows, size * k] int32
    };
    int num_ranks() const { return communicator_.size(); }
    void reserve(int64_t num_tokens);
    void reserve_taps(int64_t num_tokens);
    Activations activations(int64_t num_tokens) const;
    void attend(int layer, const Activations& a, const Batch& batch, const KvCache& cache);
    void run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache);
    // The same op by op, with taps between: the same bits.
    void run_layer(int layer, const Activations& a, const Batch& batch, const KvCache& cache, const HookTap& tap);
    RopeStoreParams rope_store(int layer, const Activations& a, const Batch& batch, const KvCache& cache) const;
    void embed(const Batch& batch, const TensorView& x);
    // x: the rows of the residual stream; out: [num_rows, vocab_size], or the rank's part of it
    void lm_head(const TensorView& x, const NormPrologue& norm, const TensorView& out);
    // Of several ranks: the rank's part, [num_rows, vocab_part_]; the rest of its last columns is not written.
    TensorView own_logits(const TensorView& x, const NormPrologue& norm);
    // [num_rows, >= vocab_size] float32. What is returned on the CPU is nobody else's; elsewhere it is copied.
    Tensor logits_buffer(int64_t num_rows, bool returned);
    // all: [size * rows, columns], those of rank 0, then those of rank 1, ..; out: [rows, size * columns]
    void arrange(const TensorView& all, const TensorView& out);
    void gather_logits(const TensorView& own, const TensorView& out);  // out: [num_rows, >= vocab_size]
    bool candidates_decide(const Batch& batch) const;
    Candidates gather_candidates(const TensorView& own, int64_t k);
    // Of a value that is the same on every rank: the hooks, after which all have what rank 0 has.
    void tap_common(const HookTap& tap, Site site, int layer, const TensorView& view, const Tensor& parent);

    const ModelSpec& spec_;
    const ModelWeights& weights_;
    Backend& backend_;
    Communicator& communicator_;
    const Range vocab_;         // whose rows of embed_tokens and lm_head are here
    const int64_t vocab_part_;  // as many as a rank has at most, a multiple of 8
    Tensor inv_freq_;           // [rotary_dim / 2] float32
    Workspace work_;
    TapWorkspace taps_;
    Tensor logits_;  // [num_rows, >= vocab_size] float32, of as many rows as a step has had
    LogitsParts parts_;
    Candidates candidates_;  // of the last step; absent if it had logits
};

}  // namespace infinilm
