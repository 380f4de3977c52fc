// Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): what some requests of a step add to the linears of the
// model, y + scale * B (A x). With several ranks each has its part of them: where a linear's outputs are divided, rows
// of B, and where its inputs are, columns of A, whose parts are added up with those of the linear.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/range.h"
#include "model/batch.h"

namespace infinilm {

class Params;

// What an adapter has for one weight of the whole model.
struct LoraTensors {
    std::string name;  // of the weight: "model.layers.0.self_attn.q_proj.weight"
    Tensor a;          // [rank, in_features] of any floating dtype
    Tensor b;          // [out_features, rank] of any floating dtype
    float scale = 1;
    // For a linear of each head, a may be [num_heads * rank, in_features]; b is [out_features of a head, rank] then.
};

// A rank's part of an adapter, prepared.
class Adapter {
public:
    // What the adapter adds to one of the checkpoint tensors that a linear joins, such as q of q, k and v. A linear of
    // each head has one of these for each of the rank's heads.
    struct Part {
        std::shared_ptr<PreparedLinear> a, b;
        float scale = 1;
        Range outputs;  // of the linear's, those of this tensor; of a head all
    };

    // WeightError: a name that takes no adapter, a repeated one, or tensors that do not fit.
    Adapter(Backend& backend, const Params& params, const std::vector<LoraTensors>& tensors);
    // By a row of the table of Params. Null: it stays as it is.
    const Part* find(size_t row, size_t head = 0) const { return parts_[row].empty() ? nullptr : &parts_[row][head]; }
    int64_t most_rank() const { return most_rank_; }

private:
    std::vector<std::vector<Part>> parts_;  // [rows of the table]; [1], or of each head
    int64_t most_rank_ = 0;
};

using Adapters = std::map<int32_t, std::shared_ptr<const Adapter>>;  // by the ids that Batch::adapter_ids holds

// The adapters of a step's tokens.
class LoraStep {
public:
    // RequestError: an id that no adapter has. The batch is checked, see check_values.
    LoraStep(const Adapters& adapters, const Batch& batch);
    // Takes the lists of rows to a device that needs them, until the next step does.
    void stage(Backend& backend);
    explicit operator bool() const { return !groups_.empty(); }
    int64_t num_rows() const { return num_rows_; }    // of all adapters
    int64_t most_rank() const { return most_rank_; }  // of them

    // What they have for a weight, by its row of the table, and which outputs of its linear these are; valid until the
    // next call.
    struct Changes {
        std::span<const LoraPart> parts;
        Range outputs;
    };
    Changes changes(size_t row, size_t head = 0) const;
    const LoraRows* listed() const { return listed_.rows ? &listed_ : nullptr; }  // null: not staged

private:
    struct Group {
        const Adapter* adapter;
        std::vector<int32_t> rows;
    };
    std::vector<Group> groups_;
    int64_t num_rows_ = 0, most_rank_ = 0;
    LoraRows listed_;
    mutable std::vector<LoraPart> parts_;
};

}  // namespace infinilm
