// CUDA's built-in variables, intrinsics and warp functions for the host compiler. Included by device.cuh when
// INFINILM_CUDA_EMULATOR is defined; compiled with the kernels. Left out on purpose: __activemask (no fixed meaning)
// and volatile spinning (use load_acquire_system of ptx.cuh, which lets other threads run).
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "emulator.h"

#define threadIdx (::infinilm::emulator::where().thread)
#define blockIdx (::infinilm::emulator::where().block)
#define blockDim (::infinilm::emulator::where().block_dim)
#define gridDim (::infinilm::emulator::where().grid_dim)

inline void __syncthreads() { infinilm::emulator::barrier_sync(0, 0); }
inline void __syncwarp(unsigned mask = ~0u) { infinilm::emulator::exchange(mask, {}, "__syncwarp", true); }
inline void __threadfence() { infinilm::emulator::thread_fence(); }
inline void __threadfence_system() { infinilm::emulator::thread_fence(); }
inline void __nanosleep(unsigned) { infinilm::emulator::spin_yield(); }

namespace infinilm::emulator {

// Only the value of the lane asked for is defined; a lane outside the mask gives all ones, which is NaN.
template <class T>
T shuffle(uint32_t mask, T value, unsigned source, const char* what) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
    LaneData mine{};
    memcpy(&mine.word[0], &value, sizeof(T));
    const LaneData* all = exchange(mask, mine, what);
    uint64_t word = mask >> source & 1 ? all[source].word[0] : ~uint64_t{0};
    memcpy(&value, &word, sizeof(T));
    return value;
}

// What all lanes of a warp have where each joins (F) its value with that of the lane `offset` further, for offsets of
// 16, 8, 4, 2 and 1. Lanes that the block does not have count as a shuffle's do: all ones.
template <class F>
float butterfly(float value, const char* what, F) {
    LaneData mine{};
    memcpy(&mine.word[0], &value, sizeof value);
    const LaneData* all = exchange(~0u, mine, what, false, [](LaneData* lanes) {
        float values[32];
        for (unsigned i = 0; i < 32; ++i) memcpy(&values[i], &lanes[i].word[0], sizeof(float));
        for (unsigned offset = 16; offset > 0; offset /= 2)
            for (unsigned i = 0; i < offset; ++i) values[i] = F{}(values[i], values[i + offset]);
        memcpy(&lanes[0].word[0], &values[0], sizeof(float));
    });
    memcpy(&value, &all[0].word[0], sizeof value);
    return value;
}

// Atomics are plain here, one host thread, but spelled __atomic so that ThreadSanitizer knows them for what they are.
// Like CUDA's they are relaxed: ordering needs __threadfence() or the acquire and release forms of ptx.cuh.
template <class T, class F>
T read_modify_write(T* address, F f, bool release = false, bool acquire = false) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics are 4 or 8 bytes");
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T))
        fail("misaligned-address", "atomic at %p", static_cast<void*>(address));
    Bits* place = reinterpret_cast<Bits*>(address);
    Bits bits = __atomic_load_n(place, __ATOMIC_RELAXED);
    T old, desired;
    memcpy(&old, &bits, sizeof(T));
    desired = f(old);
    memcpy(&bits, &desired, sizeof(T));
    __atomic_store_n(place, bits, __ATOMIC_RELAXED);
    atomic_done(address, release, acquire);
    return old;
}

}  // namespace infinilm::emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = infinilm::emulator::lane();
    return infinilm::emulator::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), "__shfl_sync");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = infinilm::emulator::lane(), source = lane ^ bits;
    const bool inside = (source & ~(width - 1)) <= (lane & ~(width - 1));
    return infinilm::emulator::shuffle(mask, value, inside ? source : lane, "__shfl_xor_sync");
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = infinilm::emulator::lane(), source = lane + static_cast<int>(delta);
    const bool inside = source < (lane & ~(width - 1)) + width;
    return infinilm::emulator::shuffle(mask, value, inside ? source : lane, "__shfl_down_sync");
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = infinilm::emulator::lane(), source = lane - static_cast<int>(delta);
    return infinilm::emulator::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane, "__shfl_up_sync");
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const auto* all = infinilm::emulator::exchange(mask, {{predicate != 0, 0, 0, 0}}, "__ballot_sync");
    unsigned ballot = 0;
    for (int i = 0; i < 32; ++i)
        if (mask >> i & 1) ballot |= static_cast<unsigned>(all[i].word[0] & 1) << i;
    return ballot;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <class T>
T atomicAdd(T* address, T value) {
    return infinilm::emulator::read_modify_write(address, [=](T old) { return static_cast<T>(old + value); });
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline void sincospi(double x, double* sine, double* cosine) {
    const double turn = (x - 2 * std::rint(x / 2)) * 3.14159265358979323846;
    *sine = std::sin(turn);
    *cosine = std::cos(turn);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
    const uint64_t bytes = x | uint64_t{y} << 32;
    unsigned out = 0;
    for (unsigned i = 0; i < 4; ++i)
        out |= static_cast<unsigned>(bytes >> (selectors >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return out;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline unsigned __float_as_uint(float x) {
    unsigned u;
    memcpy(&u, &x, 4);
    return u;
}
inline float __uint_as_float(unsigned u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int i) { return __uint_as_float(static_cast<unsigned>(i)); }
template <class T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}

// Shared memory is declared through macros: GCC ignores section attributes on statics of templates, so a plain
// __shared__ cannot be mapped soundly. See device.cuh for their meaning.
#define INFINILM_DYNAMIC_SHARED(name) uint8_t* name = ::infinilm::emulator::where().dynamic
#define INFINILM_SHARED(type, name, dims)                                                             \
    typedef type name##_shared_type dims;                                                             \
    static char name##_shared_key;                                                                    \
    name##_shared_type& name = *static_cast<name##_shared_type*>(::infinilm::emulator::static_shared( \
        &name##_shared_key, sizeof(name##_shared_type), alignof(name##_shared_type)))
