// Linears of bfloat16 weights, or e4m3 ones, and x rounded to bfloat16, by the instruction that multiplies these.
#include "cpu/kernels/linear.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

struct RoundedToBf16 {
    template <class Use>
    static auto visit(const LinearArgs& args, Use use) {
#if INFINILM_TILES
        using Multiplied = Bf16Tiles;
#else
        using Multiplied = Bf16Dots;
        if (is_f8(args.weight.format) && args.num_tokens <= E4m3Dots::most_tokens) return use(Scaled<E4m3Dots>{});
#endif
        return is_f8(args.weight.format) ? use(MadeBf16<Multiplied>{}) : use(Multiplied{});
    }
};

}  // namespace

extern const LinearKernels linear_bf16 = linear_kernels<RoundedToBf16>;

}  // namespace infinilm::cpu::INFINILM_ISA
