// RMSNorm or LayerNorm, and residual += x; out = norm(residual). Rows are split over the shares; one row is read twice
// or thrice, all but the first time from the cache (a row of 8192 floats is 32 KB). Called by CpuBackend::rms_norm and
// add_rms_norm.
#include "cpu/kernels/functions.h"
#include "cpu/kernels/norm_row.h"

namespace infinilm::cpu::INFINILM_ISA {

// LayerNorm (Ba et al. 2016); out may be x.
template <class W>
static void layer_norm_row(const float* x, const W* weight, const W* bias, float* out, int64_t n, float eps) {
    vec sum[sum_parts] = {};
    for_vectors(n, [&](int64_t i, int count) { sum[sum_part(i)] += load_partial(x + i, count); });
    const vec mean = set1(add_lanes(sum) / (float)n);
    for_vectors(n, [&](int64_t i, int count) { store_partial(out + i, load_partial(x + i, count) - mean, count); });
    const vec scale = set1(rms_scale(sum_squares<false>(out, nullptr, n), n, eps));
    for_vectors(n, [&](int64_t i, int count) {
        const vec normed = load_partial(out + i, count) * scale * load_partial(weight + i, count);
        store_partial(out + i, normed + load_partial(bias + i, count), count);
    });
}

template <class W>
static void norm_rows(const CpuNormArgs& a, int64_t begin, int64_t end) {
    const W *weight = (const W*)a.weight, *bias = (const W*)a.bias;  // [num_groups, hidden_size]
    for (int64_t t = begin; t < end; ++t) {
        const float* x = (const float*)a.x + t * a.x_stride;  // [num_groups, hidden_size]
        float sum;
        if (a.residual) {
            float* residual = (float*)a.residual + t * a.residual_stride;  // [hidden_size]
            sum = sum_squares<true>(x, residual, a.hidden_size, a.multiplier, a.scale);
            x = residual;
        } else {
            sum = sum_squares<false>(x, nullptr, a.hidden_size);
        }
        if (a.mean_square && !weight) a.mean_square[t] = sum / (float)a.hidden_size * a.multiplier;
        if (a.mean_square) sum = a.mean_square[t] * (float)a.hidden_size;
        float* const out = (float*)a.out + t * a.out_stride;
        if (bias)
            for (int64_t i = 0; i < (int64_t)a.num_groups * a.hidden_size; i += a.hidden_size)
                layer_norm_row(x + i, weight + i, bias + i, out + i, a.hidden_size, a.eps);
        else if (weight)
            scale_row(x, rms_scale(sum, a.hidden_size, a.eps), weight, out, a.hidden_size);
    }
}

void norm(const CpuNormArgs& args, Share share) {
    const int64_t num_tokens = args.num_tokens;
    const int64_t begin = num_tokens * share.index / share.count, end = num_tokens * (share.index + 1) / share.count;
    visit_element(args.element, [&](auto element) { norm_rows<decltype(element)>(args, begin, end); });
}

}  // namespace infinilm::cpu::INFINILM_ISA
