// Ops that write each element once: embedding, act_mul, clip, soft_cap, gather_rows, join_columns, update_step and
// sum_parts; at load time convert. Mapping: one thread per 16 bytes written (8 elements; of join_columns one of 4
// bytes), grid (row, part of the row); at load time one thread per element or fragment. Bytes: every op reads its input
// once and writes its output once, and the floor is that over the memory bandwidth; embedding reads twice the row
// (below). 16-byte accesses (kernels.h, Alignment), but for sources of load time, which need only the alignment of an
// element.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/linear/linear.cuh"
#include "cuda/linear/stored_row.cuh"
#include "cuda/rows/kernels.h"
#include "cuda/rows/sum_parts.cuh"

namespace infinilm::cuda {

constexpr int kRowThreads = 128;

// One thread per vector of a row: row blockIdx.x, vector row_vector().
__device__ __forceinline__ int row_vector() { return static_cast<int>(blockIdx.y * kRowThreads + threadIdx.x); }
static LaunchConfig row_grid(int num_rows, int vectors, cudaStream_t stream) {
    return {dim3(num_rows, ceil_div(vectors, kRowThreads)), dim3(kRowThreads), 0, stream};
}

// ---- embedding ---------------------------------------------------------------------------------------------------

// A row of a step of 16 columns lies in four lanes of the packed table, beside the row 8 above or below it: its 32
// bytes are spread over 64, of which the memory reads all.
template <class T>
__global__ void __launch_bounds__(kRowThreads) embedding_kernel(EmbeddingArgs args) {
    begin_kernel();
    const int vector = row_vector();
    if (vector >= args.table.k / 8) return;
    const int given = args.ids[blockIdx.x], known = args.known_ids > 0 && given >= args.known_ids ? 0 : given;
    const int id = known - args.first_id, step = vector / 2, r = id % 16;
    T* out = static_cast<T*>(args.out) + static_cast<int64_t>(blockIdx.x) * args.out_stride + vector * 8;  // [8]
    const uint32_t fill = args.is_part ? 0 : ~0u;  // NaN in each type
    uint4 v = make_uint4(fill, fill, fill, fill);
    const bool has_row = id >= 0 && id < args.table.n;
    if constexpr (sizeof(T) == 4) {
        const uint4* row = static_cast<const uint4*>(args.table.data) +
                           (has_row ? static_cast<int64_t>(id) * args.table.k + vector * 8 : 0) / 4;
        reinterpret_cast<uint4*>(out)[0] = has_row ? row[0] : v;
        reinterpret_cast<uint4*>(out)[1] = has_row ? row[1] : v;
    } else {
        if (has_row && args.table.format != WeightFormat::as_type) {
            float row[8];
            stored_row(args.table, id, vector, row);
            v = pack8<T>(row);
        } else if (has_row) {
            const uint32_t* fragments = static_cast<const uint32_t*>(args.table.data) +
                                        (static_cast<int64_t>(id / 16) * num_steps(args.table.k) + step) * 128;
            const uint32_t* words = fragments + r % 8 * 16 + r / 8 + vector % 2 * 2;  // register, of lane 4 (r % 8)
            v = make_uint4(words[0], words[4], words[8], words[12]);
        }
        *reinterpret_cast<uint4*>(out) = v;
    }
    if (args.multiplier == 1.0f) return;
    float x[8];
    load8(out, x);  // what this thread has just written
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], args.multiplier);
    store8(out, x);
}

cudaError_t embedding(const EmbeddingArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    LaunchConfig config = row_grid(args.num_tokens, args.table.k / 8, stream);
    config.in_order = true;  // it comes behind update_step: attention may look at tables before it waits
    return visit(args.table.type, [&](auto t) { return launch<embedding_kernel<decltype(t)>>(config, args); });
}

// ---- act_mul ----------------------------------------------------------------------------------------------------

