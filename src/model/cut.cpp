#include "model/cut.h"

#include <utility>

namespace infinilm {

Cut Cut::rank0() {
    return rows([](int64_t size, Shard shard) {
        return shard.rank == 0 ? std::vector<Range>{{0, size}} : std::vector<Range>();
    });
}

Cut Cut::sections(std::vector<int64_t> sizes) {
    return rows([sizes = std::move(sizes)](int64_t, Shard shard) {
        std::vector<Range> ranges;
        int64_t before = 0;
        for (const int64_t size : sizes) {
            const Range own = equal_parts(size, shard)[0];
            ranges.push_back({before + own.begin, before + own.end});
            before += size;
        }
        return joined(ranges);
    });
}

std::vector<Range> equal_parts(int64_t size, Shard shard) {
    const int64_t part = size / shard.size;
    return {{shard.rank * part, (shard.rank + 1) * part}};
}

std::vector<Range> inner_parts(int64_t size, Shard shard) { return {inner_of(size, shard)}; }

std::vector<Range> vocab_parts(int64_t size, Shard shard) { return {vocab_of(size, shard)}; }

std::vector<Range> joined(const std::vector<Range>& ranges) {
    std::vector<Range> out;
    for (const Range& range : ranges)
        if (!out.empty() && out.back().end == range.begin)
            out.back().end = range.end;
        else
            out.push_back(range);
    return out;
}

}  // namespace infinilm
