// A gated short convolution, which keeps its last inputs as the state of a sequence. See ShortConvSpec.
#pragma once

#include "model/sublayers/mixer.h"

namespace infinilm {

class ShortConv {
public:
    static constexpr Site site = sites::o_proj;  // of what it gives

    ShortConv(const ModelSpec& model, const ShortConvSpec& spec, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<Site> sites() const { return {sites::conv}; }  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // All up to what the last linear reads; then that.
    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    ShortConvSpec spec_;
    int64_t hidden_size_;
    Buffer in_;     // [num_tokens, 3 * channels]: the gate before the convolution, the one behind it, its input
    Buffer mixed_;  // [num_tokens, channels]: what the last linear reads

    LinearWeights in_proj_;      // [3 * channels, hidden_size]
    VectorWeights conv_weight_;  // [channels, 1, conv_size]; [conv_size, channels] once prepared
    LinearWeights out_proj_;     // [hidden_size, channels]
};

}  // namespace infinilm
