// The Python class Backend: the ops of a CPU, one by one. The property tests compare them with the numpy reference on
// every instruction set.
#include <nanobind/stl/shared_ptr.h>

#include "bind/ops/ops.h"
#include "cpu/cpu_backend.h"

namespace infinilm {

namespace {

std::shared_ptr<SharedBackend> make_backend(const std::string& device, const std::string& isa, int num_threads,
                                            const std::string& compute_dtype) {
    if (device_from_string(device).kind != DeviceKind::cpu)
        throw DeviceError("Backend: expected 'cpu', got '" + device + "'; other devices are used through InferEngine");
    auto shared = std::make_shared<SharedBackend>();
    shared->backend = cpu::make_cpu_backend(
        {.num_threads = num_threads, .isa = isa, .compute_dtype = dtype_from_string(compute_dtype)});
    return shared;
}

}  // namespace

void bind_ops(nb::module_& m) {
    OpsClass backend(m, "Backend", "The ops of one device, for tests and experiments; one thread at a time.");
    backend.def(nb::new_(&make_backend), "device"_a, "isa"_a = "", "num_threads"_a = 0, "compute_dtype"_a = "float32");
    bind_linear_ops(m, backend);
    bind_row_ops(backend);
    bind_attention_ops(backend);
    bind_expert_ops(backend);
    bind_delta_ops(backend);
    bind_sampling_ops(m, backend);
}

}  // namespace infinilm
