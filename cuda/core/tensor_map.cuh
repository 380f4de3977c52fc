// Tensor maps: the description of a row-major matrix that tensor_load_2d (ptx_sm90.cuh) copies boxes
// of. Made on the host when weights or workspaces are allocated, passed to kernels as `const __grid_constant__
// TensorMap`. libcuda is never linked: its encoder is asked for through the runtime.
#pragma once

#include "cuda/core/device.cuh"

#ifndef INFINILM_CUDA_EMULATOR
#include <cuda.h>
#include <cudaTypedefs.h>
#endif

namespace infinilm::cuda {

// How a box lies in shared memory: rows of box_columns elements. swizzle_128 needs rows of 128 bytes and exchanges
// their 16-byte pieces (address bits 4-6 ^= bits 7-9), as wgmma and ldmatrix without bank conflicts want.
enum class Swizzle { none, swizzle_128 };

#ifdef INFINILM_CUDA_EMULATOR
struct alignas(64) TensorMap {
    const uint8_t* base;
    uint64_t columns, rows, row_stride_bytes;
    uint32_t box_columns, box_rows, element_bytes;
    Swizzle swizzle;
};
#else
using TensorMap = CUtensorMap;
#endif

struct TensorMapParams {
    const void* data;  // device memory, 16-byte aligned: [rows, columns] of elements
    uint64_t columns, rows;
    uint64_t row_stride_bytes;       // a multiple of 16
    uint32_t box_columns, box_rows;  // at most 256 each; a row of the box a multiple of 16 bytes
    Swizzle swizzle = Swizzle::swizzle_128;
    uint32_t element_bytes = 2;  // or 8: for boxes with longer rows, of whatever lies there
};

inline cudaError_t make_tensor_map(TensorMap* map, const TensorMapParams& p) {
    const uint32_t box_bytes = p.box_columns * p.element_bytes;  // of a row
    const bool valid = reinterpret_cast<uintptr_t>(p.data) % 16 == 0 && p.row_stride_bytes % 16 == 0 &&
                       (p.element_bytes == 2 || p.element_bytes == 8) && box_bytes % 16 == 0 && p.box_columns > 0 &&
                       p.box_columns <= 256 && p.box_rows > 0 && p.box_rows <= 256 &&
                       (p.swizzle == Swizzle::none || box_bytes == 128);
    if (!valid) return cudaErrorInvalidValue;
#ifdef INFINILM_CUDA_EMULATOR
    *map = {static_cast<const uint8_t*>(p.data),
            p.columns,
            p.rows,
            p.row_stride_bytes,
            p.box_columns,
            p.box_rows,
            p.element_bytes,
            p.swizzle};
    return cudaSuccess;
#else
    // Looked up once: the library has no link-time dependency on the driver.
    static void* const function = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
        const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
        return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr;
    }();
    if (!function) return cudaErrorNotSupported;
    const cuuint64_t size[2] = {p.columns, p.rows}, stride[1] = {p.row_stride_bytes};
    const cuuint32_t box[2] = {p.box_columns, p.box_rows}, step[2] = {1, 1};
    // The element type matters only to out-of-range fills, which are zero.
    const CUresult result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
        map, p.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 2,
        const_cast<void*>(p.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
        p.swizzle == Swizzle::none ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
#endif
}

}  // namespace infinilm::cuda
