// One small kernel for each portable primitive of device.cuh and ptx.cuh, with a C function that launches it. Called
// by emulator_cases.py through ctypes; also compiled by nvcc for sm_80 and sm_90a. Every function returns the error of
// its launch.
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"

namespace infinilm::cuda {

// y[i] = narrowed x[i], z[i] = widened y[i]
template <class T>
__global__ void convert_kernel(const float* x, T* y, float* z, uint32_t* packed, int n) {
    begin_kernel();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        y[i] = from_float<T>(x[i]);
        z[i] = to_float(y[i]);
        if (i % 2 == 0 && i + 1 < n) packed[i / 2] = pack2<T>(x[i], x[i + 1]);
    }
}

// out[row] = sum, out[rows + row] = max of row; one warp a row
__global__ void __launch_bounds__(32) reduce_kernel(const float* x, float* out, int n) {
    begin_kernel();
    float sum = 0.0f, largest = -INFINITY;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        sum += x[blockIdx.x * n + i];
        largest = fmaxf(largest, x[blockIdx.x * n + i]);
    }
    sum = warp_sum(sum);
    largest = warp_max(largest);
    if (threadIdx.x != 0) return;
    out[blockIdx.x] = sum;
    out[gridDim.x + blockIdx.x] = largest;
}

// The shuffles and votes of one warp, 8 results a lane
__global__ void shuffle_kernel(const int* x, int* out) {
    begin_kernel();
    const int lane = threadIdx.x, v = x[lane];
    out[lane] = __shfl_sync(0xffffffffu, v, 5);
    out[32 + lane] = __shfl_xor_sync(0xffffffffu, v, 3);
    out[64 + lane] = __shfl_down_sync(0xffffffffu, v, 2);
    out[96 + lane] = __shfl_up_sync(0xffffffffu, v, 1);
    out[128 + lane] = __shfl_sync(0xffffffffu, v, 1, 8);
    out[160 + lane] = static_cast<int>(__ballot_sync(0xffffffffu, v % 3 == 0));
    out[192 + lane] = __any_sync(0xffffffffu, v == 100) * 2 + __all_sync(0xffffffffu, v < 1000);
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;  // two halves on their own
    out[224 + lane] = __shfl_xor_sync(half, v, 1);
}

__global__ void uniform_kernel(uint64_t seed, uint64_t position, float* out, int n) {
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = uniform(seed, position + i);
}

// y = x by 16-byte loads, n pieces; exp2 of the first float of each
__global__ void copy_kernel(const uint4* x, uint4* y, float* exps, int n) {
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint4 v = i % 2 ? load_streamed_16(x + i) : load_readonly_16(x + i);
    y[i] = v;
    exps[i] = exp2_approx(__uint_as_float(v.x));
}

// Two halves of a block, each with a named barrier: a warp adds in its turn.
__global__ void __launch_bounds__(128) turns_kernel(int* out, int rounds) {
    begin_kernel();
    INFINILM_SHARED(int, totals, [2]);
    const int warp = warp_id(), half = warp / 2;
    if (threadIdx.x % 64 == 0) totals[half] = 0;
    for (int turn = 0; turn < 2 * rounds; ++turn) {
        named_barrier_sync(1 + half, 64);
        if (turn % 2 == warp % 2 && lane_id() == 0) totals[half] += warp + 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) out[0] = totals[0] + totals[1];
}

// The sum of n numbers: a partial sum per block, added in order by whichever block arrives last.
__global__ void __launch_bounds__(64)
    last_arriver_kernel(const float* x, float* partial, unsigned* counter, float* out, int n, int acquire_release) {
    begin_kernel();
    INFINILM_SHARED(float, sums, [2]);
    INFINILM_SHARED(unsigned, arrived, [1]);
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    sum = warp_sum(sum);
    if (lane_id() == 0) sums[warp_id()] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sums[0] + sums[1];
        if (acquire_release) {
            arrived[0] = atomic_add_acq_rel(counter, 1u);
        } else {
            __threadfence();
            arrived[0] = atomicAdd(counter, 1u);
            __threadfence();
        }
    }
    __syncthreads();
    if (arrived[0] != gridDim.x - 1 || threadIdx.x != 0) return;
    float total = 0.0f;
    for (unsigned b = 0; b < gridDim.x; ++b) total += partial[b];
    out[0] = total;
    counter[0] = 0;  // ready for the next launch
}

