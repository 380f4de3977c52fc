// What the CPU backend has for layers of experts besides its linears: which experts a token goes to, and which rows an
// expert has.
#pragma once

#include <vector>

#include "cpu/packed_linear.h"

namespace infinilm::cpu {

class PackedExperts final : public PreparedExperts {
public:
    PackedExperts(Backend::SharedLinears gate_up, Backend::SharedLinears down);
    const PackedLinear& gate_up(int64_t expert) const { return packed(gate_up_, expert); }
    const PackedLinear& down(int64_t expert) const { return packed(down_, expert); }

private:
    static const PackedLinear& packed(const Backend::SharedLinears& linears, int64_t expert) {
        return static_cast<const PackedLinear&>(*linears[static_cast<size_t>(expert)]);
    }
    Backend::SharedLinears gate_up_, down_;
};

// The tokens of a step sorted by expert, those of one in their order: a part is a token at one of its experts.
class ExpertRows {
public:
    void group(const TensorView& ids, int64_t num_experts);  // ids: see ExpertsParams
    Range range(int64_t expert) const { return {ends_[expert_at(expert)], ends_[expert_at(expert) + 1]}; }  // of parts
    const int32_t* tokens() const { return tokens_.data(); }                                                // [parts]
    const int32_t* part_of() const { return part_of_.data(); }  // [num_tokens, top_k]

private:
    static size_t expert_at(int64_t expert) { return static_cast<size_t>(expert); }
    std::vector<int32_t> ends_;  // [num_experts + 1]: parts of all experts before
    std::vector<int32_t> tokens_, part_of_;
};

// With ExpertsParams::weigh_inputs: writes the weighted input of each of these parts where its output goes later.
void weigh_inputs(const ExpertsParams& params, const int32_t* part_of, int64_t begin, int64_t end);
void route(const RouteParams& params, int64_t begin, int64_t end);  // of these tokens

}  // namespace infinilm::cpu
