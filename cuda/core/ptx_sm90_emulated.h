// ptx_sm90.cuh for the host compiler: same names, same meaning, checked. Compiled with the kernel, so that the
// sanitizers see what a copy reads and writes; the state of barriers is sync.cpp's. Included by ptx_sm90.cuh only.
#pragma once

#include "cuda/core/ptx_emulated.h"
#include "cuda/core/tensor_map.cuh"

namespace infinilm::cuda {

// Every use reads the word that init writes: using a barrier before a __syncthreads() after its init is a race.
inline void emulated_touch(uint64_t* barrier, const char* instruction) {
    emulator::require_compute_capability(90, instruction);
    emulated_alignment(barrier, 8, instruction);
    emulator::shared_address(barrier, instruction);
    [[maybe_unused]] const uint64_t word = *static_cast<volatile uint64_t*>(barrier);
}

inline void mbarrier_init(uint64_t* barrier, uint32_t count) {
    emulator::require_compute_capability(90, "mbarrier.init");
    emulated_alignment(barrier, 8, "mbarrier.init");
    emulator::shared_address(barrier, "mbarrier.init");
    *static_cast<volatile uint64_t*>(barrier) = 0;
    emulator::mbarrier_init(barrier, count);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint64_t* barrier) {
    emulated_touch(barrier, "mbarrier.arrive");
    emulator::mbarrier_arrive(barrier, 1, 0);
}
using ClusterBarriers = uint64_t*;
inline ClusterBarriers cluster_barriers(uint64_t* barriers, uint32_t rank) {
    return reinterpret_cast<uint64_t*>(emulator::shared_of_rank(barriers, rank));
}
inline void mbarrier_arrive_cluster(ClusterBarriers barriers, int index) {
    emulated_alignment(barriers, 8, "mbarrier.arrive.shared::cluster");
    emulator::mbarrier_arrive(barriers + index, 1, 0);
}
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    emulated_touch(barrier, "mbarrier.arrive.expect_tx");
    emulator::mbarrier_arrive(barrier, 1, bytes);
}
inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
    emulated_touch(barrier, "mbarrier.try_wait");
    return emulator::mbarrier_try_wait(barrier, parity);
}
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    emulated_touch(barrier, "mbarrier.try_wait");
    emulator::mbarrier_wait(barrier, parity);
}

inline void fence_proxy_async() {}

// The 128-byte swizzle is a function of the shared address, not of the tile.
inline uint32_t emulated_swizzle_128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Calls f(shared address, global address, words inside the tensor) for every 16 bytes of a box, which swizzling moves
// as a whole: those words of the 8 that are from the first number up to the second.
template <class F>
void emulated_box(const TensorMap& m, uint32_t start, int column, int row, F f) {
    const uint32_t words = m.element_bytes / 2;  // of an element
    for (uint32_t y = 0; y < m.box_rows; ++y)
        for (uint32_t x = 0; x < m.box_columns * words; x += 8) {
            const int64_t from_x = int64_t{column} * words + x, from_y = row + int64_t{y};
            const bool inside = from_y >= 0 && from_y < static_cast<int64_t>(m.rows);
            const int64_t end = inside ? std::min<int64_t>(static_cast<int64_t>(m.columns * words) - from_x, 8) : 0;
            uint32_t address = start + (y * m.box_columns * words + x) * 2;
            if (m.swizzle == Swizzle::swizzle_128) address = emulated_swizzle_128(address);
            const uint8_t* from = m.base + from_y * static_cast<int64_t>(m.row_stride_bytes) + from_x * 2;
            f(address, reinterpret_cast<const uint16_t*>(from), std::max<int64_t>(-from_x, 0), end);
        }
}

