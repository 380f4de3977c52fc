#include "ops/timed_backend.h"

#include <chrono>

namespace infinilm {

TimedBackend::TimedBackend(Backend& inner, LinearNames names) : inner_(inner), names_(std::move(names)) {
    if (inner.queue())
        throw ConfigError(concat("the time of single ops is taken on CPUs alone, and this is ",
                                 to_string(inner.device()), ": there the host goes on while an op runs"));
}

Device TimedBackend::device() const { return inner_.device(); }
DType TimedBackend::activation_dtype() const { return inner_.activation_dtype(); }
Tensor TimedBackend::allocate(DType dtype, std::span<const int64_t> shape) { return inner_.allocate(dtype, shape); }
void TimedBackend::copy(const TensorView& src, const TensorView& dst) { inner_.copy(src, dst); }
void TimedBackend::join_columns(const TensorView& parts, const TensorView& out) { inner_.join_columns(parts, out); }
std::unique_ptr<PreparedLinear> TimedBackend::prepare_linear(std::vector<LinearPart> parts, LinearKind kind,
                                                             int head_dim, Quantization quantization) {
    return inner_.prepare_linear(std::move(parts), kind, head_dim, quantization);
}
void TimedBackend::check_packed(const PackedSource& source) const { inner_.check_packed(source); }
std::unique_ptr<PreparedLinear> TimedBackend::adopt_linear(const PackedSource& source) {
    return inner_.adopt_linear(source);
}
Tensor TimedBackend::unpack_linear(const PreparedLinear& linear, size_t part) {
    return inner_.unpack_linear(linear, part);
}
std::unique_ptr<PreparedExperts> TimedBackend::prepare_experts(SharedLinears gate_up, SharedLinears down) {
    return inner_.prepare_experts(std::move(gate_up), std::move(down));
}
Tensor TimedBackend::prepare_vector(const Tensor& vector) { return inner_.prepare_vector(vector); }
void TimedBackend::fill_random(const TensorView& weight, uint64_t seed) { inner_.fill_random(weight, seed); }

const std::string& TimedBackend::name(const PreparedLinear& linear) const {
    static const std::string other = "other";
    const auto found = names_.find(&linear);
    return found == names_.end() ? other : found->second;
}

template <class F>
void TimedBackend::timed(const std::string& name, F f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    OpTime& time = times_[name];
    time.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++time.calls;
}

void TimedBackend::embedding(const EmbeddingParams& p) {
    timed("embedding", [&] { inner_.embedding(p); });
}
void TimedBackend::rms_norm(const RmsNormParams& p) {
    timed("other", [&] { inner_.rms_norm(p); });
}
void TimedBackend::mean_square(const MeanSquareParams& p) {
    timed("other", [&] { inner_.mean_square(p); });
}
void TimedBackend::add_rms_norm(const AddRmsNormParams& p) {
    timed("other", [&] { inner_.add_rms_norm(p); });
}
void TimedBackend::row_moment(const RowMomentParams& p) {
    timed("other", [&] { inner_.row_moment(p); });
}
void TimedBackend::sparsify(const SparsifyParams& p) {
    timed("other", [&] { inner_.sparsify(p); });
}
void TimedBackend::match_rms(const MatchRmsParams& p) {
    timed("other", [&] { inner_.match_rms(p); });
}
void TimedBackend::mix_streams(const MixStreamsParams& p) {
    timed("other", [&] { inner_.mix_streams(p); });
}
void TimedBackend::linear(const LinearParams& p) {
    timed(name(p.weight), [&] { inner_.linear(p); });
}
void TimedBackend::linear_rope_store_kv(const LinearParams& p, const RopeStoreParams& rope) {
    timed(name(p.weight), [&] { inner_.linear_rope_store_kv(p, rope); });
}
void TimedBackend::linear_act(const LinearParams& p) {
    timed(name(p.weight), [&] { inner_.linear_act(p); });
}
void TimedBackend::head_linear(const HeadLinearParams& p) {
    timed(name(p.weight), [&] { inner_.head_linear(p); });
}
void TimedBackend::rope_table(const RopeTableParams& p) {
    timed("other", [&] { inner_.rope_table(p); });
}
void TimedBackend::qk_norm_rope_store_kv(const RopeStoreParams& p) {
    timed("other", [&] { inner_.qk_norm_rope_store_kv(p); });
}
void TimedBackend::paged_attention(const AttentionParams& p) {
    timed("attention", [&] { inner_.paged_attention(p); });
}
void TimedBackend::store_kv_and_attend(const RopeStoreParams& store, const AttentionParams& p) {
    timed("attention", [&] { inner_.store_kv_and_attend(store, p); });
}
void TimedBackend::choose_keys(const ChooseKeysParams& p) {
    timed("indexer", [&] { inner_.choose_keys(p); });
}

void TimedBackend::act_mul(const ActMulParams& p) {
    timed("other", [&] { inner_.act_mul(p); });
}
void TimedBackend::clip(const ClipParams& p) {
    timed("other", [&] { inner_.clip(p); });
}
void TimedBackend::soft_cap(const SoftCapParams& p) {
    timed("other", [&] { inner_.soft_cap(p); });
}
void TimedBackend::gather_rows(const GatherRowsParams& p) {
    timed("other", [&] { inner_.gather_rows(p); });
}
void TimedBackend::update_step(const UpdateStepParams& p) {
    timed("other", [&] { inner_.update_step(p); });
}
void TimedBackend::route(const RouteParams& p) {
    timed("router", [&] { inner_.route(p); });
}
void TimedBackend::experts(const ExpertsParams& p) {
    timed("experts", [&] { inner_.experts(p); });
}
void TimedBackend::lora(const LoraParams& p) {
    timed("lora", [&] { inner_.lora(p); });
}
void TimedBackend::causal_conv(const CausalConvParams& p) {
    timed("states", [&] { inner_.causal_conv(p); });
}
void TimedBackend::delta_rule(const DeltaRuleParams& p) {
    timed("states", [&] { inner_.delta_rule(p); });
}
void TimedBackend::selective_scan(const SelectiveScanParams& p) {
    timed("states", [&] { inner_.selective_scan(p); });
}
void TimedBackend::gated_norm(const GatedNormParams& p) {
    timed("states", [&] { inner_.gated_norm(p); });
}
void TimedBackend::log_drafts(const LogDraftsParams& p) {
    timed("states", [&] { inner_.log_drafts(p); });
}
void TimedBackend::sum_parts(const SumPartsParams& p) {
    timed("other", [&] { inner_.sum_parts(p); });
}
void TimedBackend::change_logits(const ChangeLogitsParams& p) {
    timed("sampling", [&] { inner_.change_logits(p); });
}
void TimedBackend::find_best(const FindBestParams& p) {
    timed("sampling", [&] { inner_.find_best(p); });
}
void TimedBackend::log_probs(const LogProbsParams& p) {
    timed("sampling", [&] { inner_.log_probs(p); });
}
void TimedBackend::sample(const SampleParams& p) {
    timed("sampling", [&] { inner_.sample(p); });
}

}  // namespace infinilm
