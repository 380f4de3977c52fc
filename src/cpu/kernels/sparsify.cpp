// Mean and variance of rows, and rows of which only the largest elements are left. Rows are split over the shares.
// Called by CpuBackend::row_moment and sparsify.
#include "cpu/kernels/functions.h"
#include "cpu/kernels/lane_sums.h"

namespace infinilm::cpu::INFINILM_ISA {

void row_moment(const RowMomentArgs& a, Share share) {
    const int64_t end = (int64_t)a.num_tokens * (share.index + 1) / share.count;
    for (int64_t t = (int64_t)a.num_tokens * share.index / share.count; t < end; ++t) {
        const float* const x = (const float*)a.x + t * a.x_stride;  // [size]
        const vec centre = set1(a.centre ? a.centre[t] : 0);
        vec sum[sum_parts] = {};
        for_vectors(a.size, [&](int64_t i, int count) {
            const vec own = load_partial(x + i, count);
            if (!a.centre) {
                sum[sum_part(i)] += own;
            } else {
                const vec away = keep_lanes(own - centre, 0, count, 0);
                sum[sum_part(i)] = fma(away, away, sum[sum_part(i)]);
            }
        });
        a.out[t] = add_lanes(sum) / (float)a.size * a.multiplier;
    }
}

void sparsify(const SparsifyArgs& a, Share share) {
    const int64_t end = (int64_t)a.num_tokens * (share.index + 1) / share.count;
    for (int64_t t = (int64_t)a.num_tokens * share.index / share.count; t < end; ++t) {
        float* const x = (float*)a.x + t * a.x_stride;  // [size]
        const vec least = set1(a.mean[t] + a.deviations * __builtin_sqrtf(a.variance[t]));
        for_vectors(a.size, [&](int64_t i, int count) {
            store_partial(x + i, relu(load_partial(x + i, count) - least), count);
        });
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
