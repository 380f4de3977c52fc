// An MTP head (multi-token prediction), which drafts: a layer behind the model that reads, at position i, the hidden
// state that the model has there and the embedding of token i + 1, and says what token i + 2 may be. Both are normed,
// joined, embedding first, and projected to the residual stream of the layer, which has keys and values of its own at
// the same positions. Behind its norm comes the lm_head of the model, or one of its own: these weights are most of what
// a draft reads, and a draft needs neither all of their bits nor rare tokens. A chain of drafts takes the head's own
// normed output as the next hidden state. DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, 2.2; the order
// of the two and what is normed are those of the published checkpoints.
#pragma once

#include "model/buffers.h"
#include "model/step.h"
#include "model/table.h"

namespace infinilm {

class MtpHead {
public:
    MtpHead(const ModelSpec& spec, BufferPlan& plan);
    void declare(ParamTable& table);  // within its layer
    LinearCall call() const;
    // What the layer begins with: s.x of the hidden states that Batch::hidden_rows names. table: of the model.
    void begin(const Step<NoTap>& s, const LinearWeights& embed_tokens) const;
    // Keeps the hidden states of all tokens for the next step of the head. norm: that of the model, or of the head.
    template <class Tap>
    void keep(const Step<Tap>& s, const VectorWeights& norm) const;

    VectorWeights norm;     // [hidden_size], behind its layer
    LinearWeights lm_head;  // [rows of the rank, hidden_size], if it has one of its own: see MtpSpec

private:
    const int64_t hidden_size_, vocab_size_;
    const float eps_, embedding_multiplier_;
    Buffer hidden_;                // [num_tokens, hidden_size], from step to step
    Buffer joined_;                // [num_tokens, 2 * hidden_size]
    VectorWeights enorm_, hnorm_;  // [hidden_size]: of the embedding and of the hidden state
    LinearWeights eh_proj_;        // [hidden_size, 2 * hidden_size]
};

}  // namespace infinilm
