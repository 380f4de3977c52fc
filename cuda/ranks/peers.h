// OneShot (src/ops/device_queue.h) over the kernel of one_shot.h.
#pragma once

#include <memory>

#include "cuda/core/types.h"
#include "ops/device_queue.h"

namespace infinilm::cuda {

// The current device is that of the rank, and `stream` one of it. Null: connect_peers has refused these devices.
std::unique_ptr<OneShot> make_one_shot(const OneShotOptions& options, Element type, cudaStream_t stream);

}  // namespace infinilm::cuda
