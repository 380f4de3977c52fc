// How the weights of linears lie on a device, and the kernels that pack and unpack them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/core/types.h"

namespace infinilm::cuda {

// Says where each output feature lies in a packed weight. Two features that an epilogue joins, such as gate and up, lie
// in rows r and r + 8 of a tile of 16 rows, because one thread of an mma holds both.
//   natural     row p is feature p
//   gate_up     rows r < 8 of tile i are the gate of feature 8 i + r, rows r + 8 its up
//   rope_pairs  a head of head_dim features takes head_dim / 16 tiles; row r < 8 of its tile j is dimension 8 j + r,
//               row r + 8 dimension 8 j + r + head_dim / 2: the pair that RoPE turns
enum class RowOrder : int { natural, gate_up, rope_pairs };

// How a weight's numbers are stored. as_type: in the Element of the engine; others are made that Element in registers
// (weight_formats.cuh), and have a float32 scale for each row, 1 where files have none. Besides:
//   int4         a float16 one for each row and group of 32 columns
//   int4_zeros   the same for each row and group of 64 columns, with a zero point of 0 to 15
//   int8_groups  as int4
//   fp8_blocks   a float32 one for each 8 rows, from a multiple of 8 on, and group of 32 columns
//   fp4          (e2m1) a bfloat16 one, a power of two, for each row and group of 32 columns
// The other formats are those of GGUF files (plane_formats.cuh): their codes and scales as they are, with which every
// weight is computed, and rounded once; rows have no scales. But those of nvfp4 (e2m1, with an e4m3 scale for each row
// and group of 16 columns) have one, that of the tensor.
// int8, int4 and fp8 are what quantisation at load time makes, by the rules of numerics/quantise.h; the scales of int4
// are then bfloat16 numbers, and those of rows powers of two that bring them into the range of float16. fp8 is e4m3.
// fp8_pairs and fp8_block_pairs are how kernels see fp8 and fp8_blocks beside inputs of e4m3 (kernels.h): the same
// bytes, of which two count as one number of 16 bits. The latter has scales that are those of 128 columns.
enum class WeightFormat : int {
    as_type,
    int8,
    int4,
    fp8,
    int4_zeros,
    int8_groups,
    fp8_blocks,
    fp4,
    q4_k,
    q5_k,
    q6_k,
    q2_k,
    q4_1,
    q5_1,
    nvfp4,
    q3_k,
    fp8_pairs,
    fp8_block_pairs
};

// What a unit holds: steps of 16 columns, bytes of codes and, behind them, bytes of scales.
struct UnitShape {
    int steps, code_bytes, scale_bytes;
    bool row_scales;  // whether rows have a scale, too
};
constexpr UnitShape unit_shape(WeightFormat format) {
    switch (format) {
        case WeightFormat::as_type: return {1, 512, 0, false};
        case WeightFormat::fp8_pairs: return {1, 512, 0, true};
        case WeightFormat::fp8_block_pairs: return {1, 512, 16, true};
        case WeightFormat::int8:
        case WeightFormat::fp8: return {2, 512, 0, true};
        case WeightFormat::int8_groups: return {2, 512, 32, true};
        case WeightFormat::fp8_blocks: return {2, 512, 16, true};
        case WeightFormat::int4:
        case WeightFormat::int4_zeros:
        case WeightFormat::fp4: return {4, 512, 64, true};
        case WeightFormat::q4_k: return {4, 512, 128, false};
        case WeightFormat::q5_k: return {4, 640, 128, false};
        case WeightFormat::q6_k: return {4, 768, 96, false};
        case WeightFormat::q2_k: return {4, 256, 128, false};
        case WeightFormat::q3_k: return {4, 384, 96, false};
        case WeightFormat::q4_1: return {4, 512, 128, false};
        case WeightFormat::q5_1: return {4, 640, 128, false};
        case WeightFormat::nvfp4: return {4, 512, 64, true};
    }
    return {};
}
constexpr int unit_steps(WeightFormat format) { return unit_shape(format).steps; }
constexpr int unit_bytes(WeightFormat format) { return unit_shape(format).code_bytes + unit_shape(format).scale_bytes; }
constexpr bool has_row_scales(WeightFormat format) { return unit_shape(format).row_scales; }
constexpr bool rounds_inputs(WeightFormat format) {
    return format == WeightFormat::fp8_pairs || format == WeightFormat::fp8_block_pairs;
}

// What kernels ask of the shape of a format's units.
template <WeightFormat kFormat>
struct Shaped {
    static constexpr int kUnitSteps = unit_shape(kFormat).steps, kTurnSteps = kUnitSteps > 1 ? 2 : 1;
    static constexpr int kCodeBytes = unit_shape(kFormat).code_bytes, kScaleBytes = unit_shape(kFormat).scale_bytes;
    static constexpr bool kRowScales = has_row_scales(kFormat), kRoundedInputs = rounds_inputs(kFormat);
    static constexpr bool kBoxScales = kFormat == WeightFormat::fp8_block_pairs;  // of inputs, for each box of columns
};

// A linear's weight. For f32: [n][k] row-major, natural order, gate before up. Else units, tile by tile of 16 rows:
// [num_tiles][num_units][unit_bytes]. A unit is unit_steps steps of 16 along k: one 16-byte load of each lane,
// [32 lanes][16 bytes], holds the A fragments of mma_m16n8k16 (ptx.cuh); scales of groups lie behind. as_type: a lane's
// 16 bytes are its fragment. Behind all units follow the scales of rows, [num_tiles][16] float32, if rows have some.
// Rows and columns beyond n and k are zero.
struct PackedWeight {
    const void* data = nullptr;
    const float* bias = nullptr;   // [n], by feature; or null
    int n = 0, k = 0;              // features (gate and up counted both), multiple of 8; columns, multiple of 8
    Element type = Element::bf16;  // what is multiplied
    RowOrder order = RowOrder::natural;
    int head_dim = 0;  // of rope_pairs, a multiple of 16
    WeightFormat format = WeightFormat::as_type;
};

constexpr int num_steps(int k) { return (k + 15) / 16; }
constexpr int num_tiles(const PackedWeight& w) { return (w.n + 15) / 16; }  // n / 2 is a multiple of 8 with gate_up
constexpr int num_units(const PackedWeight& w) {
    return (num_steps(w.k) + unit_steps(w.format) - 1) / unit_steps(w.format);
}
constexpr size_t units_bytes(const PackedWeight& w) {
    return size_t{1} * unit_bytes(w.format) * num_tiles(w) * num_units(w);
}
inline size_t packed_bytes(const PackedWeight& w) {
    if (w.type == Element::f32) return size_t{4} * w.n * w.k;
    return units_bytes(w) + (has_row_scales(w.format) ? size_t{64} * num_tiles(w) : 0);
}

// Copies, or quantises, the checkpoint rows of one part (q, k, v; gate, up), features [first, first + rows), into a
// packed weight whose padding is zero already.
struct PackArgs {
    const void* src;  // [rows, k] row-major of src_type, on the device
    Element src_type;
    int first, rows;
    PackedWeight dst;  // data is written
};
cudaError_t pack_weight(const PackArgs&, cudaStream_t);

// What lies in a block of integers of a file, or of what is made of files: the scale of `size` neighbours of a row,
// then of each 32 the codes: of 4 bits those of columns j and j + 16 in byte j, else bytes.
// f16_zero: with an int8 behind it; exponent: a byte e for 2^(e - 127). Those of blocks whose codes and scales lie as
// stored_planes.cuh says: six_bits, pairs of 6 bits for 32 columns and two float16; four_bits, pairs of 4 bits for 16
// columns and two float16; bytes, of 16 columns, and a float16; six_bits_of_16, the same of 6 bits; f16_minimum, two
// float16; e4m3, a byte for 16 columns; f32_e4m3, the same behind a float32.
enum class BlockScale : int {
    f16,
    f16_zero,
    f32,
    exponent,
    six_bits,
    four_bits,
    bytes,
    six_bits_of_16,
    f16_minimum,
    e4m3,
    f32_e4m3
};
struct BlockType {
    const char* name;  // as Blocks::type of src/ops/backend.h
    int size, bits;
    BlockScale scale;
    WeightFormat format;  // that keeps its numbers exactly
};
constexpr int scale_bytes(BlockScale scale) {
    switch (scale) {
        case BlockScale::f16: return 2;
        case BlockScale::f16_zero: return 3;
        case BlockScale::exponent: return 1;
        case BlockScale::six_bits: return 12 + 4;
        case BlockScale::four_bits: return 16 + 4;
        case BlockScale::bytes: return 16 + 2;
        case BlockScale::six_bits_of_16: return 12 + 2;
        case BlockScale::f32_e4m3: return 4 + 4;
        default: return 4;
    }
}
constexpr int block_bytes(const BlockType& type) { return scale_bytes(type.scale) + type.size * type.bits / 8; }

// The same of rows of such blocks; the format of dst is theirs. k is a multiple of their size.
struct PackBlocksArgs {
    const uint8_t* src;  // [rows, k / size * block_bytes] on the device
    BlockType type;
    int first, rows;
    PackedWeight dst;
};
cudaError_t pack_blocks(const PackBlocksArgs&, cudaStream_t);

// The numbers of features [first, first + rows) of a weight that is not as_type.
struct UnpackArgs {
    PackedWeight src;
    int first, rows;
    float* out;  // [rows, k]
};
cudaError_t unpack_weight(const UnpackArgs&, cudaStream_t);

// dst[i] = src[i] in another type.
struct ConvertArgs {
    const void* src;
    Element src_type;
    void* dst;
    Element dst_type;
    int64_t count;
};
cudaError_t convert(const ConvertArgs&, cudaStream_t);

}  // namespace infinilm::cuda
