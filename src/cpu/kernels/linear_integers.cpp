// Linears whose weights are int8 or int4, multiplied by x as int8.
#include "cpu/kernels/linear.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

struct Integers {
    template <class Use>
    static auto visit(const LinearArgs& args, Use use) {
        return args.weight.format == Format::int8 ? use(Int8{}) : use(Int4{});
    }
};

}  // namespace

extern const LinearKernels linear_integers = linear_kernels<Integers>;

}  // namespace infinilm::cpu::INFINILM_ISA
