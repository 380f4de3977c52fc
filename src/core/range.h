// A half-open range of indices.
#pragma once

#include <cstdint>

namespace infinilm {

struct Range {
    int64_t begin = 0, end = 0;
    int64_t size() const { return end - begin; }
    bool operator==(const Range&) const = default;
};

}  // namespace infinilm
