// The weights of a model, and THE table of checkpoint tensors: name, shape, destination. Allocation, loading and the
// list of what is missing all derive from it; adding a weight is adding a row.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/spec.h"
#include "ops/backend.h"

namespace infinilm {

// A linear layer: the checkpoint tensors it joins, and the backend's form of them once all are loaded.
struct LinearWeights {
    std::vector<LinearPart> parts;
    std::shared_ptr<PreparedLinear> prepared;
};

// A norm weight: the checkpoint tensor, and the backend's form of it.
struct VectorWeights {
    Tensor loaded, prepared;
};

struct LayerWeights {
    VectorWeights input_layernorm;           // [hidden_size]
    LinearWeights qkv_proj;                  // q, k, v: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    VectorWeights q_norm, k_norm;            // [head_dim], with qk_norm
    LinearWeights o_proj;                    // [hidden_size, num_heads * head_dim]
    VectorWeights post_attention_layernorm;  // [hidden_size]
    LinearWeights gate_up_proj;              // gate, up: each [intermediate_size, hidden_size]
    LinearWeights down_proj;                 // [hidden_size, intermediate_size]
};

struct ModelWeights {
    LinearWeights embed_tokens;  // [vocab_size, hidden_size]
    std::vector<LayerWeights> layers;
    VectorWeights norm;     // [hidden_size]
    LinearWeights lm_head;  // [vocab_size, hidden_size]; shares embed_tokens when tied
};

struct ParamRow {
    std::string name;  // in the checkpoint
    std::vector<int64_t> shape;
    Tensor* destination;
};

class Params {
public:
    explicit Params(const ModelSpec& spec);
    Params(const Params&) = delete;  // rows point into weights_
    Params& operator=(const Params&) = delete;

    const std::vector<ParamRow>& rows() const { return rows_; }
    void load(const std::string& name,
              Tensor tensor);                  // the tensor is used in place. WeightError: unknown, repeated, misshapen
    std::vector<std::string> missing() const;  // names not loaded yet, in checkpoint order
    // Once nothing is missing: hands the linears to the backend. WeightError names what is missing.
    void prepare(Backend& backend);
    bool prepared() const { return prepared_; }
    const ModelWeights& weights() const { return weights_; }
    int64_t bytes() const { return bytes_; }  // of the loaded tensors
    void clear();                             // lets go of every tensor

private:
    ModelSpec spec_;
    ModelWeights weights_;
    std::vector<ParamRow> rows_;
    std::map<std::string, size_t> by_name_;
    int64_t bytes_ = 0;
    bool prepared_ = false;
};

}  // namespace infinilm
