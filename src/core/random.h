// Counter-based random numbers: the value at (seed, position) depends on nothing else, so that a request draws the same
// numbers alone, in any batch and after preemption. Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011); tests compare it with the known-answer vectors published with Random123.
#pragma once

#include <array>
#include <cstdint>

namespace infinilm {

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
        counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
        key[0] += 0x9E3779B9;  // golden ratio
        key[1] += 0xBB67AE85;  // sqrt(3) - 1
    }
    return counter;
}

// In [0, 1), a multiple of 2^-24.
constexpr float uniform(uint64_t seed, uint64_t position) {
    const std::array<uint32_t, 4> random =
        philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    return static_cast<float>(random[0] >> 8) * 0x1p-24f;
}

}  // namespace infinilm
