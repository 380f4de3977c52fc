#include "model/block_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "ops/device_queue.h"

namespace infinilm {

namespace {
constexpr uint64_t least_rows = 16;
}  // namespace

void BlockTable::reserve(Backend& backend, int64_t num_rows, int64_t num_columns) {
    const int64_t had_rows = known_ ? known_.shape(0) : 0, had_columns = known_ ? known_.shape(1) : 0;
    if (num_rows <= had_rows && num_columns <= had_columns) return;
    const int64_t rows =
        std::max(had_rows, static_cast<int64_t>(std::bit_ceil(std::max(static_cast<uint64_t>(num_rows), least_rows))));
    const int64_t columns = std::max(had_columns, num_columns);
    if (rows > INT32_MAX / columns)
        throw Error(concat("forward: a block table of ", num_rows, " sequences of ", columns,
                           " blocks is too large; use larger blocks"));
    Tensor known = allocate_host(DType::int32, std::array{rows, columns});
    std::fill_n(known.as<int32_t>(), rows * columns, -1);
    for (int64_t row = 0; row < had_rows; ++row)
        std::memcpy(known.as<int32_t>() + row * columns, known_.as<int32_t>() + row * had_columns,
                    static_cast<size_t>(4 * had_columns));
    while_quiet(backend, [&] {
        const Tensor device = backend.allocate(DType::int32, std::array{rows, columns});
        backend.copy(known, device);
        device_ = device;
    });
    known_ = std::move(known);
}

std::vector<int32_t> BlockTable::list(const TensorView& table, const std::vector<TableSpan>& spans) const {
    std::vector<int32_t> entries;
    for (const TableSpan& span : spans)
        for (int64_t column = span.begin; column < span.end; ++column) {
            entries.push_back(static_cast<int32_t>(span.row * known_.shape(1) + column));
            entries.push_back(table.as<const int32_t>()[span.row * table.stride(0) + column]);
        }
    return entries;
}

void BlockTable::remember(const TensorView& table, const std::vector<TableSpan>& spans) {
    for (const TableSpan& span : spans)
        std::memcpy(known_.as<int32_t>() + span.row * known_.shape(1) + span.begin,
                    table.as<const int32_t>() + span.row * table.stride(0) + span.begin,
                    static_cast<size_t>(4 * (span.end - span.begin)));
}

}  // namespace infinilm
