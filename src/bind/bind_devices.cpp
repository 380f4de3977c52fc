// What this machine has: builds of the CPU kernels, GPUs, cores, and how fast its CPU is.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "core/topology.h"
#include "cpu/cpu_backend.h"
#include "cpu/isa.h"
#include "cpu/machine_limits.h"
#include "ops/cuda_library.h"

namespace infinilm {

void bind_devices(nb::module_& m) {
    using namespace nb::literals;

    m.def(
        "cpu_isas",
        [] {
            std::vector<std::string> names;
            for (const cpu::Kernels* kernels : cpu::available_kernels()) names.emplace_back(kernels->name);
            return names;
        },
        "Builds of the CPU kernels that this machine can run, slowest first.");
    m.def(
        "selected_cpu_isa", [] { return std::string(cpu::select_kernels().name); },
        "The one used unless told otherwise.");
    m.def(
        "cpu_multiplies_bf16", [] { return cpu::select_kernels().multiplies_bf16(); },
        "Whether it multiplies bfloat16 by bfloat16, so that compute_dtype bfloat16 rounds the inputs of linears.");
    m.def(
        "cpu_fuses_products", [] { return cpu::fuses_products(cpu::select_kernels().name); },
        "Whether it rounds a product and its sum once. All that do give the same bits, but for products of bfloat16.");
    m.def(
        "parse_device",
        [](const std::string& text) {
            const Device device = device_from_string(text);
            return std::pair(std::string(device.kind == DeviceKind::cpu ? "cpu" : "cuda"), device.index);
        },
        "device"_a, "Kind and index of a device such as 'cuda:1'. ConfigError: it is none.");
    m.def(
        "cuda_devices",
        [] {
            nb::list out;
            for (const CudaDevice& device : cuda_devices()) {
                nb::dict entry;
                entry["name"] = device.name;
                entry["compute_capability"] = concat(device.major, ".", device.minor);
                entry["total_bytes"] = device.total_bytes;
                entry["num_sms"] = device.num_sms;
                out.append(entry);
            }
            return out;
        },
        nb::sig("def cuda_devices() -> list[dict[str, typing.Any]]"),
        "The usable GPUs, at least one. DeviceError: why there is none.");
    m.def("cuda_free_bytes", &cuda_free_bytes, "device"_a,
          "Bytes of memory that are free on a GPU. Takes some of them, if this process does not use that GPU yet.");
    m.def("default_num_threads", &default_num_threads, "Cores this process may use, no more than its cgroups' quota.");
    m.def(
        "measure_cpu_limits",
        [](int num_threads, const std::string& compute_dtype, int64_t buffer_bytes) {
            const auto limits = cpu::measure_limits(
                {.num_threads = num_threads, .isa = "", .compute_dtype = dtype_from_string(compute_dtype)},
                buffer_bytes);
            return std::pair(limits.read_bytes_per_second, limits.dot_flops_per_second);
        },
        "num_threads"_a = 0, "compute_dtype"_a = "float32", "buffer_bytes"_a = int64_t{1} << 30,
        nb::call_guard<ReleaseGil>(),
        "Measured read bandwidth in bytes/s and arithmetic peak in flop/s. buffer_bytes: what is read, 64 MiB to 1 "
        "GiB.");
}

}  // namespace infinilm