// gelu, quick_gelu, relu, xielu, clamped_silu or softplus of a stored value, times up. No linear joins them, so they
// are here alone.
__device__ __forceinline__ float apart_mul(const ActMulArgs& args, float gate, float up) {
    const Activation activation = args.activation;
    if (activation == Activation::xielu) {
        const float c = gate > -1e-6f ? -1e-6f : gate;
        const float below = __fmul_rn(__fadd_rn(expm1f(c), -gate), args.alpha_n);
        const float above = __fmul_rn(__fmul_rn(gate, gate), args.alpha_p);
        return __fmul_rn(__fmaf_rn(gate, 0.5f, gate > 0.0f ? above : below), up);
    }
    if (activation == Activation::quick_gelu) return __fmul_rn(gate / (1.0f + expf(__fmul_rn(gate, -1.702f))), up);
    if (activation == Activation::relu) return __fmul_rn(gate < 0.0f ? 0.0f : gate, up);  // a NaN stays one
    if (activation == Activation::softplus) return __fmul_rn(fmaxf(gate, 0.0f) + log1pf(expf(-fabsf(gate))), up);
    if (activation == Activation::clamped_silu) {
        const float x = gate / (1.0f + expf(-gate)), limit = args.limit;
        return __fmul_rn(x > limit ? limit : x, up > limit ? limit : up < -limit ? -limit : up);
    }
    return __fmul_rn(__fmul_rn(gate, __fmul_rn(0.5f, erfcf(__fmul_rn(gate, -0.70710678f)))), up);
}
template <class T>
__global__ void __launch_bounds__(kRowThreads) act_mul_kernel(ActMulArgs args) {
    begin_kernel();
    const int i = row_vector() * 8;
    if (i >= args.intermediate_size) return;
    const T* gates = static_cast<const T*>(args.gate) + static_cast<int64_t>(blockIdx.x) * args.gate_stride;
    float x[8], up[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (args.group == 1) {
        load8(gates + i, x);
    } else {  // a multiple of 8
        const float shared = to_float(gates[i / args.group]);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = shared;
    }
    if (args.up) load8(static_cast<const T*>(args.up) + static_cast<int64_t>(blockIdx.x) * args.up_stride + i, up);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        x[j] = is_apart(args.activation) ? apart_mul(args, x[j], up[j]) : act_mul<T>(args.activation, x[j], up[j]);
    store8(static_cast<T*>(args.out) + static_cast<int64_t>(blockIdx.x) * args.out_stride + i, x);
}

cudaError_t act_mul(const ActMulArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config = row_grid(args.num_tokens, args.intermediate_size / 8, stream);
    return visit(args.type, [&](auto t) { return launch<act_mul_kernel<decltype(t)>>(config, args); });
}

// ---- clip --------------------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kRowThreads) clip_kernel(ClipArgs args) {
    begin_kernel();
    const int i = row_vector() * 8;
    if (i >= args.n) return;
    float x[8];
    load8(static_cast<const T*>(args.x) + static_cast<int64_t>(blockIdx.x) * args.x_stride + i, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float raised = x[j] < args.low ? args.low : x[j];
        x[j] = raised > args.high ? args.high : raised;
    }
    store8(static_cast<T*>(args.out) + static_cast<int64_t>(blockIdx.x) * args.out_stride + i, x);
}

cudaError_t clip(const ClipArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    const LaunchConfig config = row_grid(args.num_rows, args.n / 8, stream);
    return visit(args.type, [&](auto t) { return launch<clip_kernel<decltype(t)>>(config, args); });
}

// ---- soft_cap ----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kRowThreads) soft_cap_kernel(SoftCapArgs args) {
    begin_kernel();
    float* const x = args.x + static_cast<int64_t>(blockIdx.x) * args.x_stride;
    for (int i = row_vector() * 8; i < min(args.n, row_vector() * 8 + 8); ++i)
        x[i] = __fmul_rn(args.cap, tanhf(x[i] / args.cap));
}

