// The CPU backend: a thread pool and one table of kernels. Weights are used in place, as mapped from the checkpoint.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace infinilm::cpu {

struct CpuOptions {
    int num_threads = 0;  // 0: one per physical core
    std::string isa;      // "": INFINILM_CPU_ISA, else the fastest this machine runs
    // bfloat16: bfloat16 weights are multiplied by x rounded to bfloat16 where the kernels multiply bfloat16 (amx,
    // avx512_bf16); other weights, other dtypes and other kernels multiply the stored weights by x in float32.
    DType compute_dtype = DType::float32;
};

inline constexpr DType activation_dtype = DType::float32;

class CpuBackend;  // defined in cpu_backend.cpp; callers see Backend and these:
std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options);
// The options as they are used. ConfigError: a value that cannot be.
CpuOptions checked(CpuOptions options);

// The largest calls of a model's steps, and the scratch that a backend keeps for them at most.
struct LargestCalls {
    int64_t num_tokens;
    struct Linears {          // that run at once
        int64_t num_tokens;   // of all together
        int64_t in_features;  // of each
        int64_t count = 1;
    };
    std::vector<Linears> linears;
    int num_heads = 0, num_kv_heads = 0, head_dim = 0;  // 0: there is no attention
    int value_dim = 0;                                  // of a head
    int64_t max_context_len = 0;
    int index_head_dim = 0, index_top_k = 0;  // of what chooses keys; 0: nothing does
};
// The scores of tokens that choose keys at once: [tokens, keys] float32. keys 0: all have all that they see.
struct ChosenAtOnce {
    int64_t tokens, keys;
    int64_t bytes() const { return tokens * keys * static_cast<int64_t>(sizeof(float)); }
};
ChosenAtOnce chosen_at_once(int64_t num_tokens, int64_t most_keys, int64_t top_k);
struct ScratchBytes {
    int64_t of_a_thread, shared;
};
ScratchBytes scratch_bytes(const CpuOptions& options, const LargestCalls& calls);

}  // namespace infinilm::cpu
