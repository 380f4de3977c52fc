#include "model/stream.h"

#include <algorithm>

namespace infinilm {

namespace {

// Whether the result of a sublayer is an op's input, or a sum of two linears, before it joins the stream, or its norm
// is read by two sublayers.
bool needs_ahead(const ModelSpec& spec) {
    return spec.post_norms || spec.residual_multiplier != 1 || spec.parallel_blocks ||
           std::ranges::any_of(spec.layers, [](const LayerSpec& layer) {
               bool multiplies = false;
               layer.visit([&](const auto& own) {
                   if constexpr (requires { own.out_multiplier; }) multiplies |= own.out_multiplier != 1;
               });
               return layer.mixer_beside || layer.norms_behind || multiplies ||
                      (layer.experts && (layer.experts->latent_size > 0 || layer.experts->post_norm));
           });
}

}  // namespace

Stream::Stream(const ModelSpec& spec, BufferPlan& plan)
    : x(plan.add({.name = "x", .columns = spec.hidden_size})),
      normed(plan.add({.name = "normed", .columns = spec.hidden_size})),
      branch_(plan.add({.name = "branch", .columns = spec.hidden_size, .tapped = true})),
      always_ahead_(needs_ahead(spec)),
      pre_norms_(spec.pre_norms),
      eps_(spec.rms_norm_eps),
      multiplier_(spec.residual_multiplier) {}

}  // namespace infinilm
