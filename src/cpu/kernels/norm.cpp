// RMSNorm, and residual += x; out = RMSNorm(residual). Rows are split over the shares; one row is read twice, the
// second time from the cache (a row of 8192 floats is 32 KB). Called by CpuBackend::rms_norm and add_rms_norm.
#include "cpu/kernels/functions.h"
#include "cpu/kernels/norm_row.h"

namespace infinilm::cpu::INFINILM_ISA {

template <class W>
static void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
    const W* weight = (const W*)a.weight;  // [hidden_size]
    for (int64_t t = begin; t < end; ++t) {
        const float* x = a.x + t * a.x_stride;  // [hidden_size]
        float sum;
        if (a.residual) {
            float* residual = a.residual + t * a.residual_stride;  // [hidden_size]
            sum = sum_squares<true>(x, residual, a.hidden_size, a.multiplier);
            x = residual;
        } else {
            sum = sum_squares<false>(x, nullptr, a.hidden_size);
        }
        if (weight) scale_row(x, rms_scale(sum, a.hidden_size, a.eps), weight, a.out + t * a.out_stride, a.hidden_size);
    }
}

void norm(const NormArgs& args, Share share) {
    const int64_t begin = args.num_tokens * share.index / share.count;
    const int64_t end = args.num_tokens * (share.index + 1) / share.count;
    visit_element(args.element, [&](auto element) { norm_rows<decltype(element)>(args, begin, end); });
}

}  // namespace infinilm::cpu::INFINILM_ISA
