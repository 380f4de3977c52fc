// The table of this instruction-set build, the only thing of it that the rest of the program sees.
#include "cpu/kernels/functions.h"

#define INFINILM_JOIN_(a, b) a##b
#define INFINILM_JOIN(a, b) INFINILM_JOIN_(a, b)
#define INFINILM_TEXT_(a) #a
#define INFINILM_TEXT(a) INFINILM_TEXT_(a)

namespace infinilm::cpu {

namespace isa = INFINILM_ISA;
namespace floats = INFINILM_FLOATS;
namespace integers = INFINILM_INTEGERS;

extern const Kernels INFINILM_JOIN(kernels_, INFINILM_ISA) = {
    .name = INFINILM_TEXT(INFINILM_ISA),
    .pack = floats::pack,
    .linear_floats = &floats::linear_floats,
#if INFINILM_TILES
    .linear_integers = &isa::linear_integer_tiles,
#else
    .linear_integers = &integers::linear_integers,
#endif
#if INFINILM_BF16_DOT || INFINILM_TILES
    .linear_bf16 = &isa::linear_bf16,
#else
    .linear_bf16 = nullptr,
#endif
    .norm = floats::norm,
    .row_moment = floats::row_moment,
    .sparsify = floats::sparsify,
    .match_rms = floats::match_rms,
    .mix_streams = floats::mix_streams,
    .rope_store = floats::rope_store,
    .attention_scratch_bytes = floats::attention_scratch_bytes,
    .attention_shared_scratch_bytes = floats::attention_shared_scratch_bytes,
    .attention_most_shared_scratch_bytes = floats::attention_most_shared_scratch_bytes,
    .attention = floats::attention,
#if INFINILM_BF16_DOT
    .attention_bf16 = isa::attention_bf16,
#else
    .attention_bf16 = nullptr,
#endif
    .attention_merge = floats::attention_merge,
    .choose_keys_scratch_bytes = floats::choose_keys_scratch_bytes,
    .score_keys = floats::score_keys,
    .choose_keys = floats::choose_keys,
    .embedding = floats::embedding,
    .act_mul = floats::act_mul,
    .soft_cap = floats::soft_cap,
    .combine = floats::combine,
    .causal_conv = floats::causal_conv,
    .delta_rule = floats::delta_rule,
    .selective_scan = floats::selective_scan,
    .gated_norm = floats::gated_norm,
    .read_memory = isa::read_memory,
    .dot_flops = isa::dot_flops,
};

}  // namespace infinilm::cpu

#if INFINILM_EMULATED  // a library of its own
extern "C" __attribute__((visibility("default"))) const infinilm::cpu::Kernels* infinilm_cpu_kernels(uint64_t layout) {
    return layout == infinilm::cpu::kernels_layout ? &infinilm::cpu::INFINILM_JOIN(kernels_, INFINILM_ISA) : nullptr;
}
#endif
