// The one forward pass, shared by every family and device. Owned by a rank worker; not thread-safe.
//
// Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a rank has some heads and some columns
// of the MLP, of whose results o_proj and down_proj give partial sums; these are added up over the ranks, and so are
// the parts of the embedding. The residual stream and its norms are the same on every rank. With one rank nothing is
// exchanged, and the residual and the norms belong to the linears.
#pragma once

#include "dist/stage_link.h"
#include "model/logits.h"
#include "model/model.h"

namespace infinilm {

class Decoder {
public:
    // stages: of a rank that has not all layers.
    Decoder(const Model& model, Backend& backend, Communicator& communicator, StageLink* stages = nullptr);
    // The ends of a step of a stage, where the host waits for another one; forward() lies between them. receive, but in
    // the first stage: the residual stream as the layers before have left it. False: the stage before stopped. send,
    // but in the last stage: what forward() has made of it. tapped: forward() gets a StepTap.
    bool receive(const Batch& batch, bool tapped);
    void send(const Batch& batch);
    // The logits of the rows that are wanted, as Logits::compute gives them, or without an lm_head what the last norm
    // makes of these rows, [num_rows, hidden_size] activation; absent if there are none, or another stage has them. A
    // tower gives its rows instead, see Tower::result. Everything is on the backend's device. StepAborted: see
    // batch.abort, which is asked before each half of a layer and before the logits.
    template <class Tap>  // NoTap or StepTap
    Tensor forward(const Batch& batch, const KvCache& cache, const Tap& tap);
    // A step of the MTP head, which goes on from the hidden states of the step before: see Batch::hidden_rows. The
    // logits of the rows that are wanted, as forward() gives them. See stores_alone() for a step that wants none.
    Tensor draft(const Batch& batch, const KvCache& cache);
    // Samples from the logits that forward() or draft() gave for this batch; batch.allowed, if there, is on the device
    // now. StepAborted: the step was aborted; sampling is the last piece of it that an abort may leave out.
    Tensor sample(const Batch& batch, const Tensor& logits);

    // What is kept for steps of up to num_tokens tokens, without hooks and besides logits. most_rank: of adapters; 0:
    // there are none.
    static int64_t workspace_bytes(const Model& model, DType activation, int64_t num_tokens, int64_t most_rank = 0);

private:
    void reserve_lora(const LoraStep& step);
    Buffers& reserve(const Batch& batch, bool tapped);  // with room for the step
    template <class Tap>
    Step<Tap> make_step(const Batch& batch, const KvCache& cache, const Tap& tap, const Stream& stream);
    std::vector<TensorView> make_ropes(const Batch& batch);  // cosines and sines of the step: see Step::ropes
    TensorView norm_behind(int layer) const;  // of what the layer leaves: the first norm of the next one, or the last
    template <class Tap>
    Input input_of(const Step<Tap>& s, const Layer& layer, const Sublayer& own) const;
    template <class Tap>
    void run_layer(const Step<Tap>& s) const;
    // Computes the keys and values of a layer and no more; false: its mixer has none.
    bool store_keys(const Step<NoTap>& s) const;
    template <class Tap>
    Tensor compute_logits(const Step<Tap>& s, const LmHead& head);  // of the residual stream

    Tensor hidden_states(const TensorView& last, const VectorWeights& final_norm) const;  // of a model without lm_head

    const Model& model_;
    const ModelSpec& spec_;
    Backend& backend_;
    Communicator& communicator_;
    StageLink* const stages_;       // null: all layers are here
    std::vector<Tensor> inv_freq_;  // of each rope: [rotary_dim / 2] float32
    std::vector<Tensor> axes_;      // of each rope: [rotary_dim / 2] int32; or absent
    Buffers buffers_;               // kept between steps, and grown when a step has more tokens than any before
    Buffers lora_buffers_;
    LoraPlan lora_plan_;
    int64_t most_rank_ = 0;  // of lora_plan_
    Logits logits_;
};

}  // namespace infinilm
