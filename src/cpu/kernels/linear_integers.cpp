// Linears whose weights are integers with scales, multiplied by x as int8.
#include "cpu/kernels/linear.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

struct Integers {
    template <class Use>
    static auto visit(const LinearArgs& args, Use use) {
        switch (args.weight.format) {
            case Format::int4: return use(Int4{});
            case Format::q8_0: return use(Q8_0{});
            case Format::q4_0: return use(Q4_0{});
            default: return use(Int8{});
        }
    }
};

}  // namespace

extern const LinearKernels linear_integers = linear_kernels<Integers>;

}  // namespace infinilm::cpu::INFINILM_ISA
