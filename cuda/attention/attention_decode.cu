// attention_decode.cuh over a cache of 16 bits.
#include "cuda/attention/attention_decode.cuh"

namespace infinilm::cuda {

// Takes all columns at a time where a block may have as much shared memory, else kColumns.
template <class T, int D, int kColumns>
cudaError_t launch_wide_decode(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store, cudaStream_t stream) {
    static_assert(fits_any_device(DecodeShape<T, D, kColumns>::kBytes));
    bool all_fit = false;
    if (cudaError_t error = fits_device(all_fit, DecodeShape<T, D, D>::kBytes)) return error;
    return all_fit ? launch_decode<T, T, D, D>(p, store, stream) : launch_decode<T, T, D, kColumns>(p, store, stream);
}

template <class T>
static cudaError_t launch_decode_of(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store,
                                    cudaStream_t stream) {
    switch (attention_kernel_dim(p.head_dim)) {
        case 512: return launch_wide_decode<T, 512, 256>(p, store, stream);
        case 576: return launch_wide_decode<T, 576, 192>(p, store, stream);
        default:
            return visit_dim(p.head_dim, [&](auto dim) {
                constexpr int D = decltype(dim)::value;
                return launch_decode<T, T, D, D>(p, store, stream);
            });
    }
}

cudaError_t launch_attention_decode(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store,
                                    cudaStream_t stream) {
    return p.type == Element::bf16 ? launch_decode_of<bf16>(p, store, stream) : launch_decode_of<f16>(p, store, stream);
}

}  // namespace infinilm::cuda
