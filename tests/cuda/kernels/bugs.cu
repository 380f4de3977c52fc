// Kernels with one mistake each, chosen at run time: test_bugs.py expects every one to be reported by name. Compiled by
// nvcc too, like everything here: the mistakes are the sort that compile.
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"

namespace infinilm::cuda {

// y = reversed x, 64 elements, by way of shared memory.
__global__ void __launch_bounds__(64) reverse_kernel(const float* x, float* y, int barrier) {
    begin_kernel();
    INFINILM_SHARED(float, tile, [64]);
    tile[threadIdx.x] = x[threadIdx.x];
    if (barrier) __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];
}

// Reads or writes element `at` of a shared array of 64, declared or dynamic (256 bytes at the launch below).
__global__ void shared_access_kernel(float* y, int at, int write, int dynamic) {
    begin_kernel();
    INFINILM_SHARED(float, declared, [64]);
    INFINILM_DYNAMIC_SHARED(smem);
    float* array = dynamic ? reinterpret_cast<float*>(smem) : declared;
    array[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 5 && write) array[at] = 2.0f;
    if (threadIdx.x == 5 && !write) y[0] = array[at];
}

// y[i] = x[i] for i < n, and one more when `extra`: 1 reads x[n], 2 writes y[n], 3 writes y[n + 4096].
__global__ void copy_elements_kernel(const float* x, float* y, int n, int extra) {
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
    if (i != n) return;
    if (extra == 1) y[0] = x[n];
    if (extra == 2) y[n] = 0.0f;
    if (extra == 3) y[n + 4096] = 0.0f;
}

// Two warps at a named barrier, of `threads_of_first` and 64 threads.
__global__ void __launch_bounds__(64) named_barrier_kernel(float* y, int threads_of_first) {
    begin_kernel();
    named_barrier_sync(3, warp_id() == 0 ? threads_of_first : 64);
    y[threadIdx.x] = 1.0f;
}
// Barrier 0 in one branch, barrier 2 in the other: no thread comes.
__global__ void __launch_bounds__(64) divergent_barrier_kernel(float* y) {
    begin_kernel();
    if (warp_id() == 0)
        __syncthreads();
    else
        named_barrier_sync(2, 64);
    y[threadIdx.x] = 1.0f;
}

// 1: half a warp shuffles with the mask of all; 2: the halves name masks that overlap; 3: a lane not in its mask;
// 4: lanes that have exited are named.
__global__ void __launch_bounds__(32) shuffle_mask_kernel(float* y, int mistake) {
    begin_kernel();
    float v = threadIdx.x;
    if (mistake == 1 && threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);
    if (mistake == 2) v += __shfl_xor_sync(threadIdx.x < 16 ? 0x0001ffffu : 0xffffffffu, v, 1);
    if (mistake == 3) v += __shfl_xor_sync(0x0000ffffu, v, 1);
    if (mistake == 4) {
        if (threadIdx.x >= 16) return;
        v += __shfl_xor_sync(0xffffffffu, v, 1);
    }
    y[threadIdx.x] = v;
}

__global__ void misaligned_kernel(const float* x, float* y) {
    begin_kernel();
    y[threadIdx.x] = __uint_as_float(load_streamed_16(x + 1).x);
}

// 1: blocks write the same element; 2: the last block reads what others wrote, without a fence; 3: as 1, after and
// before so many barriers that kernels of other host threads run meanwhile.
__global__ void blocks_kernel(float* partial, unsigned* counter, float* out, int mistake) {
    begin_kernel();
    const int barriers = mistake == 3 ? 300 : 0;
    for (int i = 0; i < barriers; ++i) __syncthreads();
    if (mistake == 1 || mistake == 3) {
        out[threadIdx.x] = blockIdx.x;
        for (int i = 0; i < barriers; ++i) __syncthreads();
        return;
    }
    if (threadIdx.x != 0) return;
    partial[blockIdx.x] = blockIdx.x;
    if (atomicAdd(counter, 1u) != gridDim.x - 1) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b];
    out[0] = sum;
}

// Waits for a block that comes later.
__global__ void spin_kernel(unsigned* flag) {
    begin_kernel();
    if (blockIdx.x == 0)
        while (load_acquire_system(flag) == 0) __nanosleep(20);
    else
        store_release_system(flag, 1u);
}

}  // namespace infinilm::cuda

using namespace infinilm::cuda;

extern "C" {
int reverse(const float* x, float* y, int barrier) {
    return launch<reverse_kernel>({dim3(1), dim3(64)}, x, y, barrier);
}
int shared_access(float* y, int at, int write, int dynamic) {
    return launch<shared_access_kernel>({dim3(1), dim3(64), 256}, y, at, write, dynamic);
}
int copy_elements(const float* x, float* y, int n, int extra) {
    return launch<copy_elements_kernel>({dim3(n / 32 + 1), dim3(32)}, x, y, n, extra);
}
int named_barrier(float* y, int threads_of_first) {
    return launch<named_barrier_kernel>({dim3(1), dim3(64)}, y, threads_of_first);
}
int divergent_barrier(float* y) { return launch<divergent_barrier_kernel>({dim3(1), dim3(64)}, y); }
int shuffle_mask(float* y, int mistake) { return launch<shuffle_mask_kernel>({dim3(1), dim3(32)}, y, mistake); }
int misaligned(const float* x, float* y) { return launch<misaligned_kernel>({dim3(1), dim3(32)}, x, y); }
int between_blocks(float* partial, unsigned* counter, float* out, int mistake, cudaStream_t stream) {
    return launch<blocks_kernel>({dim3(3), dim3(32), 0, stream}, partial, counter, out, mistake);
}
int spin(unsigned* flag) { return launch<spin_kernel>({dim3(2), dim3(1)}, flag); }
float read_on_host(const float* device) { return *device; }
}
