#include "model/buffers.h"

#include <algorithm>
#include <array>

#include "ops/device_queue.h"

namespace infinilm {

Buffer BufferPlan::add(const Wanted& wanted) {
    const Buffer buffer{.index = entries_.size(), .rows = wanted.rows, .columns = wanted.columns};
    if (!buffer) return {};
    const int64_t elements = wanted.rows * wanted.columns;
    const auto found = std::ranges::find(entries_, wanted.name, &Entry::name);
    if (found == entries_.end()) {
        entries_.push_back({std::string(wanted.name), elements, wanted.dtype, wanted.tapped});
        return buffer;
    }
    if (found->dtype != wanted.dtype || found->tapped != wanted.tapped)
        throw Error(
            concat("the buffer '", wanted.name, "' is asked for in two dtypes, or with a tap alone and without"));
    found->elements = std::max(found->elements, elements);
    return {.index = static_cast<size_t>(found - entries_.begin()), .rows = buffer.rows, .columns = buffer.columns};
}

int64_t BufferPlan::bytes(int64_t n, DType activation, bool tapped) const {
    int64_t bytes = 0;
    for (const Entry& entry : entries_)
        if (tapped || !entry.tapped) bytes += entry.elements * n * size_bytes(entry.dtype.value_or(activation));
    return bytes;
}

void Buffers::reserve(Backend& backend, const BufferPlan& plan, int64_t n, bool tapped) {
    const bool changed = entries_ != plan.entries_;
    const bool grows[] = {changed || n > capacity_[0], tapped && (changed || n > capacity_[1])};
    if (!grows[0] && !grows[1]) return;
    while_quiet(backend, [&] {
        if (changed) *this = {};
        entries_ = plan.entries_;
        memory_.resize(entries_.size());
        for (size_t i = 0; i < entries_.size(); ++i)  // gives back before it asks for more
            if (grows[entries_[i].tapped]) memory_[i] = {};
        for (const int kind : {0, 1})
            if (grows[kind]) capacity_[kind] = 0;
        for (size_t i = 0; i < entries_.size(); ++i) {
            const BufferPlan::Entry& entry = entries_[i];
            if (!grows[entry.tapped]) continue;
            const DType dtype = entry.dtype.value_or(backend.activation_dtype());
            memory_[i] = backend.allocate(dtype, std::array{n, entry.elements});
            // A token's row may be pages away from the next one's.
            const bool is_large = memory_[i].bytes() >= large_buffer;
            if (memory_[i].device().kind == DeviceKind::cpu && is_large) prefer_huge_pages(memory_[i]);
        }
        for (const int kind : {0, 1})
            if (grows[kind]) capacity_[kind] = n;
    });
}

}  // namespace infinilm
