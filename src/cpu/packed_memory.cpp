#include "cpu/packed_memory.h"

namespace infinilm::cpu {

// In small pages, most of the time that packing takes would be spent on their faults.
Tensor PackedMemory::allocate(DType dtype, std::span<const int64_t> shape) {
    const int64_t bytes = TensorView(nullptr, dtype, shape).bytes();
    if (bytes >= chunk_bytes) {
        Tensor alone = allocate_host(dtype, shape);
        prefer_huge_pages(alone);
        return alone;
    }
    std::shared_ptr<void> chunk = chunk_.lock();
    if (!chunk || bytes > left_) {
        const Tensor memory = allocate_host(DType::uint8, {chunk_bytes});
        prefer_huge_pages(memory);
        chunk_ = chunk = memory.owner;
        next_ = memory.as<std::byte>();
        left_ = chunk_bytes;
    }
    Tensor tensor{TensorView(next_, dtype, shape), std::move(chunk)};
    const int64_t taken = (bytes + alignment - 1) / alignment * alignment;
    next_ += taken;
    left_ -= taken;
    return tensor;
}

}  // namespace infinilm::cpu
