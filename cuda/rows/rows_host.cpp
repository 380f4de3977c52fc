#include "cuda/rows/rows_host.h"

#include "cuda/rows/kernels.h"

namespace infinilm::cuda {

cudaError_t run_join_columns(const TensorView& parts, const TensorView& out, cudaStream_t stream) {
    const int64_t columns = parts.shape(1);
    return join_columns({.parts = parts.data(),
                         .out = out.data(),
                         .out_stride = out.stride(0),
                         .num_parts = count(out.shape(1) / columns),
                         .num_rows = count(out.shape(0)),
                         .columns = count(columns)},
                        stream);
}

}  // namespace infinilm::cuda
