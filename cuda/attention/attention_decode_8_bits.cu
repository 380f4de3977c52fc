// attention_decode.cuh over a cache of 8 bits. Wide heads have some of their columns in shared memory at a time, so few
// that a block of any device has room for them.
#include "cuda/attention/attention_decode.cuh"

namespace infinilm::cuda {

template <class T, int D, int kColumns = D>
static cudaError_t launch_widening(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store,
                                   cudaStream_t stream) {
    static_assert(fits_any_device(DecodeShape<uint8_t, D, kColumns>::kBytes));
    return launch_decode<T, uint8_t, D, kColumns>(p, store, stream);
}

template <class T>
static cudaError_t launch_widening_of(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store,
                                      cudaStream_t stream) {
    switch (attention_kernel_dim(p.head_dim)) {
        case 32: return launch_widening<T, 32>(p, store, stream);
        case 64: return launch_widening<T, 64>(p, store, stream);
        case 80: return launch_widening<T, 80>(p, store, stream);
        case 96: return launch_widening<T, 96>(p, store, stream);
        case 128: return launch_widening<T, 128>(p, store, stream);
        case 256: return launch_widening<T, 256, 128>(p, store, stream);
        case 512: return launch_widening<T, 512, 128>(p, store, stream);
        default: return launch_widening<T, 576, 64>(p, store, stream);
    }
}

cudaError_t launch_attention_decode_8_bits(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store,
                                           cudaStream_t stream) {
    return p.type == Element::bf16 ? launch_widening_of<bf16>(p, store, stream)
                                   : launch_widening_of<f16>(p, store, stream);
}

}  // namespace infinilm::cuda
