// fill_random: weights for benchmarks. Element i is a function of (seed, i) alone (Philox, device.cuh). Bytes: each
// element is written once; the ten rounds for one element make it bound by arithmetic, which at load time is enough.
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/rows/kernels.h"

namespace infinilm::cuda {

template <class T>
__global__ void __launch_bounds__(256) fill_random_kernel(T* dst, int64_t count, uint64_t seed, float range) {
    begin_kernel();
    const int64_t threads = static_cast<int64_t>(gridDim.x) * 256;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += threads)
        dst[i] = from_float<T>((2.0f * uniform(seed, static_cast<uint64_t>(i)) - 1.0f) * range);
}

cudaError_t fill_random(const FillRandomArgs& args, cudaStream_t stream) {
    if (args.count == 0) return cudaSuccess;
    const int64_t blocks = ceil_div<int64_t>(args.count, 256);
    const LaunchConfig config{dim3(static_cast<unsigned>(blocks < 8192 ? blocks : 8192)), dim3(256), 0, stream};
    const float range = args.deviation * 1.7320508f;  // a uniform in [-r, r] has deviation r / sqrt(3)
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        return launch<fill_random_kernel<T>>(config, static_cast<T*>(args.dst), args.count, args.seed, range);
    });
}

}  // namespace infinilm::cuda
