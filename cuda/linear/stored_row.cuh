// A row of a quantised weight as numbers, for embedding and unpack_weight.
#pragma once

#include "cuda/linear/linear.cuh"

namespace infinilm::cuda {

// Columns 8 vector .. of a row of a quantised weight; where they lie, weight_formats.cuh says.
__device__ __forceinline__ void stored_row(const PackedWeight& w, int row, int vector, float (&values)[8]) {
    const int step = vector / 2, steps = unit_steps(w.format), unit = step / steps, within = step % steps, r = row % 16;
    const uint8_t* bytes = static_cast<const uint8_t*>(w.data) +
                           (static_cast<int64_t>(row / 16) * num_units(w) + unit) * unit_bytes(w.format);
    const f16* halves = reinterpret_cast<const f16*>(bytes + 512) + r / 8;  // of words of rows r and r + 8
    const bool is_int4 = steps == 4, is_int8 = w.format == WeightFormat::int8 || w.format == WeightFormat::int8_groups;
    float scale = 1.0f;
    int zero = 8;
    switch (w.format) {
        case WeightFormat::int4: scale = to_float(halves[r % 8 * 4 + within / 2 * 2]); break;
        case WeightFormat::fp4:
            scale = bits_to_float(static_cast<uint32_t>(halves[r % 8 * 4 + within / 2 * 2].bits) << 16);
            break;
        case WeightFormat::int4_zeros:
            scale = to_float(halves[r % 8 * 4]);
            zero = halves[r % 8 * 4 + 2].bits & 15;  // of the number that int4_offset gives
            break;
        case WeightFormat::int8_groups: scale = to_float(halves[r % 8 * 2]); break;
        case WeightFormat::fp8_blocks: scale = reinterpret_cast<const float*>(bytes + 512)[r / 8]; break;
        default: break;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // lanes
        const int word = (is_int4 ? within / 2 : within) * 2 + r / 8;
        const uint32_t bits = reinterpret_cast<const uint32_t*>(bytes)[(r % 8 * 4 + i) * 4 + word];
        const int at = 4 * (within % 2 * 2 + vector % 2);
        if (w.format == WeightFormat::fp4) {
            const uint32_t exact = widen_fp4<f16>(bits >> at);
            values[2 * i] = unpack_low<f16>(exact), values[2 * i + 1] = unpack_high<f16>(exact);
        } else if (is_int4) {
            values[2 * i] = static_cast<float>(static_cast<int>(bits >> at & 15) - zero);
            values[2 * i + 1] = static_cast<float>(static_cast<int>(bits >> at >> 16 & 15) - zero);
        } else {
            const uint32_t pair = bits >> vector % 2 * 8;
            const uint32_t exact = is_int8 ? widen_int8<f16>(pair) : widen_fp8<f16>(pair);
            values[2 * i] = unpack_low<f16>(exact), values[2 * i + 1] = unpack_high<f16>(exact);
        }
    }
    const float of_row = row_scales(w)[row];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(__fmul_rn(values[i], scale), of_row);
}

}  // namespace infinilm::cuda
