// What attention takes on the current device.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/core/host.h"
#include "ops/backend.h"

namespace infinilm::cuda {

// DeviceError: attention of such heads does not run on the current device.
void check_head(int head_dim);

}  // namespace infinilm::cuda
