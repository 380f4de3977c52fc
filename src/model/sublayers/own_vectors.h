// Vectors that a token has for each layer, as in Gemma 3n and 4: (row of a table of its own + norm of a linear of its
// embedding) / 2^.5. OwnVectors makes them for all layers; OwnVector is the sublayer that reads those of one.
#pragma once

#include "model/step.h"
#include "model/table.h"

namespace infinilm {

namespace sites {
inline constexpr Site per_layer_input{"per_layer_input"};  // [num_tokens, per_layer_size]: what projection reads
inline constexpr Site per_layer_projection{"per_layer_projection"};  // [num_tokens, hidden_size]
}  // namespace sites

class OwnVectors {
public:
    OwnVectors(const ModelSpec& model, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<LinearCall> calls() const;
    template <class Tap>
    void run(const Step<Tap>& s) const;  // x: the embedding

private:
    int64_t hidden_size_, size_, num_layers_, vocab_size_;
    float eps_;
    Buffer vectors_;            // [num_tokens, num_layers * size]
    Buffer projected_;          // the same: of them, what comes from the embedding
    LinearWeights table_;       // [rows of the vocabulary, num_layers * size]
    LinearWeights projection_;  // [num_layers * size, hidden_size]
    VectorWeights norm_;        // [size]
};

// projection(activation(gate(x)) * the token's own)
class OwnVector {
public:
    static constexpr Site site = sites::per_layer_projection;  // of what it gives
    static constexpr bool is_whole = true;                     // on every rank

    OwnVector(const ModelSpec& spec, int layer, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<Site> sites() const { return {sites::per_layer_input}; }  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    int64_t hidden_size_, size_, layer_;
    Activation activation_;
    Buffer vectors_;            // [num_tokens, num_layers * size]
    Buffer gate_;               // [num_tokens, size]
    LinearWeights gate_proj_;   // [size, hidden_size]
    LinearWeights projection_;  // [hidden_size, size]
};

}  // namespace infinilm
