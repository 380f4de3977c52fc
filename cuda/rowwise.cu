// Ops that write each element once: embedding, act_mul, soft_cap, gather_rows, update_step and sum_parts; at load time
// convert, pack_weight. Mapping: one thread per 16 bytes written (8 elements), grid (row, part of the row); at load
// time one thread per element or fragment. Bytes: every op reads its input once and writes its output once, and the
// floor is that over the memory bandwidth; embedding reads twice the row (below). 16-byte accesses (kernels.h,
// Alignment), but for sources of load time, which need only the alignment of an element.
#include "../src/numerics/quantise.h"
#include "launch.cuh"
#include "linear.cuh"
#include "norm.cuh"
#include "sum_parts.cuh"
#include "visit.cuh"

namespace infinilm::cuda {

constexpr int kRowThreads = 128;

// One thread per vector of a row: row blockIdx.x, vector row_vector().
__device__ __forceinline__ int row_vector() { return static_cast<int>(blockIdx.y * kRowThreads + threadIdx.x); }
static LaunchConfig row_grid(int num_rows, int vectors, cudaStream_t stream) {
    return {dim3(num_rows, ceil_div(vectors, kRowThreads)), dim3(kRowThreads), 0, stream};
}

// ---- embedding ---------------------------------------------------------------------------------------------------

// Columns 8 vector .. of a row of a quantised weight; where they lie, weight_formats.cuh says.
__device__ __forceinline__ void stored_row(const PackedWeight& w, int row, int vector, float (&values)[8]) {
    const int step = vector / 2, steps = unit_steps(w.format), unit = step / steps, within = step % steps, r = row % 16;
    const uint8_t* bytes = static_cast<const uint8_t*>(w.data) +
                           (static_cast<int64_t>(row / 16) * num_units(w) + unit) * unit_bytes(w.format);
    const bool is_int4 = w.format == WeightFormat::int4;
    const float scale = is_int4
                            ? to_float(reinterpret_cast<const bf16*>(bytes + 512)[r % 8 * 4 + within / 2 * 2 + r / 8])
                            : row_scales(w)[row];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // lanes
        const int word = (is_int4 ? within / 2 : within) * 2 + r / 8;
        const uint32_t bits = reinterpret_cast<const uint32_t*>(bytes)[(r % 8 * 4 + i) * 4 + word];
        if (is_int4) {
            const int at = 4 * (within % 2 * 2 + vector % 2);
            values[2 * i] = static_cast<float>(static_cast<int>(bits >> at & 15) - 8);
            values[2 * i + 1] = static_cast<float>(static_cast<int>(bits >> at >> 16 & 15) - 8);
        } else {
            const uint32_t pair = bits >> vector % 2 * 8;
            const bool is_int8 = w.format == WeightFormat::int8;
            const uint32_t exact = is_int8 ? widen_int8<f16>(pair) : widen_fp8<f16>(pair);
            values[2 * i] = unpack_low<f16>(exact), values[2 * i + 1] = unpack_high<f16>(exact);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(values[i], scale);
}

// A row of a step of 16 columns lies in four lanes of the packed table, beside the row 8 above or below it: its 32
// bytes are spread over 64, of which the memory reads all.
template <class T>
__global__ void __launch_bounds__(kRowThreads) embedding_kernel(EmbeddingArgs args) {
    begin_kernel();
    const int vector = row_vector();
    if (vector >= args.table.k / 8) return;
    const int id = args.ids[blockIdx.x] - args.first_id, step = vector / 2, r = id % 16;
    T* out = static_cast<T*>(args.out) + static_cast<int64_t>(blockIdx.x) * args.out_stride + vector * 8;  // [8]
    const uint32_t fill = args.is_part ? 0 : ~0u;  // NaN in each type
    uint4 v = make_uint4(fill, fill, fill, fill);
    const bool known = id >= 0 && id < args.table.n;
    if constexpr (sizeof(T) == 4) {
        const uint4* row = static_cast<const uint4*>(args.table.data) +
                           (known ? static_cast<int64_t>(id) * args.table.k + vector * 8 : 0) / 4;
        reinterpret_cast<uint4*>(out)[0] = known ? row[0] : v;
        reinterpret_cast<uint4*>(out)[1] = known ? row[1] : v;
    } else {
        if (known && args.table.format != WeightFormat::as_type) {
            float row[8];
            stored_row(args.table, id, vector, row);
            v = pack8<T>(row);
        } else if (known) {
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

template <class T>
__global__ void __launch_bounds__(kRowThreads) act_mul_kernel(ActMulArgs args) {
    begin_kernel();
    const int i = row_vector() * 8;
    if (i >= args.intermediate_size) return;
    const T* gate = static_cast<const T*>(args.gate_up) + static_cast<int64_t>(blockIdx.x) * args.gate_up_stride + i;
    float x[8], up[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    load8(gate, x);
    if (args.has_up) load8(gate + args.intermediate_size, up);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = act_mul<T>(args.activation, x[j], up[j]);
    store8(static_cast<T*>(args.out) + static_cast<int64_t>(blockIdx.x) * args.out_stride + i, x);
}

cudaError_t act_mul(const ActMulArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config = row_grid(args.num_tokens, args.intermediate_size / 8, stream);
    return visit(args.type, [&](auto t) { return launch<act_mul_kernel<decltype(t)>>(config, args); });
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

// ---- convert -----------------------------------------------------------------------------------------------------

template <class S, class D>
__global__ void __launch_bounds__(kRowThreads) convert_kernel(const S* src, D* dst, int64_t count) {
    begin_kernel();
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kRowThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < count; i += threads)
        dst[i] = from_float<D>(to_float(src[i]));
}

// Blocks for a loop over `count`: enough to fill a GPU, few enough for the limit of a grid.
static dim3 loop_grid(int64_t count) {
    const int64_t blocks = ceil_div<int64_t>(count, kRowThreads);
    return dim3(static_cast<unsigned>(blocks < 16384 ? blocks : 16384));
}

cudaError_t convert(const ConvertArgs& args, cudaStream_t stream) {
    if (args.count == 0) return cudaSuccess;
    return visit(args.src_type, [&](auto s) {
        return visit(args.dst_type, [&](auto d) {
            using S = decltype(s);
            using D = decltype(d);
            return launch<convert_kernel<S, D>>({loop_grid(args.count), dim3(kRowThreads), 0, stream},
                                                static_cast<const S*>(args.src), static_cast<D*>(args.dst), args.count);
        });
    });
}

// ---- pack_weight -------------------------------------------------------------------------------------------------

// One turn of the loop per fragment (tile, step, lane), of which the rows of this part are written: words 0 and 2 are
// row lane / 4 of the tile, words 1 and 3 the row 8 below.
template <class S, class D>
__global__ void __launch_bounds__(kRowThreads) pack_kernel(PackArgs args) {
    begin_kernel();
    const PackedWeight& dst = args.dst;
    const int steps = num_steps(dst.k);
    const int64_t count = static_cast<int64_t>(num_tiles(dst)) * steps * 32;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kRowThreads;
    uint32_t* words = static_cast<uint32_t*>(const_cast<void*>(dst.data));  // [num_tiles][num_steps][32][4]
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < count; i += threads) {
        const int lane = static_cast<int>(i % 32), step = static_cast<int>(i / 32 % steps);
        const int tile = static_cast<int>(i / 32 / steps);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int row = feature_of_row(dst, tile * 16 + lane / 4 + word % 2 * 8) - args.first;
            const int column = step * 16 + lane % 4 * 2 + word / 2 * 8;
            if (row < 0 || row >= args.rows || column >= dst.k) continue;
            const S* src = static_cast<const S*>(args.src) + static_cast<int64_t>(row) * dst.k + column;
            words[4 * i + word] = pack2<D>(to_float(src[0]), to_float(src[1]));
        }
    }
}

// Quantised weights: a turn for each packed row and 32 columns, which are one word of int4 and two of the others in
// each of four lanes. Integers are those of quantise.h.
struct OneLane {
    using Float = float;
    using Int = int;
    static __device__ __forceinline__ float set1(float v) { return v; }
    static __device__ __forceinline__ float absolute(float v) { return fabsf(v); }
    static __device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
    static __device__ __forceinline__ float bf16(float v) { return rounded<cuda::bf16>(v); }
    static __device__ __forceinline__ int nearest(float v) { return static_cast<int>(rintf(v)); }
    static __device__ __forceinline__ float to_float(int v) { return static_cast<float>(v); }
};

struct GroupValues {  // a function object: on a lambda here the compiler of CUDA 13.0 stops with an internal error
    const float* values;
    __device__ __forceinline__ float operator()(int k) const { return values[k]; }
};

// The e4m3 number next to v, ties to even; |v| <= 448.
__device__ __forceinline__ uint32_t to_e4m3(float v) {
    const uint32_t bits = float_to_bits(v), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x3c800000u)  // below 2^-6: multiples of 2^-9
        return sign | static_cast<uint32_t>(rintf(bits_to_float(magnitude) * 512.0f));
    return sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
}

// The row of src that is packed row `row`, or null: it belongs to another part, or to none.
template <class S>
__device__ __forceinline__ const S* source_row(const PackArgs& args, int row) {
    const int from = feature_of_row(args.dst, row) - args.first;
    if (from < 0 || from >= args.rows) return nullptr;
    return static_cast<const S*>(args.src) + static_cast<int64_t>(from) * args.dst.k;
}

// A warp for each packed row: its scale, from its largest weight.
template <class S>
__global__ void __launch_bounds__(kRowThreads) row_scales_kernel(PackArgs args) {
    begin_kernel();
    const int row = static_cast<int>(blockIdx.x * (kRowThreads / 32) + warp_id());
    if (row >= num_tiles(args.dst) * 16) return;
    const S* src = source_row<S>(args, row);
    if (!src) return;
    float largest = 0.0f;
    for (int k = static_cast<int>(lane_id()); k < args.dst.k; k += 32)
        largest = fmaxf(largest, fabsf(to_float(src[k])));
    largest = warp_max(largest);
    const bool is_int8 = args.dst.format == WeightFormat::int8;
    if (lane_id() == 0)
        const_cast<float*>(row_scales(args.dst))[row] =
            is_int8 ? quantise::int8_scale<OneLane>(largest) : largest / quantise::fp8_largest;
}

template <class S>
__global__ void __launch_bounds__(kRowThreads) quantise_kernel(PackArgs args) {
    begin_kernel();
    const PackedWeight& dst = args.dst;
    const int groups = ceil_div(dst.k, quantise::group), units = num_units(dst);
    const int64_t count = static_cast<int64_t>(num_tiles(dst)) * 16 * groups;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kRowThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < count; i += threads) {
        const int row = static_cast<int>(i / groups), group = static_cast<int>(i % groups), r = row % 16;
        const S* src = source_row<S>(args, row);
        if (!src) continue;
        float values[quantise::group];
#pragma unroll
        for (int k = 0; k < quantise::group; ++k) {
            const int column = group * quantise::group + k;
            values[k] = column < dst.k ? to_float(src[column]) : 0.0f;
        }
        const bool is_int4 = dst.format == WeightFormat::int4;
        const int unit = is_int4 ? group / 2 : group;
        uint8_t* bytes = static_cast<uint8_t*>(const_cast<void*>(dst.data)) +
                         (static_cast<int64_t>(row / 16) * units + unit) * unit_bytes(dst.format);
        uint32_t* words = reinterpret_cast<uint32_t*>(bytes) + r % 8 * 16 + r / 8;  // of the first lane
        // Lane `lane` has columns 2 lane and the next, 8 columns on the same, and so in each step of 16.
        if (is_int4) {
            const float scale = quantise::int4_scale<OneLane>(GroupValues{values});
            const float inverse = quantise::inverse_or_zero<OneLane>(scale);
            reinterpret_cast<bf16*>(bytes + 512)[r % 8 * 4 + group % 2 * 2 + r / 8] = from_float<bf16>(scale);
#pragma unroll
            for (int lane = 0; lane < 4; ++lane) {
                uint32_t word = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float v = values[j % 4 * 8 + 2 * lane + j / 4];
                    word |= static_cast<uint32_t>(quantise::int4<OneLane>(v, inverse) + 8) << 4 * j;
                }
                words[4 * lane + group % 2 * 2] = word;
            }
            continue;
        }
        const bool is_int8 = dst.format == WeightFormat::int8;
        const float inverse = quantise::inverse_or_zero<OneLane>(row_scales(dst)[row]);
#pragma unroll
        for (int lane = 0; lane < 4; ++lane)
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                uint32_t word = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float v = values[step * 16 + j % 2 * 8 + 2 * lane + j / 2];
                    const uint32_t byte =
                        is_int8 ? static_cast<uint32_t>(quantise::int8<OneLane>(v, inverse)) & 255
                                : to_e4m3(fminf(fmaxf(v * inverse, -quantise::fp8_largest), quantise::fp8_largest));
                    word |= byte << 8 * j;
                }
                words[4 * lane + 2 * step] = word;
            }
    }
}

