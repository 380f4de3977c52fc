// Blocks and states of a cache as bytes, for memory that outlives the cache, and back into one of the same shape.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "ops/backend.h"

namespace infinilm {

// What an entry takes: a row of each of these tensors, which all have the same number of rows.
int64_t entry_bytes(std::span<const TensorView> tensors);

// [num_entries, entry_bytes] uint8 in host memory: of each of the entries the rows of all tensors, one behind the
// other. RequestError: an entry that there is not.
Tensor read_entries(Backend& backend, std::span<const TensorView> tensors, std::span<const int32_t> entries);
// The way back. RequestError: an entry that there is not, or bytes of another shape.
void write_entries(Backend& backend, std::span<const TensorView> tensors, std::span<const int32_t> entries,
                   const TensorView& bytes);

}  // namespace infinilm
