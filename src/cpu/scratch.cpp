// What steps take besides activations, which the memory plan asks for before there is a backend.
#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/isa.h"
#include "cpu/kernels/kernels.h"

namespace infinilm::cpu {

ScratchBytes scratch_bytes(const CpuOptions& options, const LargestCalls& calls) {
    const Kernels& kernels = select_kernels(options.isa);
    const bool multiply_bf16 = options.compute_dtype == DType::bfloat16 && kernels.multiplies_bf16();
    CpuAttentionArgs attention{};
    attention.num_heads = calls.num_heads;
    attention.num_kv_heads = calls.num_kv_heads;
    attention.head_dim = calls.head_dim;
    attention.value_dim = calls.value_dim;
    size_t of_a_thread = kernels.attention_scratch_bytes(attention);
    size_t shared = kernels.attention_most_shared_scratch_bytes(attention, calls.num_tokens, calls.max_context_len);
    constexpr int64_t most_padding = 32;  // tokens that a linear may have packed with its own, and alignment
    for (const auto& [num_tokens, in_features, count] : calls.linears) {
        LinearArgs linear{};
        linear.num_tokens = num_tokens + (count > 1 ? most_padding * std::min(count, num_tokens) : 0);
        linear.weight.in_features = in_features;
        for (const bool quantised : {false, true}) {  // other floats, other integers take no more than these
            linear.weight.format = quantised ? Format::int8 : multiply_bf16 ? Format::f8_row : Format::f32;
            linear.multiply_bf16 = multiply_bf16 && !quantised;
            const LinearKernels& of_linear = kernels.linear(linear);
            of_a_thread = std::max(of_a_thread, of_linear.scratch_bytes(linear));
            shared = std::max(shared, of_linear.shared_scratch_bytes(linear));
        }
    }
    return {static_cast<int64_t>(of_a_thread), static_cast<int64_t>(shared)};
}

}  // namespace infinilm::cpu
