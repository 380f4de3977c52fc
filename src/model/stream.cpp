#include "model/stream.h"

namespace infinilm {

Stream::Stream(const ModelSpec& spec, BufferPlan& plan)
    : x(plan.add({.name = "x", .columns = spec.hidden_size})),
      normed(plan.add({.name = "normed", .columns = spec.hidden_size})),
      branch_(plan.add({.name = "branch", .columns = spec.hidden_size, .tapped = true})),
      always_ahead_(spec.post_norms || spec.residual_multiplier != 1 || spec.parallel_blocks),
      pre_norms_(spec.pre_norms),
      eps_(spec.rms_norm_eps),
      multiplier_(spec.residual_multiplier) {}

}  // namespace infinilm
