// Attention by products of bf16, of a cache in bf16: queries and weights are rounded to it. Called by
// CpuBackend::paged_attention.
#include "cpu/kernels/functions.h"
#if INFINILM_BF16_DOT
#include "cpu/kernels/attention.h"

namespace infinilm::cpu::INFINILM_ISA {

void attention_bf16(const CpuAttentionArgs& args, Share share) { attend_items<Pairs, Bf16>(args, share); }

}  // namespace infinilm::cpu::INFINILM_ISA
#endif
