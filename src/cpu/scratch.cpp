// What steps take besides activations, which the memory plan asks for before there is a backend.
#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/isa.h"
#include "cpu/kernels/kernels.h"

namespace infinilm::cpu {

ChosenAtOnce chosen_at_once(int64_t num_tokens, int64_t most_keys, int64_t top_k) {
    constexpr int64_t most_scores = int64_t{1} << 22;  // 16 MiB, and a multiple of whole vectors for each token
    if (most_keys <= top_k) return {num_tokens, 0};
    const int64_t keys = (most_keys + 255) / 256 * 256;
    return {std::clamp<int64_t>(most_scores / keys, 1, std::max<int64_t>(num_tokens, 1)), keys};
}

ScratchBytes scratch_bytes(const CpuOptions& options, const LargestCalls& calls) {
    const Kernels& kernels = select_kernels(options.isa);
    const bool multiply_bf16 = options.compute_dtype == DType::bfloat16 && kernels.multiplies_bf16();
    size_t of_a_thread = 0, shared = 0;
    if (calls.num_heads > 0) {
        CpuAttentionArgs attention{};
        attention.num_heads = calls.num_heads;
        attention.num_kv_heads = calls.num_kv_heads;
        attention.head_dim = calls.head_dim;
        attention.value_dim = calls.value_dim;
        of_a_thread = kernels.attention_scratch_bytes(attention);
        shared = kernels.attention_most_shared_scratch_bytes(attention, calls.num_tokens, calls.max_context_len);
    }
    if (calls.index_top_k > 0) {
        CpuChooseKeysArgs choice{};
        choice.head_dim = calls.index_head_dim;
        of_a_thread = std::max(of_a_thread, kernels.choose_keys_scratch_bytes(choice));
        const ChosenAtOnce at_once = chosen_at_once(calls.num_tokens, calls.max_context_len, calls.index_top_k);
        shared = std::max(shared, static_cast<size_t>(at_once.bytes()));
    }
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
