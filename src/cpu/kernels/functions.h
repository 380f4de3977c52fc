// The kernels of one instruction-set build, named so that table.cpp can gather them. kernels.h says what each does.
#pragma once

#include "cpu/kernels/simd.h"

namespace infinilm::cpu::INFINILM_ISA {

// pack.cpp
void pack(const PackArgs& args, Worker worker);

// linear.cpp
size_t linear_scratch_bytes(const LinearArgs& args);
size_t linear_shared_scratch_bytes(const LinearArgs& args);
void linear_prepare(const LinearArgs& args, Worker worker);
void linear(const LinearArgs& args, Worker worker);

// norm.cpp
void norm(const NormArgs& args, Worker worker);

// rope.cpp
void rope_store(const RopeStoreArgs& args, Worker worker);

// attention.cpp
size_t attention_scratch_bytes(const AttentionArgs& args);
size_t attention_shared_scratch_bytes(const AttentionArgs& args);
void attention(const AttentionArgs& args, Worker worker);
void attention_merge(const AttentionArgs& args, Worker worker);

// elementwise.cpp
void embedding(const EmbeddingArgs& args, Worker worker);
void silu_mul(const SiluMulArgs& args, Worker worker);

// limits.cpp
uint64_t read_memory(const void* data, size_t bytes);
double dot_flops(int64_t iterations, bool multiply_bf16);

}  // namespace infinilm::cpu::INFINILM_ISA
