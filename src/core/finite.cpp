#include "core/finite.h"

#include <algorithm>
#include <vector>

#include "core/shares.h"

namespace infinilm {

namespace {

// The bits of the exponent: all are set in NaN and infinities alone.
template <class Bits>
int64_t find(const Bits* values, int64_t begin, int64_t end, Bits exponent) {
    constexpr int64_t block = 4096;  // a loop that may end early is no loop of vectors
    for (; begin < end; begin += block) {
        const int64_t stop = std::min(begin + block, end);
        bool all_finite = true;
        for (int64_t i = begin; i < stop; ++i) all_finite &= (values[i] & exponent) != exponent;
        if (all_finite) continue;
        while ((values[begin] & exponent) != exponent) ++begin;
        return begin;
    }
    return -1;
}

int64_t find(const TensorView& tensor, int64_t begin, int64_t end) {
    switch (tensor.dtype()) {
        case DType::float32: return find<uint32_t>(tensor.as<const uint32_t>(), begin, end, 0x7f800000);
        case DType::bfloat16: return find<uint16_t>(tensor.as<const uint16_t>(), begin, end, 0x7f80);
        case DType::float16: return find<uint16_t>(tensor.as<const uint16_t>(), begin, end, 0x7c00);
        default: return -1;
    }
}

}  // namespace

int64_t first_not_finite(const TensorView& tensor, int num_threads) {
    constexpr int64_t smallest_share = 1 << 20;  // elements; starting a thread takes as long as reading some 100,000
    const int64_t count = tensor.numel();
    const int64_t shares = std::clamp<int64_t>(count / smallest_share, 1, std::max(num_threads, 1));
    std::vector<int64_t> found(static_cast<size_t>(shares), -1);
    run_shares(shares, [&](int64_t share) {
        found[static_cast<size_t>(share)] = find(tensor, count * share / shares, count * (share + 1) / shares);
    });
    const auto first = std::ranges::find_if(found, [](int64_t index) { return index >= 0; });
    return first == found.end() ? -1 : *first;
}

}  // namespace infinilm
