// Where packed weights lie: side by side in chunks of huge pages.
#pragma once

#include <memory>
#include <span>

#include "core/tensor.h"

namespace infinilm::cpu {

// A matrix of an expert has less than the 2 MiB of a huge page or a few times as much, and a model may have more of
// them than the system gives areas of memory. A chunk is freed with the last tensor in it. One thread at a time.
class PackedMemory {
public:
    static constexpr int64_t chunk_bytes = 32 << 20;
    static constexpr int64_t alignment = 64;  // of a tensor: a cache line

    // Zeroed, to be written once and whole.
    Tensor allocate(DType dtype, std::span<const int64_t> shape);

private:
    std::weak_ptr<void> chunk_;
    std::byte* next_ = nullptr;
    int64_t left_ = 0;  // bytes of the chunk from there
};

}  // namespace infinilm::cpu
