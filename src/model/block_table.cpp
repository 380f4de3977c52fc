#include "model/block_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "ops/device_queue.h"

namespace infinilm {

namespace {
constexpr uint64_t least_rows = 16;

// f(from, to, count) for the entries of each span: where they are in `tables`, and which elements of `known`, counted
// from its first, they are.
template <class F>
void for_entries(const TensorView& tables, const TableSpans& spans, const TensorView& known, F f) {
    for (size_t g = 0; g < spans.size(); ++g) {
        const auto group = static_cast<int64_t>(g);
        for (const TableSpan& span : spans[g])
            f(tables.as<const int32_t>() + group * tables.stride(0) + span.row * tables.stride(1) + span.begin,
              group * known.stride(0) + span.row * known.stride(1) + span.begin, span.end - span.begin);
    }
}
}  // namespace

void BlockTable::reserve(Backend& backend, int64_t num_groups, int64_t num_rows, int64_t num_columns) {
    const int64_t had_rows = known_ ? known_.shape(1) : 0, had_columns = known_ ? known_.shape(2) : 0;
    if (num_rows <= had_rows && num_columns <= had_columns) return;
    const int64_t rows =
        std::max(had_rows, static_cast<int64_t>(std::bit_ceil(std::max(static_cast<uint64_t>(num_rows), least_rows))));
    const int64_t columns = std::max(had_columns, num_columns);
    if (rows > INT32_MAX / columns / num_groups)
        throw Error(concat("forward: a block table of ", num_rows, " sequences of ", columns,
                           " blocks is too large; use larger blocks"));
    Tensor known = allocate_host(DType::int32, std::array{num_groups, rows, columns});
    std::fill_n(known.as<int32_t>(), known.numel(), -1);
    for (int64_t group = 0; group < num_groups; ++group)
        for (int64_t row = 0; row < had_rows; ++row)
            std::memcpy(known.as<int32_t>() + (group * rows + row) * columns,
                        known_.as<int32_t>() + (group * had_rows + row) * had_columns,
                        static_cast<size_t>(4 * had_columns));
    while_quiet(backend, [&] {
        const Tensor device = backend.allocate(DType::int32, std::array{num_groups, rows, columns});
        backend.copy(known, device);
        device_ = device;
    });
    known_ = std::move(known);
}

std::vector<int32_t> BlockTable::list(const TensorView& tables, const TableSpans& spans) const {
    std::vector<int32_t> entries;
    for_entries(tables, spans, known_, [&](const int32_t* from, int64_t to, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            entries.push_back(static_cast<int32_t>(to + i));
            entries.push_back(from[i]);
        }
    });
    return entries;
}

void BlockTable::remember(const TensorView& tables, const TableSpans& spans) {
    for_entries(tables, spans, known_, [&](const int32_t* from, int64_t to, int64_t count) {
        std::memcpy(known_.as<int32_t>() + to, from, static_cast<size_t>(4 * count));
    });
}

}  // namespace infinilm
