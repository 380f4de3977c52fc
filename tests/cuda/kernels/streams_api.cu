// C functions over the launchers of streams.cu and sparsify.cu, for streams_cases.py.
#include "cuda/rows/kernels.h"

using namespace infinilm;

extern "C" {

int moment_of_rows(const void* x, const float* centre, float* out, int64_t x_stride, int num_tokens, int size,
                   float multiplier, int type) {
    return cuda::row_moment({x, centre, out, x_stride, num_tokens, size, multiplier, static_cast<Element>(type)},
                            nullptr);
}

int sparsify_rows(void* x, const float* mean, const float* variance, int64_t x_stride, int num_tokens, int size,
                  float deviations, int type) {
    return cuda::sparsify({x, mean, variance, x_stride, num_tokens, size, deviations, static_cast<Element>(type)},
                          nullptr);
}

int match_rms_of_rows(void* x, const void* like, int64_t x_stride, int64_t like_stride, int num_tokens, int hidden_size,
                      float least, int type) {
    return cuda::match_rms({x, like, x_stride, like_stride, num_tokens, hidden_size, least, static_cast<Element>(type)},
                           nullptr);
}

int mix_streams_of_rows(void* x, void* streams, const float* router, const float* coefficients, const float* scale,
                        void* scaled, int64_t x_stride, int64_t stream_stride, int64_t row_stride,
                        int64_t scaled_stride, int num_tokens, int num_streams, int hidden_size, bool corrects,
                        float eps, int type) {
    return cuda::mix_streams(
        {x, streams, router, coefficients, scale, scaled, x_stride, stream_stride, row_stride, scaled_stride,
         num_tokens, num_streams, hidden_size, corrects, eps, static_cast<Element>(type)},
        nullptr);
}

}  // extern "C"
