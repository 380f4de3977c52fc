// Weights of linears as kernels read them, made once at load time: copied, quantised, or from the blocks of a file.
// Mapping: a loop over fragments, or over rows and 32 columns. Bytes: a source is read once and its result written once
// for each part; sources need only the alignment of an element.
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/linear/linear.cuh"
#include "cuda/linear/stored_planes.cuh"
#include "cuda/linear/stored_row.cuh"
#include "numerics/quantise.h"

namespace infinilm::cuda {

constexpr int kPackThreads = 128;

// One turn of the loop per fragment (tile, step, lane), of which the rows of this part are written: words 0 and 2 are
// row lane / 4 of the tile, words 1 and 3 the row 8 below.
template <class S, class D>
__global__ void __launch_bounds__(kPackThreads) pack_kernel(PackArgs args) {
    begin_kernel();
    const PackedWeight& dst = args.dst;
    const int steps = num_steps(dst.k);
    const int64_t count = static_cast<int64_t>(num_tiles(dst)) * steps * 32;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kPackThreads;
    uint32_t* words = static_cast<uint32_t*>(const_cast<void*>(dst.data));  // [num_tiles][num_steps][32][4]
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x; i < count; i += threads) {
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

// The row of src that is packed row `row`, or null: it belongs to another part, or to none.
template <class S>
__device__ __forceinline__ const S* source_row(const PackArgs& args, int row) {
    const int from = feature_of_row(args.dst, row) - args.first;
    if (from < 0 || from >= args.rows) return nullptr;
    return static_cast<const S*>(args.src) + static_cast<int64_t>(from) * args.dst.k;
}

// For int4: a power of two by which the scales of groups are divided to be float16, as are their products with
// integers. The largest weight becomes 2^14 to 2^15, and a scale that is 2^29 times smaller is a bfloat16 number still.
__device__ __forceinline__ float int4_row_scale(float largest) {
    return bits_to_float(static_cast<uint32_t>(max(static_cast<int>(float_to_bits(largest) >> 23) - 14, 1)) << 23);
}

// A warp for each packed row: its scale, from its largest weight.
template <class S>
__global__ void __launch_bounds__(kPackThreads) row_scales_kernel(PackArgs args) {
    begin_kernel();
    const int row = static_cast<int>(blockIdx.x * (kPackThreads / 32) + warp_id());
    if (row >= num_tiles(args.dst) * 16) return;
    const S* src = source_row<S>(args, row);
    if (!src) return;
    float largest = 0.0f;
    for (int k = static_cast<int>(lane_id()); k < args.dst.k; k += 32)
        largest = fmaxf(largest, fabsf(to_float(src[k])));
    largest = warp_max(largest);
    if (lane_id() != 0) return;
    float& scale = const_cast<float*>(row_scales(args.dst))[row];
    switch (args.dst.format) {
        case WeightFormat::int8: scale = quantise::int8_scale<OneLane>(largest); break;
        case WeightFormat::int4: scale = int4_row_scale(largest); break;
        default: scale = largest / quantise::fp8_largest;
    }
}

template <class S>
__global__ void __launch_bounds__(kPackThreads) quantise_kernel(PackArgs args) {
    begin_kernel();
    const PackedWeight& dst = args.dst;
    const int groups = ceil_div(dst.k, quantise::group), units = num_units(dst);
    const int64_t count = static_cast<int64_t>(num_tiles(dst)) * 16 * groups;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kPackThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x; i < count; i += threads) {
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
            reinterpret_cast<f16*>(bytes + 512)[r % 8 * 4 + group % 2 * 2 + r / 8] =
                from_float<f16>(scale / row_scales(dst)[row]);
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

template <class S, class D>
__global__ void __launch_bounds__(kPackThreads) convert_kernel(const S* src, D* dst, int64_t count) {
    begin_kernel();
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kPackThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x; i < count; i += threads)
        dst[i] = from_float<D>(to_float(src[i]));
}

cudaError_t convert(const ConvertArgs& args, cudaStream_t stream) {
    if (args.count == 0) return cudaSuccess;
    return visit(args.src_type, [&](auto s) {
        return visit(args.dst_type, [&](auto d) {
            using S = decltype(s);
            using D = decltype(d);
            return launch<convert_kernel<S, D>>({loop_grid(args.count, kPackThreads), dim3(kPackThreads), 0, stream},
                                                static_cast<const S*>(args.src), static_cast<D*>(args.dst), args.count);
        });
    });
}

template <class S>
static cudaError_t launch_quantise(const PackArgs& args, cudaStream_t stream) {
    const int rows = num_tiles(args.dst) * 16;
    const LaunchConfig config{dim3(ceil_div(rows, kPackThreads / 32)), dim3(kPackThreads), 0, stream};
    if (cudaError_t error = launch<row_scales_kernel<S>>(config, args)) return error;
    const dim3 grid = loop_grid(int64_t{rows} * ceil_div(args.dst.k, quantise::group), kPackThreads);
    return launch<quantise_kernel<S>>({grid, dim3(kPackThreads), 0, stream}, args);
}

cudaError_t pack_weight(const PackArgs& args, cudaStream_t stream) {
    const PackedWeight& dst = args.dst;
    if (dst.type == Element::f32) {
        float* rows = static_cast<float*>(const_cast<void*>(dst.data)) + static_cast<int64_t>(args.first) * dst.k;
        return convert({args.src, args.src_type, rows, Element::f32, static_cast<int64_t>(args.rows) * dst.k}, stream);
    }
    if (dst.format != WeightFormat::as_type)
        return visit(args.src_type, [&](auto s) { return launch_quantise<decltype(s)>(args, stream); });
    const dim3 grid = loop_grid(static_cast<int64_t>(num_tiles(dst)) * num_steps(dst.k) * 32, kPackThreads);
    const LaunchConfig config{grid, dim3(kPackThreads), 0, stream};
    return visit(args.src_type, [&](auto s) {
        using S = decltype(s);
        return dst.type == Element::bf16 ? launch<pack_kernel<S, bf16>>(config, args)
                                         : launch<pack_kernel<S, f16>>(config, args);
    });
}

// ---- pack_blocks -------------------------------------------------------------------------------------------------

// A turn for each packed row and 32 columns, as quantise_kernel has them; codes are what is stored already. The host
// tells sizes, of which each is a choice among all formats.
__global__ void __launch_bounds__(kPackThreads)
    pack_blocks_kernel(const __grid_constant__ PackBlocksArgs args, UnitShape shape, int bytes_of_block) {
    begin_kernel();
    const PackedWeight& dst = args.dst;
    const BlockType& type = args.type;
    const int groups = dst.k / 32, bytes_of_scale = bytes_of_block - type.size * type.bits / 8;
    const int units = ceil_div(num_steps(dst.k), shape.steps), bytes_of_unit = shape.code_bytes + shape.scale_bytes;
    uint8_t* data = static_cast<uint8_t*>(const_cast<void*>(dst.data));
    float* of_rows = reinterpret_cast<float*>(data + static_cast<int64_t>(num_tiles(dst)) * units * bytes_of_unit);
    const int64_t count = static_cast<int64_t>(num_tiles(dst)) * 16 * groups;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kPackThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x; i < count; i += threads) {
        const int row = static_cast<int>(i / groups), group = static_cast<int>(i % groups), r = row % 16;
        const int from = feature_of_row(dst, row) - args.first;
        if (from < 0 || from >= args.rows) continue;
        const uint8_t* block =
            args.src + (static_cast<int64_t>(from) * (dst.k / type.size) + group * 32 / type.size) * bytes_of_block;
        const uint8_t* codes = block + bytes_of_scale + group * 32 % type.size / 32 * (4 * type.bits);
        uint8_t* unit = data + (static_cast<int64_t>(row / 16) * units + group * 2 / shape.steps) * bytes_of_unit;
        uint32_t* words = reinterpret_cast<uint32_t*>(unit) + r % 8 * 16 + r / 8;  // of the first lane
        if (type.bits == 4) {
#pragma unroll
            for (int lane = 0; lane < 4; ++lane) {
                uint32_t word = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int column = j % 4 * 8 + 2 * lane + j / 4;
                    word |= (static_cast<uint32_t>(codes[column % 16]) >> column / 16 * 4 & 15) << 4 * j;
                }
                words[4 * lane + group % 2 * 2] = word;
            }
        } else {
#pragma unroll
            for (int lane = 0; lane < 4; ++lane)
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    uint32_t word = 0;
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        word |= static_cast<uint32_t>(codes[step * 16 + j % 2 * 8 + 2 * lane + j / 2]) << 8 * j;
                    words[4 * lane + 2 * step] = word;
                }
        }
        const f16 scale{static_cast<uint16_t>(block[0] | block[1] << 8)};
        const float wide_scale = bits_to_float(scale.bits | static_cast<uint32_t>(block[2] | block[3] << 8) << 16);
        f16* halves = reinterpret_cast<f16*>(unit + 512) + r / 8;  // of words of rows r and r + 8
        switch (dst.format) {
            case WeightFormat::int4: halves[r % 8 * 4 + group % 2 * 2] = scale; break;
            case WeightFormat::fp4:  // the two smallest are 2^-127, subnormal, and 2^-126
                halves[r % 8 * 4 + group % 2 * 2].bits = static_cast<uint16_t>(block[0] ? block[0] << 7 : 0x40);
                break;
            case WeightFormat::int8_groups: halves[r % 8 * 2] = scale; break;
            case WeightFormat::int4_zeros:
                if (group % 2 != 0) break;
                halves[r % 8 * 4] = scale;
                halves[r % 8 * 4 + 2].bits = static_cast<uint16_t>(
                    dst.type == Element::bf16 ? int4_offset<bf16>(block[2]) : int4_offset<f16>(block[2]));
                break;
            case WeightFormat::fp8_blocks:
                if (r % 8 == 0) reinterpret_cast<float*>(unit + 512)[r / 8] = wide_scale;
                break;
            default: break;
        }
        if (group == 0) of_rows[row] = dst.format == WeightFormat::fp8 ? wide_scale : 1.0f;
    }
}

