// Alternating updates of several residual streams, and rows that are made as large as others. Rows are split over the
// shares; a row is read twice, the second time from the cache. Called by CpuBackend::mix_streams and match_rms.
#include "args/stream_limits.h"
#include "cpu/kernels/functions.h"
#include "cpu/kernels/norm_row.h"

namespace infinilm::cpu::INFINILM_ISA {

// Calls f(t) for the tokens of a share.
template <class F>
INFINILM_INLINE void for_tokens(int64_t num_tokens, Share share, F f) {
    const int64_t end = num_tokens * (share.index + 1) / share.count;
    for (int64_t t = num_tokens * share.index / share.count; t < end; ++t) f(t);
}

// Sum of a[i] * b[i].
static float dot_row(const float* a, const float* b, int64_t n) {
    vec sum[sum_parts] = {};
    for_vectors(n, [&](int64_t i, int count) {
        sum[sum_part(i)] = fma(load_partial(a + i, count), load_partial(b + i, count), sum[sum_part(i)]);
    });
    return add_lanes(sum);
}

// coefficients[rows]: of a token whose active stream is x.
static void make_coefficients(const MixStreamsArgs& a, const float* x, int rows, float* coefficients) {
    const float scale = rms_scale(sum_squares<false>(x, nullptr, a.hidden_size), a.hidden_size, a.eps);
    float modes[most_streams];
    for (int k = 0; k < a.num_streams; ++k)
        modes[k] = soft_cap(set1(dot_row(x, a.router + (int64_t)k * a.hidden_size, a.hidden_size) * scale), 1)[0];
    for (int j = 0; j < rows; ++j) {
        coefficients[j] = 0;
        for (int k = 0; k < a.num_streams; ++k)
            coefficients[j] += a.coefficients[(int64_t)j * a.num_streams + k] * modes[k];
    }
}

static void predict_row(const MixStreamsArgs& a, float* x, float* streams) {
    const int n = a.num_streams;
    float coefficients[most_streams * most_streams];
    make_coefficients(a, x, n * n, coefficients);
    for_vectors(a.hidden_size, [&](int64_t i, int count) {
        vec own[most_streams];
        own[0] = load_partial(x + i, count);
        for (int k = 1; k < n; ++k) own[k] = load_partial(streams + k * a.stream_stride + i, count);
        for (int j = 0; j < n; ++j) {
            vec sum = own[j];
            for (int k = 0; k < n; ++k) sum = fma(set1(coefficients[j * n + k]), own[k], sum);
            store_partial(streams + j * a.stream_stride + i, sum, count);
            if (j == 0) store_partial(x + i, sum, count);
        }
    });
}

static void correct_row(const MixStreamsArgs& a, float* x, float* streams, float* scaled) {
    float coefficients[most_streams];
    make_coefficients(a, x, a.num_streams, coefficients);
    for_vectors(a.hidden_size, [&](int64_t i, int count) {
        const vec predicted = load_partial(streams + i, count), change = load_partial(x + i, count) - predicted;
        const vec corrected = fma(set1(1 + coefficients[0]), change, predicted);
        store_partial(x + i, corrected, count);
        for (int j = 1; j < a.num_streams; ++j) {
            float* const stream = streams + j * a.stream_stride + i;
            store_partial(stream, fma(set1(1 + coefficients[j]), change, load_partial(stream, count)), count);
        }
        if (a.scale) store_partial(scaled + i, corrected * load_partial(a.scale + i, count), count);
    });
}

void mix_streams(const MixStreamsArgs& a, Share share) {
    for_tokens(a.num_tokens, share, [&](int64_t t) {
        float* const x = (float*)a.x + t * a.x_stride;                // [hidden_size]
        float* const streams = (float*)a.streams + t * a.row_stride;  // the row of the first stream
        if (a.corrects)
            correct_row(a, x, streams, (float*)a.scaled + t * a.scaled_stride);
        else
            predict_row(a, x, streams);
    });
}

void match_rms(const MatchRmsArgs& a, Share share) {
    for_tokens(a.num_tokens, share, [&](int64_t t) {
        float* const x = (float*)a.x + t * a.x_stride;  // [hidden_size]
        const float size = (float)a.hidden_size, least = a.least;
        const float like = sum_squares<false>((const float*)a.like + t * a.like_stride, nullptr, a.hidden_size) / size;
        const float own = sum_squares<false>(x, nullptr, a.hidden_size) / size;
        const vec scale = set1(__builtin_sqrtf(like) / __builtin_sqrtf(own < least ? least : own));
        for_vectors(a.hidden_size,
                    [&](int64_t i, int count) { store_partial(x + i, load_partial(x + i, count) * scale, count); });
    });
}

}  // namespace infinilm::cpu::INFINILM_ISA
