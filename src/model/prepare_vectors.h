// Vectors of a model as ops want them, made of what was loaded.
#pragma once

#include "model/spec.h"
#include "model/weights.h"

namespace infinilm {

// out[i] = (vector[i] + offset) * multiplier, float32 in host memory.
void fill_from(Backend& backend, const TensorView& vector, float offset, float multiplier, const TensorView& out);
// vector * multiplier in float32.
Tensor widened(Backend& backend, const TensorView& vector, float multiplier = 1);
// What Backend::prepare_vector gets of a norm: its weight as it is, or with the offset and times a multiplier in
// float32.
Tensor norm_weight(Backend& backend, const NormForm& form, const VectorWeights& norm, float multiplier);
// -e^vector in float32: the decay of a state, of which checkpoints have the logarithm.
Tensor negative_exp(Backend& backend, const VectorWeights& log);
// The weight of a convolution of each channel, [channels, 1, taps], as [taps, channels] in float32.
Tensor by_tap(Backend& backend, const VectorWeights& conv);
Tensor ones_like(const TensorView& tensor);

}  // namespace infinilm