cudaError_t soft_cap(const SoftCapArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0 || args.n == 0) return cudaSuccess;
    return launch<soft_cap_kernel>(row_grid(args.num_rows, ceil_div(args.n, 8), stream), args);
}

// ---- gather_rows -------------------------------------------------------------------------------------------------

// The same for all types: a row is `vectors` times 16 bytes; strides in those, too.
__global__ void __launch_bounds__(kRowThreads)
    gather_rows_kernel(const uint4* x, const int* rows, uint4* out, int64_t x_stride, int64_t out_stride, int vectors) {
    begin_kernel();
    const int i = row_vector();
    if (i < vectors) out[blockIdx.x * out_stride + i] = x[rows[blockIdx.x] * x_stride + i];
}

cudaError_t gather_rows(const GatherRowsArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0) return cudaSuccess;
    const int per_vector = 16 / size_bytes(args.type), vectors = args.hidden_size / per_vector;
    return launch<gather_rows_kernel>(row_grid(args.num_rows, vectors, stream), static_cast<const uint4*>(args.x),
                                      args.rows, static_cast<uint4*>(args.out), args.x_stride / per_vector,
                                      args.out_stride / per_vector, vectors);
}

// ---- join_columns ------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kRowThreads) join_columns_kernel(JoinColumnsArgs args) {
    begin_kernel();
    const int i = row_vector(), part = static_cast<int>(blockIdx.x) / args.num_rows,
              row = static_cast<int>(blockIdx.x) % args.num_rows;
    if (i >= args.columns) return;
    static_cast<uint32_t*>(args.out)[row * args.out_stride + static_cast<int64_t>(part) * args.columns + i] =
        static_cast<const uint32_t*>(args.parts)[int64_t{blockIdx.x} * args.columns + i];
}

cudaError_t join_columns(const JoinColumnsArgs& args, cudaStream_t stream) {
    if (args.num_rows == 0 || args.columns == 0) return cudaSuccess;
    return launch<join_columns_kernel>(row_grid(args.num_parts * args.num_rows, args.columns, stream), args);
}

// ---- update_step -------------------------------------------------------------------------------------------------

// Thread i: token i and entry i. Mostly a few hundred bytes at the head of a step, which cost a launch and no more.
__global__ void __launch_bounds__(kRowThreads) update_step_kernel(UpdateStepArgs args) {
    begin_kernel();
    const int i = static_cast<int>(blockIdx.x * kRowThreads + threadIdx.x);
    if (i < args.num_tokens && args.rows[i] >= 0) args.ids[i] = max(args.previous_ids[args.rows[i]], 0);
    if (i < args.num_entries) args.table[args.entries[i].x] = args.entries[i].y;
}

cudaError_t update_step(const UpdateStepArgs& args, cudaStream_t stream) {
    const int count = std::max(args.num_tokens, args.num_entries);
    if (count == 0) return cudaSuccess;
    const LaunchConfig config{dim3(ceil_div(count, kRowThreads)), dim3(kRowThreads), 0, stream};
    return launch<update_step_kernel>(config, args);
}

// ---- sum_parts ---------------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kRowThreads) sum_parts_kernel(SumPartsArgs args) {
    begin_kernel();
    const int64_t i = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) * 8;
    if (i >= args.size) return;
    float total[8];
    sum_parts8<T>(static_cast<const uint8_t*>(args.parts) + i * sizeof(T), args.size * sizeof(T), args.num_parts,
                  total);
    store8(static_cast<T*>(args.out) + i, total);
}

cudaError_t sum_parts(const SumPartsArgs& args, cudaStream_t stream) {
    if (args.size == 0) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(args.size / 8, kRowThreads)));
    return visit(args.type, [&](auto t) {
        return launch<sum_parts_kernel<decltype(t)>>({grid, dim3(kRowThreads), 0, stream}, args);
    });
}

}  // namespace infinilm::cuda
