// A causal convolution and the state space of Mamba-2, which keep a state of each sequence. See MambaSpec.
#pragma once

#include "model/sublayers/mixer.h"

namespace infinilm {

class Mamba {
public:
    static constexpr Site site = sites::out_proj;  // of what it gives

    Mamba(const ModelSpec& model, const MambaSpec& spec, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // All up to what the last linear reads; then that.
    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    template <class Tap>
    void gate_and_norm(const Step<Tap>& s, const TensorView& gate, const TensorView& scanned) const;

    MambaSpec spec_;
    int64_t hidden_size_;
    float eps_;
    bool norm_of_all_ranks_ = false;  // the norm of the model's only group: each rank has some of its heads
    Buffer in_;                       // [num_tokens, padded_in_dim]: the gate, x, B, C, dt
    Buffer conv_;                     // [num_tokens, conv_dim]
    Buffer gates_;                    // [num_tokens, 2 * num_heads] float32
    Buffer scanned_;                  // [num_tokens, size]: what the last linear reads
    Buffer mean_square_;              // [num_tokens, 1] float32, of a norm whose heads are divided among ranks

    LinearWeights in_proj_;  // [in_dim, hidden_size]
    VectorWeights conv_weight_,
        conv_bias_;  // [conv_dim, 1, conv_size], once prepared [conv_size, conv_dim]; [conv_dim]
    VectorWeights decay_rate_, dt_bias_, skip_;  // [num_heads]; decay_rate is -e^A_log once prepared
    VectorWeights norm_;                         // [size]
    LinearWeights out_proj_;                     // [hidden_size, size]
};

}  // namespace infinilm
