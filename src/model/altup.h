// Alternating updates (AltUp) of several residual streams, as in Gemma 3n (Baykal et al., "Alternating Updates for
// Efficient Transformers", arXiv:2301.13310). The active stream is that of the sublayers, Step::x. The others lie in a
// buffer beside it, with a copy of what was predicted of the active one, which the correction compares with what the
// sublayers have made of it.
#pragma once

#include "model/step.h"
#include "model/table.h"

namespace infinilm {

namespace sites {
inline constexpr Site altup_prediction{"altup_prediction"};  // [num_tokens, hidden_size]: of the active stream
}  // namespace sites

// What a model has of them before its first layer and behind its last one.
class AltUp {
public:
    AltUp(const ModelSpec& model, BufferPlan& plan);
    static Buffer streams(const ModelSpec& model, BufferPlan& plan);  // [num_streams * num_tokens, hidden_size]
    void declare(ParamTable& table);
    std::vector<LinearCall> calls() const;

    // Makes the other streams of the embedding, which is in s.x. Each is as large as that, by its mean square.
    template <class Tap>
    void split(const Step<Tap>& s) const;
    // Makes s.x the mean of all streams, of which the others are projected, and then as large as the active one.
    template <class Tap>
    void join(const Step<Tap>& s) const;

private:
    int64_t hidden_size_, num_streams_;
    Buffer streams_;
    std::vector<LinearWeights> projections_, unembed_projections_;  // [num_streams - 1]: [hidden_size, hidden_size]
};

// What each layer has of them.
class AltUpLayer {
public:
    AltUpLayer(const ModelSpec& model, BufferPlan& plan);
    void declare(ParamTable& table);

    // Before the first sublayer. s.x becomes what is predicted of it.
    template <class Tap>
    void predict(const Step<Tap>& s) const;
    // Behind the last sublayer that adds to s.x, which becomes the corrected stream. Returns that times a vector, as
    // the sublayer reads it whose result joins the other streams.
    template <class Tap>
    TensorView correct(const Step<Tap>& s) const;
    // [num_streams - 1, num_tokens, hidden_size]
    template <class Tap>
    TensorView others(const Step<Tap>& s) const;

private:
    template <class Tap>
    TensorView all(const Step<Tap>& s) const {  // [num_streams, num_tokens, hidden_size]
        return s.view(streams_).reshape({num_streams_, s.num_tokens(), hidden_size_});
    }

    int64_t hidden_size_, num_streams_;
    float eps_;
    Buffer streams_;
    VectorWeights router_norm_;       // [hidden_size]
    VectorWeights router_;            // [num_streams, hidden_size]; once prepared float32, times router_norm
    VectorWeights prediction_coefs_;  // [num_streams * num_streams, num_streams] float32 once prepared
    VectorWeights correction_coefs_;  // [num_streams, num_streams], the same
    VectorWeights output_scale_;      // [hidden_size], the same
};

}  // namespace infinilm