// To the window of `rank`, counted on its barrier.
inline void emulated_tensor_load(void* dst, const TensorMap& map, int column, int row, uint64_t* barrier,
                                 uint32_t rank) {
    emulated_touch(barrier, "cp.async.bulk.tensor");
    emulated_alignment(dst, map.swizzle == Swizzle::swizzle_128 ? 1024 : 128, "cp.async.bulk.tensor");
    const uint32_t start = emulator::shared_address(dst, "cp.async.bulk.tensor");
    const uint32_t bytes = map.box_columns * map.box_rows * map.element_bytes;
    emulator::shared_pointer(start, bytes, "cp.async.bulk.tensor");
    uint8_t* window = emulator::shared_of_rank(dst, rank) - start;
    if (!emulator::eager())  // as emulated_issue_16
        emulated_box(map, start, column, row, [=](uint32_t address, const uint16_t* from, int64_t begin, int64_t end) {
            if (begin == 0 && end == 8) return emulated_issue_16(window + address, from);
            for (int64_t i = begin; i < end; ++i) (void)static_cast<const volatile uint16_t*>(from)[i];
            emulated_fill_16(window + address, ~uint64_t{0});
        });
    emulator::mbarrier_complete_async(emulator::shared_of_rank(barrier, rank), bytes, [=, m = map] {
        emulated_box(m, start, column, row, [=](uint32_t address, const uint16_t* from, int64_t begin, int64_t end) {
            if (begin == 0 && end == 8) return emulated_copy_16(window + address, from);
            emulated_fill_16(window + address, 0);
            for (int64_t i = begin; i < end; ++i) reinterpret_cast<uint16_t*>(window + address)[i] = from[i];
        });
    });
}
inline void tensor_load_2d(void* dst, const TensorMap& map, int column, int row, uint64_t* barrier) {
    emulated_tensor_load(dst, map, column, row, barrier, emulator::where().cluster_rank);
}
inline void tensor_load_2d_multicast(void* dst, const TensorMap& map, int column, int row, uint64_t* barrier,
                                     uint16_t ranks) {
    for (uint32_t rank = 0; rank < 16; ++rank)
        if (ranks >> rank & 1) emulated_tensor_load(dst, map, column, row, barrier, rank);
}
inline void tensor_prefetch(const TensorMap&) {}
inline void tensor_map_acquire(const TensorMap& map) {
    emulator::require_compute_capability(90, "fence.proxy.tensormap");
    emulated_alignment(&map, 64, "fence.proxy.tensormap");
}

inline void stmatrix_x4_trans(void* column, const uint32_t (&r)[4]) {
    emulator::require_compute_capability(90, "stmatrix");
    emulated_alignment(column, 16, "stmatrix");
    emulator::shared_address(column, "stmatrix");
    const auto* columns = emulator::exchange(~0u, {{reinterpret_cast<uint64_t>(column), 0, 0, 0}}, "stmatrix.trans");
    const unsigned row = emulator::lane() / 4, first = 2 * (emulator::lane() % 4);
    for (unsigned j = 0; j < 4; ++j)
        for (unsigned c = 0; c < 2; ++c)
            reinterpret_cast<uint16_t*>(columns[8 * j + first + c].word[0])[row] =
                static_cast<uint16_t>(r[j] >> 16 * c);
}

using ClusterMemory = uint8_t*;
inline ClusterMemory cluster_memory(void* address, uint32_t rank) { return emulator::shared_of_rank(address, rank); }
inline void store_async_16(ClusterMemory memory, int offset, float4 v, ClusterBarriers barrier) {
    emulator::require_compute_capability(90, "st.async");
    emulated_alignment(memory + offset, 16, "st.async");
    emulator::mbarrier_complete_async(barrier, 16, [=] { memcpy(memory + offset, &v, sizeof v); });
}

template <int kCount>
void registers_increase() {
    static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "setmaxnreg takes a multiple of 8 in 24..256");
}
template <int kCount>
void registers_decrease() {
    static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256, "setmaxnreg takes a multiple of 8 in 24..256");
}

}  // namespace infinilm::cuda
