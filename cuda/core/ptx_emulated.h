// ptx.cuh for the host compiler: same names, same meaning, checked. Compiled with the kernel, so that the sanitizers
// see the accesses. Included by ptx.cuh only. Copies of 16 bytes are two 64-bit moves, as ThreadSanitizer does not
// look into inlined memcpy.
#pragma once

#include "cuda/core/device.cuh"

namespace infinilm::cuda {

inline void emulated_alignment(const void* address, unsigned alignment, const char* instruction) {
    if (reinterpret_cast<uintptr_t>(address) % alignment)
        emulator::fail("misaligned-address", "%s: address %p is not a multiple of %u", instruction, address, alignment);
}
inline void emulated_copy_16(void* dst, const void* src) {
    const uint64_t low = static_cast<const uint64_t*>(src)[0], high = static_cast<const uint64_t*>(src)[1];
    static_cast<uint64_t*>(dst)[0] = low;
    static_cast<uint64_t*>(dst)[1] = high;
}
inline void emulated_fill_16(void* dst, uint64_t word) {
    static_cast<uint64_t*>(dst)[0] = word;
    static_cast<uint64_t*>(dst)[1] = word;
}

// Touches at issue the memory that a copy will read and write: the destination is poisoned, so that a thread that reads
// too early reads NaN, and ThreadSanitizer sees both accesses where the program ordered them.
inline void emulated_issue_16(void* dst, const void* src) {
    [[maybe_unused]] const uint64_t low = static_cast<const volatile uint64_t*>(src)[0];
    [[maybe_unused]] const uint64_t high = static_cast<const volatile uint64_t*>(src)[1];
    emulated_fill_16(dst, ~uint64_t{0});
}

inline uint32_t shared_u32(const void* pointer) { return emulator::shared_address(pointer, "shared_u32"); }

inline uint4 load_streamed_16(const void* address) {
    emulated_alignment(address, 16, "ld.global.nc.v4");
    uint4 v;
    emulated_copy_16(&v, address);
    return v;
}
template <int kWords>
void load_streamed(uint32_t (&v)[kWords], const void* address) {
    emulated_alignment(address, 4 * kWords, "ld.global.nc");
    for (int i = 0; i < kWords; ++i) v[i] = static_cast<const uint32_t*>(address)[i];
}
inline uint4 load_readonly_16(const void* address) { return load_streamed_16(address); }

inline unsigned load_acquire_system(const unsigned* address) {
    emulator::spin_yield();
    emulated_alignment(address, 4, "ld.acquire");
    const unsigned value = __atomic_load_n(address, __ATOMIC_RELAXED);
    emulator::atomic_done(address, false, true);
    return value;
}
inline void store_release_system(unsigned* address, unsigned value) {
    emulated_alignment(address, 4, "st.release");
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
    emulator::atomic_done(address, true, false);
}
inline void store_peer_16(void* address, uint4 v) {
    emulated_alignment(address, 16, "st.global.v4");
    if (!emulator::peers_lie()) *static_cast<uint4*>(address) = v;
}
inline unsigned atomic_add_acq_rel(unsigned* address, unsigned value) {
    return emulator::read_modify_write(address, [=](unsigned old) { return old + value; }, true, true);
}

inline uint32_t cluster_rank() { return emulator::where().cluster_rank; }
inline void cluster_sync() { emulator::cluster_sync(); }
template <class T>
T* shared_of_rank(T* pointer, uint32_t rank) {
    return reinterpret_cast<T*>(emulator::shared_of_rank(pointer, rank));
}

inline void named_barrier_sync(int id, int threads) { emulator::barrier_sync(id, static_cast<unsigned>(threads)); }
inline void named_barrier_arrive(int id, int threads) { emulator::barrier_arrive(id, static_cast<unsigned>(threads)); }

// The copy itself happens when the group is waited for.
inline void cp_async_16(void* dst, const void* src, bool valid = true) {
    emulated_alignment(dst, 16, "cp.async");
    if (valid) emulated_alignment(src, 16, "cp.async");
    emulator::shared_address(dst, "cp.async");
    if (!emulator::eager()) emulated_issue_16(dst, valid ? src : dst);
    emulator::async_push([=] {
        if (valid)
            emulated_copy_16(dst, src);
        else
            emulated_fill_16(dst, 0);
    });
}
inline void cp_async_8(void* dst, const void* src, bool valid) {
    emulated_alignment(dst, 8, "cp.async");
    if (valid) emulated_alignment(src, 8, "cp.async");
    emulator::shared_address(dst, "cp.async");
    auto* const to = static_cast<uint64_t*>(dst);
    const auto* const from = static_cast<const uint64_t*>(src);
    if (!emulator::eager()) {
        if (valid) static_cast<void>(*static_cast<const volatile uint64_t*>(from));
        *to = ~uint64_t{0};
    }
    emulator::async_push([=] { *to = valid ? *from : 0; });
}
inline void prefetch_l2(const void*) {}
inline void cp_async_weights_16(void* dst, const void* src) { cp_async_16(dst, src); }
inline void cp_async_commit() { emulator::async_commit(); }
template <int kPending>
void cp_async_wait() {
    emulator::async_wait(kPending);
}

inline void emulated_ldmatrix(uint32_t (&r)[4], const void* row, bool transposed) {
    emulated_alignment(row, 16, "ldmatrix");
    emulator::shared_address(row, "ldmatrix");
    const auto* rows = emulator::exchange(~0u, {{reinterpret_cast<uint64_t>(row), 0, 0, 0}},
                                          transposed ? "ldmatrix.trans" : "ldmatrix");
    const unsigned i = emulator::lane() / 4, k = 2 * (emulator::lane() % 4);
    for (unsigned j = 0; j < 4; ++j) {
        auto at = [&](unsigned y, unsigned x) -> uint32_t {
            return reinterpret_cast<const uint16_t*>(rows[8 * j + y].word[0])[x];
        };
        r[j] = transposed ? at(k, i) | at(k + 1, i) << 16 : at(i, k) | at(i, k + 1) << 16;
    }
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { emulated_ldmatrix(r, row, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { emulated_ldmatrix(r, row, true); }

// Adds the products of a row of A and 8 columns of B, [k, column], to accumulators of which two neighbours are at each
// place. Each adds its own products in the order of k: that several are a vector changes no bit.
using Floats4 = float __attribute__((vector_size(16)));
inline void emulated_products(float* const (&at)[4], bool accumulates, const float (&a)[16],
                              const Floats4 (&b)[16][2]) {
    Floats4 low{}, high{};
    if (accumulates) {
        low = Floats4{at[0][0], at[0][1], at[1][0], at[1][1]};
        high = Floats4{at[2][0], at[2][1], at[3][0], at[3][1]};
    }
    for (unsigned k = 0; k < 16; ++k) {
        low += a[k] * b[k][0];
        high += a[k] * b[k][1];
    }
    for (unsigned i = 0; i < 4; ++i) {
        at[i / 2][i % 2] = low[i];
        at[2 + i / 2][i % 2] = high[i];
    }
}

// One for the lanes of a warp, each of which gives where its d, a and b are.
template <class T>
void emulated_mma(emulator::LaneData* lanes) {
    float a[16][16];   // [row, k]
    Floats4 b[16][2];  // [k, column]
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned group = lane / 4, pair = lane % 4 * 2;
        const auto* of_a = reinterpret_cast<const uint32_t*>(lanes[lane].word[1]);
        const auto* of_b = reinterpret_cast<const uint32_t*>(lanes[lane].word[2]);
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned k = 8 * half + pair;
            for (unsigned i = 0; i < 2; ++i) {
                a[group + 8 * i][k] = unpack_low<T>(of_a[2 * half + i]);
                a[group + 8 * i][k + 1] = unpack_high<T>(of_a[2 * half + i]);
            }
            b[k][group / 4][group % 4] = unpack_low<T>(of_b[half]);
            b[k + 1][group / 4][group % 4] = unpack_high<T>(of_b[half]);
        }
    }
    for (unsigned row = 0; row < 16; ++row) {
        float* at[4];
        for (unsigned pair = 0; pair < 4; ++pair)
            at[pair] = reinterpret_cast<float*>(lanes[row % 8 * 4 + pair].word[0]) + row / 8 * 2;
        emulated_products(at, true, a[row], b);
    }
}
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
    emulator::exchange(~0u, {{address(d), address(a), address(b), 0}}, "mma.m16n8k16", false, emulated_mma<T>);
}

inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) ^ bits; }

