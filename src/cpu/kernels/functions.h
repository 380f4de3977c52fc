// The kernels of one instruction-set build, named so that table.cpp can gather them. kernels.h says what each does.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

// What several kernels need; the standard library's are out of bounds (kernels.h).
INFINILM_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INFINILM_INLINE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INFINILM_INLINE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
// Calls f(offset, count) for the vectors of a row, the last of which may be part of one.
template <class F>
INFINILM_INLINE void for_vectors(int64_t size, F f) {
    int64_t i = 0;
    for (; i + width <= size; i += width) f(i, width);
    if (i < size) f(i, (int)(size - i));
}

}  // namespace infinilm::cpu::INFINILM_ISA

namespace infinilm::cpu::INFINILM_FLOATS {

// pack.cpp
void pack(const PackArgs& args, Share share);

// linear_floats.cpp
extern const LinearKernels linear_floats;

// norm.cpp
void norm(const CpuNormArgs& args, Share share);

// sparsify.cpp
void row_moment(const RowMomentArgs& args, Share share);
void sparsify(const SparsifyArgs& args, Share share);

// streams.cpp
void match_rms(const MatchRmsArgs& args, Share share);
void mix_streams(const MixStreamsArgs& args, Share share);

// rope.cpp
void rope_store(const CpuRopeStoreArgs& args, Share share);

// attention.cpp
size_t attention_scratch_bytes(const CpuAttentionArgs& args);
size_t attention_shared_scratch_bytes(const CpuAttentionArgs& args);
size_t attention_most_shared_scratch_bytes(const CpuAttentionArgs& args, int64_t num_tokens, int64_t max_context_len);
void attention(const CpuAttentionArgs& args, Share share);
void attention_merge(const CpuAttentionArgs& args, Share share);

// choose_keys.cpp
size_t choose_keys_scratch_bytes(const CpuChooseKeysArgs& args);
void score_keys(const CpuChooseKeysArgs& args, Share share);
void choose_keys(const CpuChooseKeysArgs& args, Share share);

// elementwise.cpp
void embedding(const EmbeddingArgs& args, Share share);
void act_mul(const ActMulArgs& args, Share share);
void soft_cap(const SoftCapArgs& args, Share share);
void combine(const CombineArgs& args, Share share);

// delta.cpp
void causal_conv(const CausalConvArgs& args, Share share);
void delta_rule(const CpuDeltaRuleArgs& args, Share share);

// selective_scan.cpp
void selective_scan(const CpuSelectiveScanArgs& args, Share share);
void gated_norm(const GatedNormArgs& args, Share share);

}  // namespace infinilm::cpu::INFINILM_FLOATS

namespace infinilm::cpu::INFINILM_INTEGERS {

// linear_integers.cpp
extern const LinearKernels linear_integers;

}  // namespace infinilm::cpu::INFINILM_INTEGERS

namespace infinilm::cpu::INFINILM_ISA {

// linear_bf16.cpp
extern const LinearKernels linear_bf16;

// attention_bf16.cpp
void attention_bf16(const CpuAttentionArgs& args, Share share);

// linear_tiles.cpp: in place of linear_integers, where there are matrix tiles
extern const LinearKernels linear_integer_tiles;

// microbenchmarks.cpp
uint64_t read_memory(const void* data, size_t bytes);
double dot_flops(int64_t iterations, bool multiply_bf16);

}  // namespace infinilm::cpu::INFINILM_ISA
