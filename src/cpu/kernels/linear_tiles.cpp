// Linears of integers in matrix tiles. They give the bits of those in vectors, which are faster for a few tokens: sums
// over a group are exact, and what comes after is the same.
#include "cpu/kernels/linear.h"

#if INFINILM_TILES

namespace infinilm::cpu::INFINILM_ISA {

namespace {

constexpr int64_t few_tokens = 6;

// Formats with one scale for at least 32 k.
struct InTiles {
    template <class Use>
    static auto visit(const LinearArgs& args, Use use) {
        switch (args.weight.format) {
            case Format::int4: return use(IntegerTiles<Int4<Bf16>>{});
            case Format::q8_0: return use(IntegerTiles<Q8_0>{});
            case Format::q4_0: return use(IntegerTiles<Int4<F16>>{});
            case Format::q4_1:
            case Format::z4_32:
            case Format::z4_64:
            case Format::z4_128:
            case Format::q4_k: return use(IntegerTiles<Planes<4, 0, 1, true>>{});
            case Format::q5_0:
            case Format::q5_1:
            case Format::q5_k: return use(IntegerTiles<Planes<5, 0, 1, true>>{});
            case Format::tq2_0: return use(IntegerTiles<Planes<2, 1>>{});
            case Format::iq1_s: return use(IntegerTiles<Planes<2, 0, 1, true>>{});
            case Format::iq2_xxs: return use(IntegerTiles<Values<3>>{});
            case Format::iq3_xxs:
            case Format::iq3_s:
            case Format::iq4_nl:
            case Format::iq4_xs:
            case Format::mxfp4: return use(IntegerTiles<Values<4>>{});
            default: return use(IntegerTiles<Int8>{});
        }
    }
};
constexpr LinearKernels in_tiles = linear_kernels<InTiles>;

const LinearKernels& chosen(const LinearArgs& args) {
    const bool tiles = args.num_tokens > few_tokens && integers_of(args.weight.format).splits == 1;
    return tiles ? in_tiles : INFINILM_INTEGERS::linear_integers;
}

size_t scratch_bytes_of(const LinearArgs& args) { return chosen(args).scratch_bytes(args); }
size_t shared_scratch_bytes_of(const LinearArgs& args) { return chosen(args).shared_scratch_bytes(args); }
void pack_x_of_integers(const LinearArgs& args, Share share) { chosen(args).pack_x(args, share); }
void multiply_of_integers(const LinearArgs& args, Share share) { chosen(args).multiply(args, share); }

}  // namespace

extern const LinearKernels linear_integer_tiles = {scratch_bytes_of, shared_scratch_bytes_of, pack_x_of_integers,
                                                   multiply_of_integers};

}  // namespace infinilm::cpu::INFINILM_ISA

#endif
