// Packed weights lie side by side, share nothing, and give their memory back with the last of them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "cpu/packed_memory.h"

namespace infinilm::test {
namespace {

using cpu::PackedMemory;

Tensor bytes_of(PackedMemory& memory, int64_t bytes) { return memory.allocate(DType::uint8, std::vector{bytes}); }

bool holds(const Tensor& tensor, int value) {
    const auto* const data = tensor.as<uint8_t>();
    return std::all_of(data, data + tensor.bytes(), [&](uint8_t byte) { return byte == value; });
}

TEST(packed_memory) {
    constexpr int64_t chunk = PackedMemory::chunk_bytes;
    PackedMemory memory;
    const int64_t sizes[] = {1, 63, 64, 65, 4096, chunk / 2, chunk / 3, chunk / 3, chunk - 64, 0, 7, chunk, chunk + 1};
    std::vector<Tensor> tensors;
    for (const int64_t size : sizes) {
        tensors.push_back(bytes_of(memory, size));
        const Tensor& made = tensors.back();
        CHECK(made.bytes() == size && reinterpret_cast<uintptr_t>(made.data()) % PackedMemory::alignment == 0);
        CHECK(holds(made, 0));
        if (size > 0) std::memset(made.data(), static_cast<int>(tensors.size()), static_cast<size_t>(size));
    }
    for (size_t i = 0; i < tensors.size(); ++i) CHECK(holds(tensors[i], static_cast<int>(i + 1)));
    for (size_t i = 1; i < 6; ++i) CHECK(tensors[i].owner == tensors[0].owner);  // small ones share a chunk
    CHECK(tensors[7].owner != tensors[0].owner);                                 // where it is full, there is another
    CHECK(tensors[11].owner != tensors[12].owner);                               // large ones have memory of their own

    std::weak_ptr<void> first = tensors[0].owner;
    const Tensor kept = tensors[1];
    tensors.clear();
    CHECK(!first.expired() &&
          holds(kept, 2));  // one tensor keeps its chunk, and memory that it does not keep is not used
    std::weak_ptr<void> last;
    {
        const Tensor again = bytes_of(memory, 64);
        CHECK(holds(again, 0) && again.owner != kept.owner);
        last = again.owner;
    }
    CHECK(last.expired());                 // a chunk goes with the last tensor in it ...
    CHECK(holds(bytes_of(memory, 8), 0));  // ... and the next tensor has a new one
}

}  // namespace
}  // namespace infinilm::test
