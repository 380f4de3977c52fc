// Linears whose weights are floats of 8 to 32 bits, widened to float32 and multiplied by float32 x.
#include "cpu/kernels/linear.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

struct Floats {
    template <class Use>
    static auto visit(const LinearArgs& args, Use use) {
        switch (args.weight.format) {
            case Format::bf16: return use(Bf16Widened{});
            case Format::f16: return use(F16Widened{});
            case Format::f8_row:
            case Format::f8_32:
            case Format::f8_128: return use(F8Widened{});
            default: return use(F32{});
        }
    }
};

}  // namespace

extern const LinearKernels linear_floats = linear_kernels<Floats>;

}  // namespace infinilm::cpu::INFINILM_ISA
