#include "model/cut.h"

namespace infinilm {

Cut Cut::rank0() {
    return rows([](int64_t size, Shard shard) {
        return shard.rank == 0 ? std::vector<Range>{{0, size}} : std::vector<Range>();
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
