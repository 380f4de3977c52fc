// What a model must be to run, asked once, when an engine is made.
#pragma once

#include "model/spec.h"

namespace infinilm {

void validate(const ModelSpec& spec);  // ConfigError: sizes that contradict each other

// What a model has that GPUs have no kernels for; null: nothing.
const char* only_on_cpus(const ModelSpec& spec);

}  // namespace infinilm
