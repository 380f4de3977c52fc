// A row of a quantised weight as numbers, for embedding and unpack_weight.
#pragma once

#include "cuda/linear/linear.cuh"

namespace infinilm::cuda {

// Columns 8 vector .. of a row of a quantised weight, in float32: what four lanes have in one register each.
__device__ __forceinline__ void stored_row(const PackedWeight& w, int row, int vector, float (&values)[8]) {
    visit_format(w.format, [&](auto format) {
        using F = decltype(format);
        const int step = vector / 2 % F::kUnitSteps, unit = vector / 2 / F::kUnitSteps, r = row % 16;
        const uint8_t* bytes = static_cast<const uint8_t*>(w.data) +
                               (static_cast<int64_t>(row / 16) * units_of<F>(w.k) + unit) * unit_bytes_of<F>;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = F::values(StoredUnit<F>(bytes, r % 8 * 4 + i), step, vector % 2 * 2 + r / 8);
            values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
        }
        if constexpr (F::kRowScales) {
            const float of_row = row_scales<F>(w)[row];
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(values[i], of_row);
        }
    });
}

}  // namespace infinilm::cuda