// In float64, where the product and the sum are exact: rounded once to float32 and once to T, which differs from once
// for values halfway between two of T only.
template <class T>
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    auto one = [](float x, float y, float z) { return static_cast<float>(double{x} * y + z); };
    return pack2<T>(one(unpack_low<T>(a), unpack_low<T>(b), unpack_low<T>(c)),
                    one(unpack_high<T>(a), unpack_high<T>(b), unpack_high<T>(c)));
}
inline uint32_t e4m3_to_f16(uint32_t bytes) {
    // Exponents of f16 are larger by 8, and a product with a power of two is exact.
    auto value = [](unsigned byte) {
        if ((byte & 0x7f) == 0x7f) return NAN;
        return to_float(f16{static_cast<uint16_t>((byte & 0x80) << 8 | (byte & 0x7f) << 7)}) * 256;
    };
    return pack2<f16>(value(bytes & 0xff), value(bytes >> 16 & 0xff));
}

inline float divide_usual(float x, float y) { return x / y; }
inline float exp2_approx(float x) { return std::exp2(x); }
inline int opaque(int x) { return x; }
inline void grid_dependency_wait() { emulator::grid_dependency_wait(); }
inline void grid_launch_dependents() { emulator::grid_launch_dependents(); }

}  // namespace infinilm::cuda
