// A linear's weight on a device: what prepare_linear makes, and kernels read.
#pragma once

#include <memory>
#include <vector>

#include "cuda/core/host.h"
#include "cuda/linear/packed_weight.h"
#include "ops/backend.h"

namespace infinilm::cuda {

// Neighbouring parts of a linear that are blocks of one type, or numbers: what one launch multiplies.
struct CudaPiece {
    PackedWeight packed;
    int64_t first_output = 0;
    bool fits_rounded_inputs = false;  // kernels have this weight beside inputs of 8 bits
    std::unique_ptr<DeviceMemory> data, bias;
};
struct CudaLinear : PreparedLinear {
    std::vector<CudaPiece> pieces;  // of gate and up of one type: one, in which they take turns
    struct Rows {
        size_t piece;
        Range rows;  // of it
    };
    std::vector<Rows> parts;
};
inline const std::vector<CudaPiece>& pieces(const PreparedLinear& weight) {
    return static_cast<const CudaLinear&>(weight).pieces;
}
// The weight of a linear that is one piece. `linear` takes linears of several, and `experts` gates and ups of two.
inline const PackedWeight& packed(const PreparedLinear& weight) { return pieces(weight)[0].packed; }

}  // namespace infinilm::cuda
