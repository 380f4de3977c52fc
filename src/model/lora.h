// Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): what some requests of a step add to the linears of the
// model, y + scale * B (A x). With several ranks each has its part of them: where a linear's outputs are divided, rows
// of B, and where its inputs are, columns of A, whose parts are added up with those of the linear.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/batch.h"
#include "model/params.h"
#include "model/taps.h"

namespace infinilm {

// What an adapter has for one weight of the whole model.
struct LoraTensors {
    std::string name;  // of the weight: "model.layers.0.self_attn.q_proj.weight"
    Tensor a;          // [rank, in_features] of any floating dtype
    Tensor b;          // [out_features, rank] of any floating dtype
    float scale = 1;
};

// The linears that adapters may change: all of a dense layer, and of one with experts those of attention.
inline constexpr std::array lora_sites = {Site::q_proj,    Site::k_proj,  Site::v_proj,   Site::o_proj,
                                          Site::gate_proj, Site::up_proj, Site::down_proj};

// A rank's part of an adapter, prepared.
class Adapter {
public:
    struct Linear {
        std::unique_ptr<PreparedLinear> a, b;  // absent: the linear stays as it is
        float scale = 1;
    };

    // WeightError: a name that is no weight of such a linear, a repeated one, or tensors that do not fit it.
    Adapter(Backend& backend, const Params& params, const std::vector<LoraTensors>& tensors);
    const Linear* find(Site site, int layer) const;  // null: none
    int64_t most_rank() const { return most_rank_; }

private:
    std::vector<std::array<Linear, lora_sites.size()>> layers_;  // [num_layers]
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

    // What they have for a linear; valid until the next call.
    std::span<const LoraPart> parts(Site site, int layer) const;
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
