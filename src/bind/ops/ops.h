// What the bindings of all ops share. Tests and experiments call single ops through the Python class Backend; each file
// of this folder adds the ops of one room to that class, and the rooms are those of the folder cuda.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <mutex>
#include <optional>

#include "bind/bind.h"
#include "ops/backend.h"

namespace infinilm {

using namespace nb::literals;
using Release = nb::call_guard<ReleaseGil>;
using OptionalTensor = std::optional<Tensor>;

// A backend serves one thread at a time, as that of a rank does; but several threads of Python may have this one.
struct SharedBackend {
    std::unique_ptr<Backend> backend;
    std::mutex in_use;
};

// The backend for one call. Error: another thread has it.
class InUse {
public:
    explicit InUse(SharedBackend& shared) : backend_(*shared.backend), lock_(shared.in_use, std::try_to_lock) {
        if (!lock_) throw Error("this Backend is in use by another thread; give each thread its own");
    }
    operator Backend&() const { return backend_; }

private:
    Backend& backend_;
    std::unique_lock<std::mutex> lock_;
};

inline TensorView optional_view(const OptionalTensor& t) { return t ? t->view() : TensorView(); }

// The view of a tensor that an op writes. Error: it is read-only.
inline TensorView output(const char* op, const char* argument, const Tensor& t) {
    if (t.read_only) throw Error(concat(op, ": ", argument, ": the tensor is read-only; pass a writable one"));
    return t;
}

using OpsClass = nb::class_<SharedBackend>;

void bind_linear_ops(nb::module_& m, OpsClass& backend);
void bind_row_ops(OpsClass& backend);
void bind_attention_ops(OpsClass& backend);
void bind_expert_ops(OpsClass& backend);
void bind_delta_ops(OpsClass& backend);
void bind_sampling_ops(nb::module_& m, OpsClass& backend);

}  // namespace infinilm
