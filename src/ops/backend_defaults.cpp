// What a backend does unless it says otherwise. A file of its own: the CUDA library is linked with it, too.
#include "ops/backend.h"

namespace infinilm {

void Backend::check_packed(const PackedSource&) const {
    throw WeightError(concat("packed weights are laid out for the kernels of CPUs, and this device is ",
                             to_string(device()), "; load the checkpoint that they were packed from"));
}

std::unique_ptr<PreparedLinear> Backend::adopt_linear(const PackedSource& source) {
    check_packed(source);
    return nullptr;
}

}  // namespace infinilm
