// How numbers lie in memory that a kernel reads. No C++ standard headers: kernels of every device include this.
#pragma once

namespace infinilm {

enum class Element : int { f32, bf16, f16, int8 };  // int8: entries of a cache alone

}  // namespace infinilm
