// What a sum over ranks is, for tensors in host memory: element by element ((part 0 + part 1) + part 2) .., in float32,
// rounded once; int32 wraps around. So its bits depend neither on the size of a message nor on an element's place in
// it. Used by ranks in one process, by the CPU backend and by tests; cuda/rows/sum_parts.cuh is the same on a GPU.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>

#include "core/dtype.h"

namespace infinilm {

// outs[o][i] = sum over p of parts[p][i], for i in [begin, end) and each of outs, which may be the parts.
template <class T>
void sum_parts(std::span<void* const> parts, std::span<void* const> outs, int64_t begin, int64_t end) {
    constexpr bool is_integer = std::is_same_v<T, int32_t>;
    using Sum = std::conditional_t<is_integer, uint32_t, float>;  // unsigned: overflow is defined
    const auto widen = [](T v) -> Sum {
        if constexpr (is_integer)
            return static_cast<Sum>(v);
        else
            return to_float(v);
    };
    constexpr int64_t block = 1024;  // partial sums stay in the first-level cache
    Sum sum[block];
    T rounded[block];
    for (; begin < end; begin += block) {
        const int64_t n = std::min(block, end - begin);
        const T* first = static_cast<const T*>(parts[0]) + begin;
        for (int64_t i = 0; i < n; ++i) sum[i] = widen(first[i]);
        for (const void* part : parts.subspan(1)) {
            const T* x = static_cast<const T*>(part) + begin;
            for (int64_t i = 0; i < n; ++i) sum[i] += widen(x[i]);
        }
        for (int64_t i = 0; i < n; ++i) {
            if constexpr (is_integer)
                rounded[i] = static_cast<T>(sum[i]);
            else
                rounded[i] = from_float<T>(sum[i]);
        }
        for (void* out : outs) std::memcpy(static_cast<T*>(out) + begin, rounded, static_cast<size_t>(n) * sizeof(T));
    }
}

inline void sum_parts(DType dtype, std::span<void* const> parts, std::span<void* const> outs, int64_t begin,
                      int64_t end) {
    if (dtype == DType::int32) return sum_parts<int32_t>(parts, outs, begin, end);
    visit_floating(dtype, [&]<class T>(T) { sum_parts<T>(parts, outs, begin, end); });
}

}  // namespace infinilm
