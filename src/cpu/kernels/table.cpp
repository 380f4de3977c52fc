// The table of this instruction-set build, the only thing of it that the rest of the program sees.
#include "cpu/kernels/functions.h"

#define INFINILM_JOIN_(a, b) a##b
#define INFINILM_JOIN(a, b) INFINILM_JOIN_(a, b)
#define INFINILM_TEXT_(a) #a
#define INFINILM_TEXT(a) INFINILM_TEXT_(a)

namespace infinilm::cpu {

namespace isa = INFINILM_ISA;

extern const Kernels INFINILM_JOIN(kernels_, INFINILM_ISA) = {
    .name = INFINILM_TEXT(INFINILM_ISA),
    .multiplies_bf16 = INFINILM_BF16_DOT || INFINILM_BF16_TILE,
    .pack = isa::pack,
    .linear_scratch_bytes = isa::linear_scratch_bytes,
    .linear_shared_scratch_bytes = isa::linear_shared_scratch_bytes,
    .linear_pack_x = isa::linear_pack_x,
    .linear = isa::linear,
    .norm = isa::norm,
    .rope_store = isa::rope_store,
    .attention_scratch_bytes = isa::attention_scratch_bytes,
    .attention_shared_scratch_bytes = isa::attention_shared_scratch_bytes,
    .attention_most_shared_scratch_bytes = isa::attention_most_shared_scratch_bytes,
    .attention = isa::attention,
    .attention_merge = isa::attention_merge,
    .embedding = isa::embedding,
    .act_mul = isa::act_mul,
    .soft_cap = isa::soft_cap,
    .read_memory = isa::read_memory,
    .dot_flops = isa::dot_flops,
};

}  // namespace infinilm::cpu

#if INFINILM_EMULATED  // a library of its own
extern "C" __attribute__((visibility("default"))) const infinilm::cpu::Kernels* infinilm_cpu_kernels(uint64_t layout) {
    return layout == infinilm::cpu::kernels_layout ? &infinilm::cpu::INFINILM_JOIN(kernels_, INFINILM_ISA) : nullptr;
}
#endif
