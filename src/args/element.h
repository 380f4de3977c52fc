// How numbers lie in memory that a kernel reads. No C++ standard headers: kernels of every device include this.
#pragma once

namespace infinilm {

enum class Element : int { f32, bf16, f16, int8, fp8 };  // int8 and fp8 (e4m3): entries of a cache alone

// Whether each row of a cache has a scale, which multiplies its numbers.
constexpr bool has_row_scales(Element type) { return type == Element::int8 || type == Element::fp8; }

}  // namespace infinilm
