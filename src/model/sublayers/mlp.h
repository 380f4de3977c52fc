// down(activation(gate) * up), or down(activation(up)). See MlpSpec.
#pragma once

#include "model/step.h"
#include "model/table.h"

namespace infinilm {

namespace sites {
inline constexpr Site gate_proj{"gate_proj"}, up_proj{"up_proj"};  // [num_tokens, intermediate_size]
inline constexpr Site activation{"activation"};  // [num_tokens, intermediate_size]: what down_proj reads
inline constexpr Site down_proj{"down_proj"};    // [num_tokens, hidden_size], before the residual is added
}  // namespace sites

class Mlp {
public:
    static constexpr Site site = sites::down_proj;  // of what it gives

    // hooked: whether it has sites. is_shared: layers add to its first linear, which applies no activation then.
    Mlp(const ModelSpec& model, const MlpSpec& spec, BufferPlan& plan, bool hooked = true, bool is_shared = false);
    // at: begins the names of its tensors. whole: of all ranks.
    void declare(ParamTable& table, const std::string& at, const MlpSpec& whole);
    void declare(ParamTable& table);  // that of a layer
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // All up to what down_proj reads; then that.
    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

    LinearWeights& gate_up_proj() { return gate_up_proj_; }

private:
    template <class Tap>
    void sparsify(const Step<Tap>& s, const TensorView& gate) const;

    int64_t hidden_size_, inner_size_;
    bool gated_, hooked_;
    Activation activation_;
    std::optional<float> gate_deviations_;
    float limit_;      // of clamped_silu
    float share_ = 1;  // the part of the gate's columns that the rank has
    bool clipped_;     // the outputs of linears, in front of the activation
    bool is_shared_;
    bool joined_;     // the linear of gate and up applies the activation, but for hooks and adapters
    Buffer inner_;    // [num_tokens, intermediate_size]
    Buffer gate_up_;  // [num_tokens, 2 * intermediate_size], with a tap or where they are not joined
    Buffer moments_;  // [2 * num_tokens, 1] float32: mean and variance of the gate, where only a part of it is left

    LinearWeights gate_up_proj_;               // gate, up, or up alone: each [intermediate_size, hidden_size]
    LinearWeights down_proj_;                  // [hidden_size, intermediate_size]
    VectorWeights alpha_p_own_, alpha_n_own_;  // [1] each, of xielu, from which the host makes these:
    float alpha_p_ = 0, alpha_n_ = 0;
};

// Writes the rows of the two linears of an MLP or an expert. size: of what it reads and gives; 0: hidden_size.
void declare_mlp(ParamTable& table, LinearWeights& gate_up, LinearWeights& down, const std::string& at,
                 const MlpSpec& whole, bool is_expert = false, int64_t size = 0, bool on_host = false);

}  // namespace infinilm
