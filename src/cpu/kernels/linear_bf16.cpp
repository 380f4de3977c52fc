// Linears of bfloat16 weights and x rounded to bfloat16, by the instruction that multiplies these.
#include "cpu/kernels/linear.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

struct RoundedToBf16 {
    template <class Use>
    static auto visit(const LinearArgs&, Use use) {
#if INFINILM_TILES
        return use(Bf16Tiles{});
#else
        return use(Bf16Dots{});
#endif
    }
};

}  // namespace

extern const LinearKernels linear_bf16 = linear_kernels<RoundedToBf16>;

}  // namespace infinilm::cpu::INFINILM_ISA
