// How many residual streams AltUp may mix: kernels have room for the rows of so many, and as many coefficients.
#pragma once

namespace infinilm {

constexpr int most_streams = 8;

}  // namespace infinilm
