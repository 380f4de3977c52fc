#include "model/prepare_vectors.h"

#include <algorithm>
#include <cmath>

namespace infinilm {

void fill_from(Backend& backend, const TensorView& vector, float offset, float multiplier, const TensorView& out) {
    const Tensor host = allocate_host(vector.dtype(), vector.shape());
    backend.copy(vector, host);
    visit_floating(host.dtype(), [&]<class T>(T) {
        for (int64_t i = 0; i < out.numel(); ++i)
            out.as<float>()[i] = (to_float(host.as<const T>()[i]) + offset) * multiplier;
    });
}

Tensor widened(Backend& backend, const TensorView& vector, float multiplier) {
    const Tensor out = allocate_host(DType::float32, vector.shape());
    fill_from(backend, vector, 0, multiplier, out);
    return out;
}

Tensor norm_weight(Backend& backend, const NormForm& form, const VectorWeights& norm, float multiplier) {
    const Tensor& weight = norm.loaded;
    const bool is_layer_norm = form.kind != NormKind::rms;
    if (!weight || (!is_layer_norm && form.offset == 0 && multiplier == 1)) return weight;
    const int64_t size = weight.numel();
    if (!is_layer_norm) {
        const Tensor out = allocate_host(DType::float32, {size});
        fill_from(backend, weight, form.offset, multiplier, out);
        return out;
    }
    const Tensor out = allocate_host(DType::float32, {2, size});
    fill_from(backend, weight, form.offset, multiplier, out.select(0, 0));
    if (norm.bias) fill_from(backend, norm.bias, 0, multiplier, out.select(0, 1));
    return out;
}

Tensor negative_exp(Backend& backend, const VectorWeights& log) {
    const Tensor rate = widened(backend, log.loaded);
    for (int64_t i = 0; i < rate.numel(); ++i) rate.as<float>()[i] = -std::exp(rate.as<float>()[i]);
    return rate;
}

Tensor by_tap(Backend& backend, const VectorWeights& conv) {
    const Tensor by_channel = widened(backend, conv.loaded);
    const int64_t channels = by_channel.shape(0), taps = by_channel.shape(2);
    const Tensor out = allocate_host(DType::float32, {taps, channels});
    for (int64_t channel = 0; channel < channels; ++channel)
        for (int64_t tap = 0; tap < taps; ++tap)
            out.as<float>()[tap * channels + channel] = by_channel.as<const float>()[channel * taps + tap];
    return out;
}

Tensor ones_like(const TensorView& tensor) {
    Tensor ones = allocate_host(tensor.dtype(), tensor.shape());
    visit_floating(ones.dtype(), [&]<class T>(T) { std::fill_n(ones.as<T>(), ones.numel(), from_float<T>(1.0f)); });
    return ones;
}

}  // namespace infinilm