// y += x, on whatever stream: for the tests of the runtime
__global__ void accumulate_kernel(const float* x, float* y, int n) {
    begin_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
}

// Four 8x8 matrices in shared memory as ldmatrix deals them out: out[lane][j], plain and transposed
__global__ void ldmatrix_kernel(const uint16_t* x, uint32_t* out) {
    begin_kernel();
    INFINILM_SHARED(uint4, tile, [32]);
    tile[threadIdx.x] = reinterpret_cast<const uint4*>(x)[threadIdx.x];
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, &tile[threadIdx.x]);
    for (int j = 0; j < 4; ++j) out[threadIdx.x * 4 + j] = r[j];
    ldmatrix_x4_trans(r, &tile[threadIdx.x]);
    for (int j = 0; j < 4; ++j) out[128 + threadIdx.x * 4 + j] = r[j];
}

// d[lane][4] from fragments given as they are in the registers: a[lane][4], b[lane][2], c[lane][4]
template <class T>
__global__ void mma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
    begin_kernel();
    const int lane = threadIdx.x;
    uint32_t ra[4], rb[2];
    float rd[4];
    for (int i = 0; i < 4; ++i) ra[i] = a[lane * 4 + i], rd[i] = c[lane * 4 + i];
    for (int i = 0; i < 2; ++i) rb[i] = b[lane * 2 + i];
    mma_m16n8k16<T>(rd, ra, rb);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = rd[i];
}

}  // namespace infinilm::cuda

using namespace infinilm::cuda;

extern "C" {

int convert_bf16(const float* x, bf16* y, float* z, uint32_t* packed, int n) {
    return launch<convert_kernel<bf16>>({dim3(4), dim3(64)}, x, y, z, packed, n);
}
int convert_f16(const float* x, f16* y, float* z, uint32_t* packed, int n) {
    return launch<convert_kernel<f16>>({dim3(4), dim3(64)}, x, y, z, packed, n);
}
int reduce(const float* x, float* out, int rows, int n) {
    return launch<reduce_kernel>({dim3(rows), dim3(32)}, x, out, n);
}
int shuffle(const int* x, int* out) { return launch<shuffle_kernel>({dim3(1), dim3(32)}, x, out); }
int uniforms(uint64_t seed, uint64_t position, float* out, int n) {
    return launch<uniform_kernel>({dim3(ceil_div(n, 32)), dim3(32)}, seed, position, out, n);
}
int copy(const uint4* x, uint4* y, float* exps, int n) {
    return launch<copy_kernel>({dim3(ceil_div(n, 32)), dim3(32)}, x, y, exps, n);
}
int turns(int* out, int rounds) { return launch<turns_kernel>({dim3(1), dim3(128)}, out, rounds); }
int last_arriver(const float* x, float* partial, unsigned* counter, float* out, int n, int blocks,
                 int acquire_release) {
    return launch<last_arriver_kernel>({dim3(blocks), dim3(64)}, x, partial, counter, out, n, acquire_release);
}
int accumulate(const float* x, float* y, int n, cudaStream_t stream, int threads, int smem_bytes) {
    return launch<accumulate_kernel>(
        {dim3(ceil_div(n, threads)), dim3(threads), static_cast<size_t>(smem_bytes), stream}, x, y, n);
}
int ldmatrix(const uint16_t* x, uint32_t* out) { return launch<ldmatrix_kernel>({dim3(1), dim3(32)}, x, out); }
int mma_bf16(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
    return launch<mma_kernel<bf16>>({dim3(1), dim3(32)}, a, b, c, d);
}
int mma_f16(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
    return launch<mma_kernel<f16>>({dim3(1), dim3(32)}, a, b, c, d);
}
}
