#include "model/cache_entries.h"

#include "core/error.h"

namespace infinilm {

namespace {

int64_t row_bytes(const TensorView& tensor) { return tensor.bytes() / tensor.shape(0); }

// Calls visit(row of a tensor, its place in bytes [num_entries, entry_bytes]), both as [bytes] uint8.
template <class Visit>
void for_each_row(std::span<const TensorView> tensors, std::span<const int32_t> entries, const TensorView& bytes,
                  Visit visit) {
    if (tensors.empty()) return;  // a stage of a pipeline without layers of this kind: its entries have no bytes
    const int64_t num_entries = tensors[0].shape(0);
    for (const int32_t entry : entries)
        if (entry < 0 || entry >= num_entries)
            throw RequestError(concat("the cache has entries 0 to ", num_entries - 1, " of this kind, got ", entry));
    auto* place = bytes.as<std::byte>();
    for (const int32_t entry : entries)
        for (const TensorView& tensor : tensors) {
            const int64_t size = row_bytes(tensor);
            visit(TensorView(tensor.as<std::byte>() + entry * size, DType::uint8, {size}, tensor.device()),
                  TensorView(place, DType::uint8, {size}));
            place += size;
        }
}

}  // namespace

int64_t entry_bytes(std::span<const TensorView> tensors) {
    int64_t bytes = 0;
    for (const TensorView& tensor : tensors) bytes += row_bytes(tensor);
    return bytes;
}

Tensor read_entries(Backend& backend, std::span<const TensorView> tensors, std::span<const int32_t> entries) {
    Tensor bytes = allocate_host(DType::uint8, {static_cast<int64_t>(entries.size()), entry_bytes(tensors)});
    prefer_huge_pages(bytes);  // to fault them in takes longer than to copy them
    for_each_row(tensors, entries, bytes,
                 [&](const TensorView& row, const TensorView& place) { backend.copy(row, place); });
    return bytes;
}

void write_entries(Backend& backend, std::span<const TensorView> tensors, std::span<const int32_t> entries,
                   const TensorView& bytes) {
    const int64_t rows = static_cast<int64_t>(entries.size()), size = entry_bytes(tensors);
    if (bytes.dtype() != DType::uint8 || bytes.ndim() != 2 || bytes.shape(0) != rows || bytes.shape(1) != size ||
        !bytes.is_contiguous() || bytes.device().kind != DeviceKind::cpu)
        throw RequestError(concat("expected ", rows, " entries of ", size, " bytes, [", rows, ", ", size,
                                  "] uint8 in host memory, got ", shape_string(bytes.shape()), " ",
                                  name(bytes.dtype())));
    for_each_row(tensors, entries, bytes,
                 [&](const TensorView& row, const TensorView& place) { backend.copy(place, row); });
}

}  // namespace infinilm
