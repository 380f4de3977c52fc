// The blocks of files that kernels keep as they are. C++17, as kernels.h.
#pragma once

#include <string_view>

#include "cuda/linear/kernels.h"

namespace infinilm::cuda {

// Blocks whose numbers a format keeps. Those of GGUF files; Z4 and F8, which quantised safetensors become: with zero
// points, and e4m3 with a scale that all blocks of a row have, or that 8 rows from a multiple of 8 on have. NVFP4_ROW
// has, besides those of NVFP4, a scale that all blocks of a row have.
inline constexpr BlockType block_types[] = {
    {"Q4_0", 32, 4, BlockScale::f16, WeightFormat::int4},
    {"Q8_0", 32, 8, BlockScale::f16, WeightFormat::int8_groups},
    {"Z4_64", 64, 4, BlockScale::f16_zero, WeightFormat::int4_zeros},
    {"Z4_128", 128, 4, BlockScale::f16_zero, WeightFormat::int4_zeros},
    {"MXFP4", 32, 4, BlockScale::exponent, WeightFormat::fp4},
    {"F8_ROW", 32, 8, BlockScale::f32, WeightFormat::fp8},
    {"F8_32", 32, 8, BlockScale::f32, WeightFormat::fp8_blocks},
    {"F8_128", 128, 8, BlockScale::f32, WeightFormat::fp8_blocks},
    {"Q4_K", 256, 4, BlockScale::six_bits, WeightFormat::q4_k},
    {"Q5_K", 256, 5, BlockScale::six_bits, WeightFormat::q5_k},
    {"Q6_K", 256, 6, BlockScale::bytes, WeightFormat::q6_k},
    {"Q2_K", 256, 2, BlockScale::four_bits, WeightFormat::q2_k},
    {"Q3_K", 256, 3, BlockScale::six_bits_of_16, WeightFormat::q3_k},
    {"Q4_1", 32, 4, BlockScale::f16_minimum, WeightFormat::q4_1},
    {"Q5_1", 32, 5, BlockScale::f16_minimum, WeightFormat::q5_1},
    {"NVFP4", 64, 4, BlockScale::e4m3, WeightFormat::nvfp4},
    {"NVFP4_ROW", 64, 4, BlockScale::f32_e4m3, WeightFormat::nvfp4},
};
inline const BlockType* find_blocks(std::string_view name) {
    for (const BlockType& type : block_types)
        if (type.name == name) return &type;
    return nullptr;
}

// Whether kernels have such weights beside inputs of 8 bits: scales are of rows, or of 128 columns, as those of inputs.
inline bool fits_rounded_inputs(WeightFormat format, const BlockType* blocks) {
    return format == WeightFormat::fp8 ||
           (format == WeightFormat::fp8_blocks && blocks && blocks->size == kRoundedGroup);
}

}  // namespace infinilm::cuda
