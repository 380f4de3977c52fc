// The binding: nanobind only in this folder. Each file binds one part of the core into the module infinilm._core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bind/gil.h"
#include "core/tensor.h"
#include "core/topology.h"
#include "ops/backend.h"

namespace infinilm {

struct ParamRow;

namespace nb = nanobind;

void bind_tensor(nb::module_& m);
void bind_devices(nb::module_& m);
void bind_ops(nb::module_& m);  // in bind/ops, a file for each room
void bind_spec(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_gguf(nb::module_& m);
void bind_codes(nb::module_& m);
void bind_lookup(nb::module_& m);

DType dtype_from_string(const std::string& text);                // ConfigError that lists the dtypes
Quantization quantization_from_string(const std::string& text);  // likewise
Device device_from_string(const std::string& text);
// The blocks of a type of GGUF files, by its name; "": none. ConfigError: unknown, or removed.
Blocks blocks_from_string(const std::string& type);

// The argument num_threads: 0 means one per core.
inline int threads_of(int num_threads) { return num_threads > 0 ? num_threads : default_num_threads(); }

nb::dict param_shapes(const std::vector<ParamRow>& rows);  // names and shapes

// A zero-copy view that keeps the array alive.
Tensor tensor_from_array(const nb::ndarray<nb::ro>& array, std::optional<DType> dtype = std::nullopt,
                         bool read_only = true);

}  // namespace infinilm
