// What a model must be to run, asked once, when an engine is made.
#pragma once

#include "model/spec.h"

namespace infinilm {

void validate(const ModelSpec& spec);  // ConfigError: sizes that contradict each other

}  // namespace infinilm
