// A Backend that passes everything on to another one and adds up the time of each op, for `infinilm bench --ops`.
// A decoder has it in place of the other one only while ops are timed, so that nothing is slower otherwise.
#pragma once

#include <map>
#include <string>

#include "ops/backend.h"

namespace infinilm {

struct OpTime {
    int64_t calls = 0;
    double seconds = 0;
};
using OpTimes = std::map<std::string, OpTime>;

class TimedBackend final : public Backend {
public:
    // The linears of the model by name; others count as "other", as do all ops that have no name of their own.
    using LinearNames = std::map<const PreparedLinear*, std::string>;
    // ConfigError: a device that works while the host goes on, whose ops would seem to take no time.
    TimedBackend(Backend& inner, LinearNames names);

    const OpTimes& times() const { return times_; }

    Device device() const override;
    DType activation_dtype() const override;
    Tensor allocate(DType dtype, std::span<const int64_t> shape) override;
    void copy(const TensorView& src, const TensorView& dst) override;
    void join_columns(const TensorView& parts, const TensorView& out) override;
    std::unique_ptr<PreparedLinear> prepare_linear(std::vector<LinearPart> parts, LinearKind kind, int head_dim,
                                                   Quantization quantization) override;
    bool takes_blocks(std::string_view type) const override { return inner_.takes_blocks(type); }
    bool rounds_blocks(std::string_view type) const override { return inner_.rounds_blocks(type); }
    void check_packed(const PackedSource& source) const override;
    std::unique_ptr<PreparedLinear> adopt_linear(const PackedSource& source) override;
    Tensor unpack_linear(const PreparedLinear& linear, size_t part) override;
    std::unique_ptr<PreparedExperts> prepare_experts(SharedLinears gate_up, SharedLinears down) override;
    Tensor prepare_vector(const Tensor& vector) override;
    void fill_random(const TensorView& weight, uint64_t seed) override;

    void embedding(const EmbeddingParams& p) override;
    void rms_norm(const RmsNormParams& p) override;
    void mean_square(const MeanSquareParams& p) override;
    void add_rms_norm(const AddRmsNormParams& p) override;
    void row_moment(const RowMomentParams& p) override;
    void sparsify(const SparsifyParams& p) override;
    void match_rms(const MatchRmsParams& p) override;
    void mix_streams(const MixStreamsParams& p) override;
    void linear(const LinearParams& p) override;
    void linear_rope_store_kv(const LinearParams& p, const RopeStoreParams& rope) override;
    void linear_act(const LinearParams& p) override;
    void head_linear(const HeadLinearParams& p) override;
    void rope_table(const RopeTableParams& p) override;
    void qk_norm_rope_store_kv(const RopeStoreParams& p) override;
    void paged_attention(const AttentionParams& p) override;
    bool fuses_rope_store(const LinearParams& p, const RopeStoreParams& rope) override {
        return inner_.fuses_rope_store(p, rope);
    }
    void store_kv_and_attend(const RopeStoreParams& store, const AttentionParams& p) override;
    void choose_keys(const ChooseKeysParams& p) override;
    void act_mul(const ActMulParams& p) override;
    void clip(const ClipParams& p) override;
    void soft_cap(const SoftCapParams& p) override;
    void gather_rows(const GatherRowsParams& p) override;
    void update_step(const UpdateStepParams& p) override;
    void route(const RouteParams& p) override;
    void experts(const ExpertsParams& p) override;
    void lora(const LoraParams& p) override;
    void causal_conv(const CausalConvParams& p) override;
    void delta_rule(const DeltaRuleParams& p) override;
    void selective_scan(const SelectiveScanParams& p) override;
    void gated_norm(const GatedNormParams& p) override;
    void log_drafts(const LogDraftsParams& p) override;
    void sum_parts(const SumPartsParams& p) override;
    void change_logits(const ChangeLogitsParams& p) override;
    void find_best(const FindBestParams& p) override;
    void log_probs(const LogProbsParams& p) override;
    void sample(const SampleParams& p) override;

private:
    const std::string& name(const PreparedLinear& linear) const;
    template <class F>
    void timed(const std::string& name, F f);

    Backend& inner_;
    const LinearNames names_;
    OpTimes times_;
};

}  // namespace infinilm
