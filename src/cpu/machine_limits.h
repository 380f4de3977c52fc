// What this machine can do at most, measured: the ceilings that `infinilm bench` compares its results with, in the same
// run.
#pragma once

#include "cpu/cpu_backend.h"

namespace infinilm::cpu {

struct MachineLimits {
    double read_bytes_per_second;  // streaming read of a buffer larger than any cache
    double dot_flops_per_second;   // of what the selected kernels multiply bfloat16 weights with for compute_dtype
};
// Reads a buffer of buffer_bytes, but of 64 MiB at least and 1 GiB at most. Takes some seconds.
MachineLimits measure_limits(const CpuOptions& options, int64_t buffer_bytes);

}  // namespace infinilm::cpu
