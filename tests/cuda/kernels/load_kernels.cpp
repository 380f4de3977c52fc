// For the tests of kernels: what a backend does before its first launch.
#include "cuda/core/kernel_list.h"

extern "C" int load_kernels() { return infinilm::cuda::load_kernels(); }