template <class S>
static cudaError_t launch_quantise(const PackArgs& args, cudaStream_t stream) {
    const int rows = num_tiles(args.dst) * 16;
    if (has_row_scales(args.dst.format)) {
        const LaunchConfig config{dim3(ceil_div(rows, kRowThreads / 32)), dim3(kRowThreads), 0, stream};
        if (cudaError_t error = launch<row_scales_kernel<S>>(config, args)) return error;
    }
    const dim3 grid = loop_grid(int64_t{rows} * ceil_div(args.dst.k, quantise::group));
    return launch<quantise_kernel<S>>({grid, dim3(kRowThreads), 0, stream}, args);
}

cudaError_t pack_weight(const PackArgs& args, cudaStream_t stream) {
    const PackedWeight& dst = args.dst;
    if (dst.type == Type::f32) {
        float* rows = static_cast<float*>(const_cast<void*>(dst.data)) + static_cast<int64_t>(args.first) * dst.k;
        return convert({args.src, args.src_type, rows, Type::f32, static_cast<int64_t>(args.rows) * dst.k}, stream);
    }
    if (dst.format != WeightFormat::as_type)
        return visit(args.src_type, [&](auto s) { return launch_quantise<decltype(s)>(args, stream); });
    const dim3 grid = loop_grid(static_cast<int64_t>(num_tiles(dst)) * num_steps(dst.k) * 32);
    const LaunchConfig config{grid, dim3(kRowThreads), 0, stream};
    return visit(args.src_type, [&](auto s) {
        using S = decltype(s);
        return dst.type == Type::bf16 ? launch<pack_kernel<S, bf16>>(config, args)
                                      : launch<pack_kernel<S, f16>>(config, args);
    });
}

}  // namespace infinilm::cuda