// A turn for each packed row and unit of 64 columns, whose planes a row of the tile has words or half-words of.
template <class Stored>
__global__ void __launch_bounds__(kPackThreads)
    pack_planes_kernel(const __grid_constant__ PackBlocksArgs args, int bytes_of_block) {
    begin_kernel();
    using F = typename Stored::Format;
    constexpr int kLow = F::kBits & 4, kMiddle = F::kBits & 2;  // words of a lane
    const PackedWeight& dst = args.dst;
    const int units = units_of<F>(dst.k), blocks = dst.k / args.type.size;
    const int64_t count = static_cast<int64_t>(num_tiles(dst)) * 16 * units;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kPackThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x; i < count; i += threads) {
        const int row = static_cast<int>(i / units), unit = static_cast<int>(i % units), r = row % 8, h = row / 8 % 2;
        const int from = feature_of_row(dst, row) - args.first;
        if (from < 0 || from >= args.rows) continue;
        const int first = unit * 64 % args.type.size;  // column of the block; or two blocks of 32 columns, or the last
        const int groups = may_end_in_half<Stored> ? min(2, dst.k / 32 - unit * 2) : 2;
        const uint8_t* block =
            args.src + (static_cast<int64_t>(from) * blocks + unit * 64 / args.type.size) * bytes_of_block;
        uint8_t* to = static_cast<uint8_t*>(const_cast<void*>(dst.data)) +
                      (static_cast<int64_t>(row / 16) * units + unit) * unit_bytes_of<F>;
#pragma unroll 1
        for (int lane = 4 * r; lane < 4 * r + 4; ++lane) {
            uint32_t low[2] = {}, middle = 0, high = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const int g = j / 8, place = j / 2 % 4 * 4, second = j % 2;
                const int column = j / 2 * 8 + lane % 4 * 2 + second;
                const uint32_t code = column < 32 * groups ? Stored::code(block, first + column) : 0;
                low[g] |= (code & 15) << (place + 16 * second);
                middle |= (code >> kLow & 3) << (place + 2 * g + 16 * second);
                high |= (code >> (kLow + kMiddle) & 1) << (place + g + 2 * second);
            }
            if constexpr (kLow != 0)
                for (int g = 0; g < 2; ++g) reinterpret_cast<uint32_t*>(to + lane * 16)[2 * g + h] = low[g];
            if constexpr (kMiddle != 0) reinterpret_cast<uint32_t*>(to + kLow * 128 + lane * 8)[h] = middle;
            if constexpr (F::kBits % 2 != 0)
                reinterpret_cast<uint16_t*>(to + (kLow + kMiddle) * 128 + lane * 4)[h] = static_cast<uint16_t>(high);
        }
        uint32_t* scales = reinterpret_cast<uint32_t*>(to + F::kCodeBytes) + r * F::kScales;
        Stored::store_scales(block, first / 64, groups, scales, h);
        if constexpr (F::kRowScales)
            if (unit == 0) const_cast<float*>(row_scales<F>(dst))[row] = Stored::row_scale(block);
    }
}

