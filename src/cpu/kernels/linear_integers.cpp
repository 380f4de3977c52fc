// Linears whose weights are integers with scales, multiplied by x as int8.
#include "cpu/kernels/linear.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

struct OfIntegers {
    template <class Use>
    static auto visit(const LinearArgs& args, Use use) {
        switch (args.weight.format) {
            case Format::int4: return use(Int4<Bf16>{});
            case Format::q8_0: return use(Q8_0{});
            case Format::q4_0: return use(Int4<F16>{});
            case Format::q4_1:
            case Format::z4_32:
            case Format::z4_64:
            case Format::z4_128:
            case Format::q4_k: return use(Planes<4, 0, 1, true>{});
            case Format::q5_0:  // minimum: scale * offset
            case Format::q5_1:
            case Format::q5_k: return use(Planes<5, 0, 1, true>{});
            case Format::q6_k: return use(Planes<6, 32, 2>{});
            case Format::q3_k: return use(Planes<3, 4, 2>{});
            case Format::q2_k: return use(Planes<2, 0, 2, true>{});
            case Format::tq2_0: return use(Planes<2, 1>{});
            case Format::iq1_s: return use(Planes<2, 0, 1, true>{});
            case Format::iq1_m: return use(Planes<2, 0, 4, true>{});
            case Format::iq2_xxs: return use(Values<3>{});
            case Format::iq2_xs: return use(Values<3, 2>{});
            case Format::iq3_xxs:
            case Format::iq3_s:
            case Format::iq4_nl:
            case Format::iq4_xs:
            case Format::mxfp4: return use(Values<4>{});
            case Format::nvfp4: return use(Values<4, 2>{});
            default: return use(Int8{});
        }
    }
};

}  // namespace

extern const LinearKernels linear_integers = linear_kernels<OfIntegers>;

}  // namespace infinilm::cpu::INFINILM_ISA
