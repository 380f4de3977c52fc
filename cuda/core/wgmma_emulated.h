// wgmma for the host compiler. A wgmma completes as a whole: it is computed once all four warps wait for it, from
// shared memory as it is then, where a stage that was released too early is overwritten. Until then the accumulators
// hold NaN. Included by wgmma.cuh only.
#pragma once

#include <type_traits>

#include "cuda/core/ptx_sm90_emulated.h"

namespace infinilm::cuda {

inline void wgmma_fence() { emulator::wgmma_fence(); }
template <int kCount>
void wgmma_hold(float (&)[kCount]) {}
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int kPending>
void wgmma_wait() {
    emulator::wgmma_wait(kPending);
}

struct e4m3;  // wgmma_e4m3.cuh

// Names one of the two e4m3 numbers of 16 bits; k is in another order so than the instruction has it.
template <int kOdd>
struct ByteOfPair {};
template <class T>
struct Unpacked {
    static float low(uint32_t packed) { return unpack_low<T>(packed); }
    static float high(uint32_t packed) { return unpack_high<T>(packed); }
};
template <int kOdd>
struct Unpacked<ByteOfPair<kOdd>> {
    static float low(uint32_t packed) { return unpack_low<f16>(e4m3_to_f16(packed >> 8 * kOdd)); }
    static float high(uint32_t packed) { return unpack_high<f16>(e4m3_to_f16(packed >> 8 * kOdd)); }
};

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
            values[k + 2 * i] = Unpacked<T>::low(pairs[i]);
            values[k + 2 * i + 1] = Unpacked<T>::high(pairs[i]);
        }
    }
    for (uint32_t k = 0; mn_major && k < 16; ++k) {
        const uint32_t offset = swizzled ? row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128
                                         : row / 8 * stride + row % 8 * 2 + k / 8 * leading + k % 8 * 16;
        values[k] = Unpacked<T>::low(*reinterpret_cast<const uint16_t*>(at(offset, 2)));
    }
}

template <int N, class T>
struct Wgmma {
    static_assert(N == 32 || N == 64 || N == 72 || N == 128 || N == 176 || N == 192, "those of wgmma.cuh");

    template <bool kMnMajorB = false>
    static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
        emulator::wgmma_issue(run<kMnMajorB, false>, {a, b, {}, nullptr, accumulate != 0}, d, N / 2);
    }
    // A of registers is taken at issue; real hardware reads it until the group is waited for.
    template <bool kMnMajorB = false>
    static void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        emulator::wgmma_issue(run<kMnMajorB, true>, {0, b, {a[0], a[1], a[2], a[3]}, nullptr, accumulate != 0}, d,
                              N / 2);
    }

private:
    template <bool kMnMajorB, bool kRegistersA>
    static void run(const emulator::WgmmaPart* const (&parts)[128]) {
        if constexpr (std::is_same_v<T, e4m3>) {
            add_products<ByteOfPair<0>, kMnMajorB, kRegistersA>(parts, parts[0]->accumulates);
            add_products<ByteOfPair<1>, kMnMajorB, kRegistersA>(parts, true);
        } else {
            add_products<T, kMnMajorB, kRegistersA>(parts, parts[0]->accumulates);
        }
    }
    template <class Of, bool kMnMajorB, bool kRegistersA>
    static void add_products(const emulator::WgmmaPart* const (&parts)[128], bool accumulates) {
        float a[64][16];          // [row, k]
        Floats4 b[N / 8][16][2];  // [column / 8, k, column % 8]
        for (uint32_t row = 0; row < 64; ++row) {
            if constexpr (!kRegistersA) {
                emulated_operand<Of>(parts[0]->a, false, row, a[row]);
                continue;
            }
            for (uint32_t pair = 0; pair < 4; ++pair)
                for (uint32_t half = 0; half < 2; ++half) {
                    const uint32_t packed = thread_of(parts, row, pair).registers[2 * half + row % 16 / 8];
                    a[row][8 * half + 2 * pair] = Unpacked<Of>::low(packed);
                    a[row][8 * half + 2 * pair + 1] = Unpacked<Of>::high(packed);
                }
        }
        for (uint32_t column = 0; column < N; ++column) {
            float values[16];
            emulated_operand<Of>(parts[0]->b, kMnMajorB, column, values);
            for (uint32_t k = 0; k < 16; ++k) b[column / 8][k][column % 8 / 4][column % 4] = values[k];
        }
        for (uint32_t row = 0; row < 64; ++row)
            for (uint32_t j = 0; j < N / 8; ++j) {
                float* at[4];
                for (uint32_t pair = 0; pair < 4; ++pair)
                    at[pair] = thread_of(parts, row, pair).sums + 4 * j + row % 16 / 8 * 2;
                emulated_products(at, accumulates, a[row], b[j]);
            }
    }
    // The thread that has columns 2 * pair and 2 * pair + 1 of each 8 of a row.
    static const emulator::WgmmaPart& thread_of(const emulator::WgmmaPart* const (&parts)[128], uint32_t row,
                                                uint32_t pair) {
        return *parts[row / 16 * 32 + row % 8 * 4 + pair];
    }
};

}  // namespace infinilm::cuda
