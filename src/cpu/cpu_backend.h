// The CPU backend: a thread pool and one table of kernels. Weights are used in place, as mapped from the checkpoint.
#pragma once

#include <memory>
#include <string>

#include "ops/backend.h"

namespace infinilm::cpu {

struct CpuOptions {
    int num_threads = 0;  // 0: one per available core
    std::string isa;      // "": INFINILM_CPU_ISA, else the fastest this machine runs
    // bfloat16: bfloat16 weights are multiplied by x rounded to bfloat16 where the kernels multiply bfloat16 (amx_bf16,
    // avx512_bf16); other weights, other dtypes and other kernels multiply the stored weights by x in float32.
    DType compute_dtype = DType::float32;
};

class CpuBackend;  // defined in cpu_backend.cpp; callers see Backend and these:
std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options);
int default_num_threads();  // cores this process may run on, its affinity mask and cgroup CPU quota taken into account

struct MachineLimits {
    double read_bytes_per_second;  // streaming read of a buffer larger than any cache
    double dot_flops_per_second;   // of what the selected kernels multiply bfloat16 weights with for compute_dtype
};
MachineLimits measure_limits(const CpuOptions& options);

}  // namespace infinilm::cpu
