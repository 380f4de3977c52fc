// What candidates of a draw are measured by: their order, their weights, and the bins of a histogram of logits.
#pragma once

#include "cuda/core/device.cuh"

namespace infinilm::cuda {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBins = 2048, kThreadBins = kBins / kThreads;
constexpr int kListed = kThreads;  // candidates that fit the list
constexpr int kBatch = 8;          // loads in flight per thread
constexpr int kMostOfCluster = 8;  // blocks of a row: a cluster that every GPU with clusters has room for
constexpr int kMostBlocks = 16;    // of a row without clusters, where the double units of some GPUs are few
constexpr unsigned kAll = 0xffffffffu;

// ---- the order ---------------------------------------------------------------------------------------------------

// Earlier candidates have smaller keys; -0 ties with 0; NaN comes before everything.
constexpr uint32_t kKeyOfInfinity = 0x007fffffu, kKeyOfMinusInfinity = 0xff800000u;
__device__ __forceinline__ uint32_t order_key(float logit) {
    const uint32_t bits = logit == 0.0f ? 0u : __float_as_uint(logit);
    return logit != logit ? 0u : bits >> 31 ? bits : ~bits & 0x7fffffffu;
}
__device__ __forceinline__ float logit_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key : ~key & 0x7fffffffu);
}

// A candidate's place in the order.
__device__ __forceinline__ uint64_t order_of(uint32_t key, uint32_t id) {
    return static_cast<uint64_t>(key) << 32 | id;
}
__device__ __forceinline__ uint32_t key_of(uint64_t order) { return static_cast<uint32_t>(order >> 32); }
constexpr uint64_t kLast = ~uint64_t{0};

// ---- weights -----------------------------------------------------------------------------------------------------

// p times 2^n, where n is in the low bits of `shifted`.
__device__ __forceinline__ double times_power(double p, double shifted) {
    uint64_t bits, exponent;
    memcpy(&bits, &p, 8);
    memcpy(&exponent, &shifted, 8);
    bits += exponent << 52;
    memcpy(&p, &bits, 8);
    return p;
}

