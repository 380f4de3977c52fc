// A block of attention and an MLP that several layers share. See SharedBlockSpec.
#pragma once

#include <memory>

#include "model/sublayers/attention.h"
#include "model/sublayers/mlp.h"

namespace infinilm {

namespace sites {
inline constexpr Site block_norm{"block_norm"};          // [num_tokens, 2 * hidden_size]
inline constexpr Site block_mlp_norm{"block_mlp_norm"};  // [num_tokens, hidden_size]
inline constexpr Site block_sum{"block_sum"};            // the same: the residual stream with what the block adds
inline constexpr Site mixer_norm{"input_layernorm"};     // the same: what the mixer reads
}  // namespace sites

// The weights, which all layers that use the block have together.
struct SharedBlock {
    SharedBlock(const ModelSpec& model, const SharedBlockSpec& spec, BufferPlan& plan)
        : attention(model, spec.attention, plan), mlp(model, spec.mlp, plan, true, true) {}

    Attention attention;
    Mlp mlp;
    VectorWeights norm;      // [2 * hidden_size]
    VectorWeights mlp_norm;  // [hidden_size]
};

// One layer's use of a block. It makes what the layer's mixer reads, and adds nothing to the residual stream.
class SharedBlockUse {
public:
    static constexpr Site site = sites::mixer_norm;  // of what it gives
    static constexpr bool adds_nothing = true;

    // What the mixer reads, [num_tokens, hidden_size].
    static Buffer mixer_input(const ModelSpec& model, BufferPlan& plan);
    // The embedding behind a place for the residual stream, [num_tokens, 2 * hidden_size]: of all layers.
    static Buffer joined(const ModelSpec& model, BufferPlan& plan);

    SharedBlockUse(const ModelSpec& model, int layer, std::shared_ptr<SharedBlock> block, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;
    const std::shared_ptr<SharedBlock>& block() const { return block_; }

    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    // Keeps the embedding of a step's tokens for the blocks of all layers.
    template <class Tap>
    static void keep_embedding(const Step<Tap>& s, const Buffer& joined);

private:
    // What the layer adds to one of the tensors that a linear of the block joins, or to two of the same rows.
    struct Added {
        std::string name;  // of its own weight
        std::string of;    // of the tensor that it is added to
    };
    // Rows of the table for what the layer adds to these outputs of a linear of the block.
    void declare_adapter(ParamTable& table, LinearWeights& linear, const std::string& down, Range outputs,
                         const std::vector<Added>& up);

    SharedBlockSpec spec_;
    std::shared_ptr<SharedBlock> block_;
    int layer_;
    int64_t hidden_size_;
    float eps_;
    Buffer joined_, normed_;    // [num_tokens, 2 * hidden_size]
    Buffer result_;             // [num_tokens, hidden_size]: of attention, of its norm, and of the MLP
    Buffer input_;              // [num_tokens, hidden_size]: what the mixer reads
    Buffer inner_;              // [num_tokens, adapter_rank]
    LinearWeights linear_;      // [hidden_size, hidden_size]
    VectorWeights mixer_norm_;  // [hidden_size]
};

}  // namespace infinilm