cudaError_t pack_blocks(const PackBlocksArgs& args, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    const int bytes_of_block = block_bytes(args.type);
    const bool are_planes = visit_stored_planes(args.type, [&](auto stored) {
        const dim3 grid = loop_grid(static_cast<int64_t>(num_tiles(args.dst)) * 16 * num_units(args.dst), kPackThreads);
        const LaunchConfig config{grid, dim3(kPackThreads), 0, stream};
        error = launch<pack_planes_kernel<decltype(stored)>>(config, args, bytes_of_block);
    });
    if (are_planes) return error;
    const dim3 grid = loop_grid(static_cast<int64_t>(num_tiles(args.dst)) * 16 * (args.dst.k / 32), kPackThreads);
    const LaunchConfig config{grid, dim3(kPackThreads), 0, stream};
    return launch<pack_blocks_kernel>(config, args, unit_shape(args.dst.format), bytes_of_block);
}

// ---- unpack_weight -----------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kPackThreads) unpack_kernel(const __grid_constant__ UnpackArgs args) {
    begin_kernel();
    const int vectors = args.src.k / 8;
    const int64_t count = static_cast<int64_t>(num_tiles(args.src)) * 16 * vectors;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kPackThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x; i < count; i += threads) {
        const int row = static_cast<int>(i / vectors), vector = static_cast<int>(i % vectors);
        const int to = feature_of_row(args.src, row) - args.first;
        if (to < 0 || to >= args.rows) continue;
        float values[8];
        stored_row(args.src, row, vector, values);
        store8(args.out + static_cast<int64_t>(to) * args.src.k + vector * 8, values);
    }
}

cudaError_t unpack_weight(const UnpackArgs& args, cudaStream_t stream) {
    const dim3 grid = loop_grid(static_cast<int64_t>(num_tiles(args.src)) * 16 * (args.src.k / 8), kPackThreads);
    return launch<unpack_kernel>({grid, dim3(kPackThreads), 0, stream}, args);
}

}  // namespace infinilm::cuda
