// A causal convolution and the gated delta rule, which keep a state of each sequence. See DeltaSpec.
#pragma once

#include "model/sublayers/mixer.h"

namespace infinilm {

class Delta {
public:
    static constexpr Site site = sites::o_proj;  // of what it gives

    Delta(const ModelSpec& model, const DeltaSpec& spec, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // All up to what the last linear reads; then that.
    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    void declare_apart(ParamTable& table, const DeltaSpec& model, const std::string& at);

    DeltaSpec spec_;
    int64_t hidden_size_;
    float eps_;
    Buffer in_;     // [num_tokens, padded_in_dim]: q, k and v, z, b, a
    Buffer conv_;   // [num_tokens, conv_dim]
    Buffer gates_;  // [num_tokens, 2 * num_v_heads] float32
    Buffer mixed_;  // [num_tokens, v_size]: what the last linear reads
    Buffer decay_;  // [num_tokens, num_decays]: with gate_rank, what decays are made of
    Buffer gate_;   // [num_tokens, v_size]: with gate_rank, z

    LinearWeights in_proj_;          // q, k and v together, z, b, a: [in_dim, hidden_size]
    LinearWeights decay_proj_;       // [num_decays, gate_rank]
    LinearWeights gate_proj_;        // [v_size, gate_rank]
    VectorWeights q_conv_, k_conv_;  // [k_size, 1, conv_size], with by_element
    VectorWeights conv_weight_;      // [conv_dim, 1, conv_size], or of v alone; [conv_size, conv_dim] once prepared
    VectorWeights decay_rate_, dt_bias_;  // [num_v_heads], [num_decays]; decay_rate is -e^A_log once prepared
    VectorWeights norm_;                  // [v_dim]
    LinearWeights out_proj_;              // [hidden_size, v_size]
};

}  // namespace infinilm
