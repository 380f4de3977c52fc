// An MTP head (multi-token prediction), which drafts: a layer behind the model that reads, at position i, the hidden
// state that the model has there and the embedding of token i + 1, and says what token i + 2 may be. Both are normed
// and joined, embedding first. Behind its norm comes the lm_head of the model, or one of its own: these weights are
// most of what a draft reads, and a draft needs neither all of their bits nor rare tokens.
//
// A head of DeepSeek's kind reads the hidden state behind the last norm and projects what is joined to the residual
// stream of its layer. A chain of its drafts takes the head's own normed output as the next hidden state (DeepSeek-AI,
// "DeepSeek-V3 Technical Report", arXiv:2412.19437, 2.2; the order of the two and what is normed are those of the
// published checkpoints). The hidden state of an EAGLE-3 head is a projection of the residual stream at some layers,
// side by side, and the residual stream of the head begins with it. Its attention reads what is joined, and a chain
// takes the residual stream that the head leaves (Li et al., arXiv:2503.01840; vLLM's llama_eagle3.py).
//
// A head may be several modules that draft in turn, a token each: module m reads, at position i, what module m - 1 has
// left there and the embedding of token i + 1 + m, and says what token i + 2 + m may be. That of Step 3.5 reads
// residual streams, of the model and of the module before, which no norm has changed (step3p5_mtp.py of SGLang and of
// vLLM).
//
// A drafter such as Gemma 4's has layers of a width of its own. The embedding and the hidden state are projected to it
// as they are, and what the last norm leaves is projected back for a chain (modeling_gemma4_assistant.py of
// transformers). Its layers read keys and values of the model, so it need not see the text itself: a chain stays at one
// position.
#pragma once

#include "model/buffers.h"
#include "model/step.h"
#include "model/stream.h"
#include "model/table.h"

namespace infinilm {

class MtpHead {  // one module of it
public:
    MtpHead(const ModelSpec& spec, BufferPlan& plan);
    static Buffer joined(const ModelSpec& spec, BufferPlan& plan);  // [num_tokens, 2 * hidden_size]
    void declare(ParamTable& table);                                // within its last layer
    std::vector<LinearCall> calls() const;
    // What the layer begins with: s.x of the hidden states that Batch::hidden_rows names. table: of the model.
    void begin(const Step<NoTap>& s, const LinearWeights& embed_tokens) const;
    // Takes from the residual stream of the model, at the beginning of s.layer or behind the last, what the next step
    // of the head reads of it: of all tokens, and by the first module. norm: behind the last layer.
    template <class Tap>
    void read(const Step<Tap>& s, const VectorWeights& norm) const;
    void keep(const Step<NoTap>& s) const;  // the same of the head itself, behind its layers

    Stream stream;          // of its layers, [num_tokens, width]
    Buffer last;            // [num_rows, width]: see LmHead
    VectorWeights norm;     // [width], behind its layers
    LinearWeights lm_head;  // [rows of the rank, width], if it has one of its own: see MtpSpec

private:
    void keep_normed(Backend& backend, const TensorView& x, const VectorWeights& norm, const TensorView& hidden) const;
    void keep_stream(Backend& backend, const TensorView& x, const VectorWeights& norm, const TensorView& hidden) const;

    const int64_t hidden_size_, vocab_size_;
    const int64_t width_;      // of its layers
    const bool is_projected_;  // to that and back
    const int num_layers_;
    const float eps_, embedding_multiplier_;
    const std::vector<int> taps_;
    const bool norm_before_residual_, before_norm_;
    Buffer hidden_;  // [num_tokens, hidden_size], from step to step
    Buffer joined_;  // [num_tokens, 2 * hidden_size], or where it is projected [2 * num_tokens, hidden_size]
    VectorWeights enorm_, hnorm_;       // [hidden_size]: of the embedding and of the hidden state
    LinearWeights eh_proj_;             // [hidden_size, 2 * hidden_size], without taps
    std::vector<LinearWeights> fc_;     // [taps]: [hidden_size, hidden_size]
    LinearWeights pre_projections_[2];  // [width, hidden_size]: of the embedding and of the hidden state
    LinearWeights post_projection_;     // [hidden_size, width]
};

}  // namespace infinilm