// exp_vectorised of src/cpu/sampling.cpp, operation by operation: e^x for x in [-700, 0] to 1 ulp.
__device__ __forceinline__ double exp_exact(double x) {
    const double shifted = __dadd_rn(__dmul_rn(x, 0x1.71547652b82fep0), 0x1.8p52), n = __dadd_rn(shifted, -0x1.8p52);
    const double r = __dadd_rn(__dadd_rn(x, -__dmul_rn(n, 0x1.62e42fee00000p-1)), -__dmul_rn(n, 0x1.a39ef35793c76p-33));
    constexpr double coefficients[] = {
        1.0 / 6227020800.0, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720,          1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
    double p = coefficients[0];
#pragma unroll
    for (int i = 1; i < 14; ++i) p = __dadd_rn(__dmul_rn(p, r), coefficients[i]);
    return times_power(p, shifted);
}

// exp((logit - largest) / temperature) in units of 1 / one; 0 for what weighs less than least.
struct Weights {
    static constexpr bool kNarrow = false;
    float largest, temperature_f, reach;  // nothing further than `reach` below the largest weighs anything
    double temperature, inverse, one;
    double shift;  // adding it leaves the rounded integer and the exponent of `one` in the low bits
    uint64_t least = 0;

    __device__ __forceinline__ Weights(float largest_logit, float t, int vocab_size)
        : largest(largest_logit), temperature_f(t) {
        reach = fminf(__fmul_rn(32.0f, t), 3.402823466e38f);
        temperature = static_cast<double>(t);
        inverse = 1.0 / temperature;
        const int width = 32 - __clz(vocab_size), exponent = 45 < 63 - width ? 45 : 63 - width;
        one = static_cast<double>(uint64_t{1} << exponent);
        shift = 0x1.8p52 + exponent;
    }
    // From here on what weighs less than that share of the largest, 0 to 1, weighs nothing.
    __device__ __forceinline__ void drop_below(float min_p) {
        const double exact = __dmul_rn(static_cast<double>(min_p), one);
        least = static_cast<uint64_t>(ceil(exact));
        // Rounding, of weights by 2^-11 of the least and in this line, is far less than the margin added here.
        if (exact >= 1024.0) reach = fminf(reach, temperature_f * (0.001f - 1.001f * logf(min_p)));
    }
    __device__ __forceinline__ uint64_t operator()(float logit) const {
        // The quotient, correctly rounded (Markstein 1990): two corrections of a product.
        const double x = __dadd_rn(static_cast<double>(logit), -static_cast<double>(largest));
        double quotient = __dmul_rn(x, inverse);
#pragma unroll
        for (int i = 0; i < 2; ++i) quotient = __fma_rn(__fma_rn(-quotient, temperature, x), inverse, quotient);
        const uint64_t weight = integer_of(__dadd_rn(__dmul_rn(exp_exact(quotient), one), 0x1p52));
        return __fadd_rn(largest, -logit) <= reach && weight >= least ? weight : 0;
    }
    // The same of what is in reach, in half as many operations, and without branches, so that two of them take turns in
    // the double units. `sure`: what it lacks in exactness, 2^-45 of itself, does not change how it is rounded.
    __device__ __forceinline__ uint64_t quick(float logit, bool& sure) const {
        // Against operator(): the quotient is off by 2^-46.4 at most (2^-52 of up to 32, and its rounding), the
        // polynomial by 2^-50. `one` is a power of two, whose exponent comes with that of the result.
        const double x = __dadd_rn(static_cast<double>(logit), -static_cast<double>(largest));
        const double quotient = __dmul_rn(x, inverse);
        const double shifted = __fma_rn(quotient, 0x1.71547652b82fep0, shift), n = __dadd_rn(shifted, -shift);
        const double r = __fma_rn(-n, 0x1.a39ef35793c76p-33, __fma_rn(-n, 0x1.62e42fee00000p-1, quotient));
        constexpr double coefficients[] = {
            1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
            1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
        double p = coefficients[0];
#pragma unroll
        for (int i = 1; i < 13; ++i) p = __fma_rn(p, r, coefficients[i]);
        const double weight = times_power(p, shifted);
        const uint64_t low = integer_of(__fma_rn(weight, 1.0 - 0x1p-45, 0x1p52));
        sure = low == integer_of(__fma_rn(weight, 1.0 + 0x1p-45, 0x1p52));
        return low >= least ? low : 0;
    }

private:
    // That 2^52 was added to.
    __device__ static __forceinline__ uint64_t integer_of(double rounded) {
        uint64_t integer;
        memcpy(&integer, &rounded, 8);
        return integer & 0xfffffffffffffu;
    }
};

// ---- bins --------------------------------------------------------------------------------------------------------

// Equal parts of the distance from the largest logit, as far as candidates count: the bin never falls with the logit.
struct Bins {
    float largest = 0, reach = 0, per_bin = 0;

    Bins() = default;
    // Between the smallest and the largest of a row; what is further than `reach` below the largest does not count.
    // Where the largest is +inf, everything else is far away, in one bin.
    __device__ __forceinline__ Bins(float largest_logit, float smallest, float most)
        : largest(fminf(largest_logit, 3.402823466e38f)), reach(most) {
        const float span = fminf(fminf(most, __fadd_rn(largest, -smallest)), 3.402823466e38f);
        per_bin = fminf(static_cast<float>(kBins) / span, 1e30f);
    }
    __device__ __forceinline__ bool holds(float logit) const { return __fadd_rn(largest, -logit) <= reach; }
    // Rounded by adding 2^23, which is cheaper than a conversion.
    __device__ __forceinline__ int operator()(float logit) const {
        const float shifted = __fmaf_rn(__fadd_rn(largest, -logit), per_bin, 0x1p23f);
        return min(__float_as_int(shifted), __float_as_int(0x1p23f) + kBins - 1) & (2 * kBins - 1);
    }
};

}  // namespace infinilm::cuda
