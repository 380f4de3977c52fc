// THE table of checkpoint tensors: name, shape, which part of it a rank has, destination. Allocation, loading, sharding
// and the list of what is missing all derive from it. Sublayers write their rows; adding a weight is adding a row.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "model/cut.h"
#include "model/spec.h"
#include "model/weights.h"

namespace infinilm {

// A linear: how its tensors are joined and stored.
struct LinearEntry {
    std::string name;  // of its tensors in a packed checkpoint, which is one set for all parts: <name>.panels, .scales
    LinearKind kind = LinearKind::plain;
    int head_dim = 0;  // of qkv and by_head
    Quantization quantization = Quantization::none;
    bool adaptable = true;     // whether adapters of requests may change it: see takes_adapter
    bool on_host = false;      // beside a GPU: see HostExperts
    std::string_view timed;    // what its time counts as
    std::vector<size_t> rows;  // of the table: weights and biases
    size_t index = 0;          // of the table's linears
    LinearWeights* weights = nullptr;
};

struct ParamRow {
    std::string name;            // in the checkpoint
    std::vector<int64_t> shape;  // of the whole tensor
    Cut cut = {};
    int layer = -1;                       // -1: outside layers
    VectorWeights* vector = nullptr;      // which it is the weight or the bias of; else
    const LinearEntry* linear = nullptr;  // which it is part `part` of
    size_t part = 0;
    bool is_bias = false;
};

// Whether requests may have adapters of it (lora.h): a weight of a linear. Not of the vocabulary; nor of experts, since
// the host does not know which rows they get; nor of their router and gate, whose results are float32.
inline bool takes_adapter(const ParamRow& row) { return row.linear && row.linear->adaptable && row.shape.size() == 2; }

class ParamTable {
public:
    // A checkpoint tensor that a linear joins, with its bias.
    struct Part {
        std::string name;  // without ".weight"
        int64_t out_features;
        Cut cut = {};
    };
    struct Linear {
        std::string name;
        int64_t in_features;
        std::vector<Part> parts;
        std::string_view timed;
        bool bias = false;
        LinearKind kind = LinearKind::plain;
        int head_dim = 0;
        bool quantised = true;  // where the model's linears are
        bool adaptable = true;
        bool on_host = false;
        bool vocabulary = false;  // rows are looked up by token id, or are logits: not adaptable, int8 at the least
    };

    explicit ParamTable(const ModelSpec& model) : model_(model) {}
    ParamTable(const ParamTable&) = delete;  // rows point to its linears
    ParamTable& operator=(const ParamTable&) = delete;

    const ModelSpec& model() const { return model_; }  // whole: of all ranks
    void begin_layer(int layer) { layer_ = layer; }    // that the next rows are of; -1: none
    const LayerSpec& layer_spec() const { return model_.layer(layer_); }
    std::string prefix() const { return concat("model.layers.", layer_, "."); }

    void linear(LinearWeights& weights, const Linear& linear);
    // The weight of a norm, and its bias where norms have one. Once prepared it is (weight + offset) * multiplier.
    // Without a form it is a norm as all of the model are. One without weight has no row.
    void norm(VectorWeights& weights, const std::string& name, int64_t size, Cut cut = {}, float multiplier = 1);
    void norm(VectorWeights& weights, const std::string& name, int64_t size, NormForm form, Cut cut = {},
              float multiplier = 1);
    // A vector that is float32 once prepared, times the multiplier.
    void wide(VectorWeights& weights, const std::string& name, int64_t size, Cut cut = {}, float multiplier = 1);
    // A tensor of any shape, prepared by `make`.
    void tensor(VectorWeights& weights, const std::string& name, std::vector<int64_t> shape, Cut cut,
                std::function<Tensor(Backend&, const VectorWeights&)> make);
    // A vector that no checkpoint has.
    void made(VectorWeights& weights, std::function<Tensor(Backend&, const VectorWeights&)> make);

    const std::vector<ParamRow>& rows() const { return rows_; }
    const std::deque<LinearEntry>& linears() const { return linears_; }
    // In the order in which they are prepared, with the layer of each.
    const std::vector<std::pair<VectorWeights*, int>>& vectors() const { return vectors_; }
    const ParamRow* find(const std::string& name) const;            // null: there is none
    const LinearEntry* find_linear(const std::string& name) const;  // the same

private:
    void add(ParamRow row);
    void clips(LinearWeights& weights, const Linear& linear);

    const ModelSpec& model_;
    int layer_ = -1;
    std::vector<ParamRow> rows_;
    std::deque<LinearEntry> linears_;
    std::vector<std::pair<VectorWeights*, int>> vectors_;
    std::map<std::string, size_t> by_name_;
    std::map<std::string, const LinearEntry*> linears_by_name_;
};

}  // namespace infinilm
