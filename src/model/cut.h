// Which part of a checkpoint tensor a rank has. A linear whose outputs are divided has rows of its weight and of its
// bias; one whose inputs are divided has columns, and its bias is added once, by rank 0.
#pragma once

#include <functional>
#include <vector>

#include "model/shard.h"

namespace infinilm {

class Cut {
public:
    // The part of `size` rows or columns that a rank has.
    using Divide = std::function<std::vector<Range>(int64_t size, Shard shard)>;

    Cut() = default;  // all ranks have the whole
    static Cut rows(Divide divide) { return {std::move(divide), false}; }
    static Cut columns(Divide divide) { return {std::move(divide), true}; }
    // Rows of several sections, one behind the other, each of which is cut into equal parts.
    static Cut sections(std::vector<int64_t> sizes);
    static Cut rank0();  // the others have nothing

    bool is_whole() const { return !divide_; }
    bool is_columns() const { return columns_; }
    std::vector<Range> of(int64_t size, Shard shard) const {
        return divide_ ? divide_(size, shard) : std::vector<Range>{{0, size}};
    }

private:
    Cut(Divide divide, bool columns) : divide_(std::move(divide)), columns_(columns) {}

    Divide divide_;
    bool columns_ = false;
};

// Equal parts, one behind the other: of heads, where ranks have as many each.
std::vector<Range> equal_parts(int64_t size, Shard shard);
// As inner_of and vocab_of say.
std::vector<Range> inner_parts(int64_t size, Shard shard);
std::vector<Range> vocab_parts(int64_t size, Shard shard);
// Neighbours become one range.
std::vector<Range> joined(const std::vector<Range>& ranges);

}  // namespace infinilm
