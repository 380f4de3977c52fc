// What kernels get of an op's parameters: plain pointers, strides and sizes (args/). Every backend fills its launches
// by these; what one device alone needs it adds itself.
#pragma once

#include "args/attention.h"
#include "args/rows.h"
#include "args/state.h"
#include "ops/backend.h"

namespace infinilm {

Element element(DType dtype);  // a floating dtype, or int8

NormArgs norm_args(const RmsNormParams& p);
NormArgs norm_args(const MeanSquareParams& p);
NormArgs norm_args(const AddRmsNormParams& p);
RowMomentArgs row_moment_args(const RowMomentParams& p);
SparsifyArgs sparsify_args(const SparsifyParams& p);
MatchRmsArgs match_rms_args(const MatchRmsParams& p);
MixStreamsArgs mix_streams_args(const MixStreamsParams& p);
ActMulArgs act_mul_args(const ActMulParams& p);
ClipArgs clip_args(const ClipParams& p);
SoftCapArgs soft_cap_args(const SoftCapParams& p);
CombineArgs combine_args(const ExpertsParams& p, const int32_t* part_of);  // part_of: see CombineArgs
QkNormRopeStoreArgs rope_store_args(const RopeStoreParams& p);
AttentionArgs attention_args(const AttentionParams& p);
ChooseKeysArgs choose_keys_args(const ChooseKeysParams& p);
CausalConvArgs causal_conv_args(const CausalConvParams& p);
DeltaRuleArgs delta_rule_args(const DeltaRuleParams& p);
SelectiveScanArgs selective_scan_args(const SelectiveScanParams& p);
LogDraftsArgs log_drafts_args(const LogDraftsParams& p);
GatedNormArgs gated_norm_args(const GatedNormParams& p);

}  // namespace infinilm
