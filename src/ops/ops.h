// Validates an op's arguments once, then calls the backend. The decoder, the tests and Python come through here.
#pragma once

#include "ops/backend.h"

namespace infinilm::ops {

void embedding(Backend&, const EmbeddingParams&);
void rms_norm(Backend&, const RmsNormParams&);
void mean_square(Backend&, const MeanSquareParams&);
void add_rms_norm(Backend&, const AddRmsNormParams&);
void check_add_rms_norm(const Backend&, const AddRmsNormParams&);  // for communicators, which have it in their sums
void row_moment(Backend&, const RowMomentParams&);
void sparsify(Backend&, const SparsifyParams&);
void match_rms(Backend&, const MatchRmsParams&);
void mix_streams(Backend&, const MixStreamsParams&);
void linear(Backend&, const LinearParams&);
void linear_rope_store_kv(Backend&, const LinearParams&, const RopeStoreParams&);
void linear_act(Backend&, const LinearParams&);
void head_linear(Backend&, const HeadLinearParams&);
void rope_table(Backend&, const RopeTableParams&);
void qk_norm_rope_store_kv(Backend&, const RopeStoreParams&);
void paged_attention(Backend&, const AttentionParams&);
void store_kv_and_attend(Backend&, const RopeStoreParams&, const AttentionParams&);
void choose_keys(Backend&, const ChooseKeysParams&);
void act_mul(Backend&, const ActMulParams&);
void clip(Backend&, const ClipParams&);
void soft_cap(Backend&, const SoftCapParams&);
void gather_rows(Backend&, const GatherRowsParams&);
void update_step(Backend&, const UpdateStepParams&);
void route(Backend&, const RouteParams&);
void experts(Backend&, const ExpertsParams&);
void lora(Backend&, const LoraParams&);
void causal_conv(Backend&, const CausalConvParams&);
void delta_rule(Backend&, const DeltaRuleParams&);
void selective_scan(Backend&, const SelectiveScanParams&);
void gated_norm(Backend&, const GatedNormParams&);
void log_drafts(Backend&, const LogDraftsParams&);
void sum_parts(Backend&, const SumPartsParams&);
void change_logits(Backend&, const ChangeLogitsParams&);
void find_best(Backend&, const FindBestParams&);
void log_probs(Backend&, const LogProbsParams&);
void sample(Backend&, const SampleParams&);
std::unique_ptr<PreparedLinear> prepare_linear(Backend&, std::vector<LinearPart>, LinearKind, int head_dim = 0,
                                               Quantization quantization = Quantization::none);

std::unique_ptr<PreparedExperts> prepare_experts(Backend&, Backend::SharedLinears gate_up, Backend::SharedLinears down);

}  // namespace infinilm::ops
