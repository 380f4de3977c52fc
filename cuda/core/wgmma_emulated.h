// wgmma for the host compiler. Every thread computes its own accumulators, from shared memory as it is when the group
// is waited for: a stage released too early is read after it was overwritten. Until then the accumulators hold NaN.
// Included by wgmma.cuh only.
#pragma once

#include "cuda/core/ptx_sm90_emulated.h"

namespace infinilm::cuda {

inline void wgmma_fence() { emulator::wgmma_fence(); }
template <int kCount>
void wgmma_hold(float (&)[kCount]) {}
inline void wgmma_commit() { emulator::async_commit(emulator::Queue::wgmma); }

// A wgmma completes as a whole: all four warps have issued it, and all have read before any of them goes on.
template <int kPending>
void wgmma_wait() {
    if (emulator::async_pending(emulator::Queue::wgmma) <= kPending) return;
    emulator::warpgroup_sync("wgmma.wait_group");
    emulator::async_wait(emulator::Queue::wgmma, kPending);
    emulator::warpgroup_sync("wgmma.wait_group");
}

// The 16 elements (row, k) of an operand; `row` counts along M or N. See the table in wgmma.cuh. Where those of a row
// are neighbours, 8 of them are 16 bytes, which swizzling moves as a whole.
template <class T>
void emulated_operand(uint64_t descriptor, bool mn_major, uint32_t row, float (&values)[16]) {
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4;
    const uint64_t layout = descriptor >> 62;
    if (layout > 1)
        emulator::fail("wgmma-descriptor", "only the layouts none and swizzle_128 are emulated, not %d",
                       static_cast<int>(layout));
    const bool swizzled = layout == 1;
    auto at = [=](uint32_t offset, uint32_t bytes) {
        const uint32_t address = start + offset;
        return emulator::shared_pointer(swizzled ? emulated_swizzle_128(address) : address, bytes, "wgmma");
    };
    for (uint32_t k = 0; !mn_major && k < 16; k += 8) {
        alignas(16) uint32_t pairs[4];
        emulated_copy_16(
            pairs, at(row / 8 * stride + (swizzled ? row % 8 * 128 + k * 2 : row % 8 * 16 + k / 8 * leading), 16));
        for (uint32_t i = 0; i < 4; ++i) {
            values[k + 2 * i] = unpack_low<T>(pairs[i]);
            values[k + 2 * i + 1] = unpack_high<T>(pairs[i]);
        }
    }
    for (uint32_t k = 0; mn_major && k < 16; ++k) {
        const uint32_t offset = swizzled ? row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128
                                         : row / 8 * stride + row % 8 * 2 + k / 8 * leading + k % 8 * 16;
        values[k] = to_float(*reinterpret_cast<const T*>(at(offset, 2)));
    }
}

template <int N, class T>
struct Wgmma {
    static_assert(N == 32 || N == 64 || N == 72 || N == 128 || N == 176 || N == 192, "those of wgmma.cuh");

    template <bool kMnMajorB = false>
    static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
        const uint32_t thread = emulator::where().linear % 128, row = thread / 32 * 16 + thread % 32 / 4;
        push<kMnMajorB>(d, b, accumulate, [=](float (&rows)[2][16]) {
            for (uint32_t h = 0; h < 2; ++h) emulated_operand<T>(a, false, row + 8 * h, rows[h]);
        });
    }
    // A of registers is taken at issue; real hardware reads it until the group is waited for.
    template <bool kMnMajorB = false>
    static void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        const emulator::LaneData mine{{a[0] | uint64_t{a[1]} << 32, a[2] | uint64_t{a[3]} << 32, 0, 0}};
        const emulator::LaneData* all = emulator::exchange(~0u, mine, "wgmma.mma_async");
        float rows[2][16];
        for (unsigned s = 0; s < 4; ++s)
            for (unsigned i = 0; i < 4; ++i) {
                const uint32_t packed =
                    static_cast<uint32_t>(all[emulator::lane() / 4 * 4 + s].word[i / 2] >> 32 * (i % 2));
                rows[i % 2][8 * (i / 2) + 2 * s] = unpack_low<T>(packed);
                rows[i % 2][8 * (i / 2) + 2 * s + 1] = unpack_high<T>(packed);
            }
        struct Rows {
            float value[2][16];
        } copy;
        memcpy(copy.value, rows, sizeof rows);
        push<kMnMajorB>(d, b, accumulate, [copy](float (&out)[2][16]) { memcpy(out, copy.value, sizeof out); });
    }

private:
    template <bool kMnMajorB, class ReadRows>
    static void push(float (&d)[N / 2], uint64_t b, int accumulate, ReadRows read_rows) {
        emulator::require_compute_capability(90, "wgmma.mma_async");
        float* sums = emulator::wgmma_accumulators(d, N / 2, accumulate != 0);
        const uint32_t column = emulator::lane() % 4 * 2;
        emulator::async_push(emulator::Queue::wgmma, [=] {
            float rows[2][16], values[16];
            read_rows(rows);
            for (uint32_t j = 0; j < N / 8; ++j)
                for (uint32_t c = 0; c < 2; ++c) {
                    emulated_operand<T>(b, kMnMajorB, 8 * j + column + c, values);
                    for (uint32_t h = 0; h < 2; ++h) {
                        float& sum = sums[4 * j + 2 * h + c];
                        float total = accumulate ? sum : 0.0f;
                        for (uint32_t k = 0; k < 16; ++k) total += rows[h][k] * values[k];
                        sum = total;
                    }
                }
            emulator::wgmma_finished(sums);
        });
    }
};

}  // namespace infinilm::cuda
