#include "codes/quantise.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/shares.h"
#include "numerics/quantise.h"

namespace infinilm::codes {

namespace {

constexpr int num_lanes = 4;  // what any x86-64 and aarch64 has

struct FourLanes {
    using Float = float __attribute__((vector_size(16)));
    using Int = int32_t __attribute__((vector_size(16)));
    static Float set1(float v) { return Float{v, v, v, v}; }
    static Float absolute(Float v) { return v < 0.0f ? -v : v; }
    static Float fma(Float a, Float b, Float c) { return a * b + c; }
    static Float bf16(Float v) {
        const Int bits = std::bit_cast<Int>(v);
        return std::bit_cast<Float>((bits + 0x7fff + (bits >> 16 & 1)) & ~0xffff);
    }
    static Int nearest(Float v) { return std::bit_cast<Int>(v + 0x1.8p23f) - 0x4b400000; }  // |v| < 2^22
    static Float to_float(Int v) { return __builtin_convertvector(v, Float); }
};

}  // namespace

void quantise_int4(const float* weights, int64_t num_rows, int64_t num_columns, int64_t group_size, int8_t* codes,
                   infinilm::bf16* scales, int num_threads) {
    const int64_t strips = (num_rows + num_lanes - 1) / num_lanes, groups = num_columns / group_size;
    const int64_t shares = std::clamp<int64_t>(num_threads, 1, std::max<int64_t>(strips, 1));
    run_shares(shares, [&](int64_t share) {
        std::vector<FourLanes::Float> values(static_cast<size_t>(group_size));
        for (int64_t strip = strips * share / shares; strip < strips * (share + 1) / shares; ++strip) {
            const int64_t row = strip * num_lanes, rows = std::min<int64_t>(num_lanes, num_rows - row);
            for (int64_t group = 0; group < groups; ++group) {
                for (int64_t k = 0; k < group_size; ++k)
                    for (int64_t r = 0; r < num_lanes; ++r)
                        values[k][r] = r < rows ? weights[(row + r) * num_columns + group * group_size + k] : 0.0f;
                const auto value = [&](int k) { return values[k]; };
                const FourLanes::Float scale = quantise::int4_scale<FourLanes>(value, static_cast<int>(group_size));
                const FourLanes::Float inverse = quantise::inverse_or_zero<FourLanes>(scale);
                for (int64_t r = 0; r < rows; ++r)
                    scales[(row + r) * groups + group] = from_float<infinilm::bf16>(scale[r]);
                for (int64_t k = 0; k < group_size; ++k) {
                    const FourLanes::Int q = quantise::int4<FourLanes>(values[k], inverse);
                    for (int64_t r = 0; r < rows; ++r)
                        codes[(row + r) * num_columns + group * group_size + k] = static_cast<int8_t>(q[r]);
                }
            }
        }
    });
}

}  // namespace infinilm::codes
