// Waiting for an atomic word to change: poll for a while, then sleep in the kernel, on Linux's futex. Used by
// cpu/thread_pool.cpp, dist/in_process.cpp and, for tasks, engine/rank_worker.cpp.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace infinilm {

// Tells the core that this thread polls.
inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// Returns at once if the word is not `value`; may return early: the caller looks again.
inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

inline void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// True as soon as done(); false when it is time to sleep. The gap between two regions of a forward pass is
// microseconds, between two queries to an encoder half a millisecond, and threads that slept, and cores that had
// nothing to do, take long to begin (docs/measurements/vectors.md, "The bounds of a query"). After the first
// microseconds the core is given away between two looks: the system may run the awaited thread on it, where polling
// alone keeps it from running. While crowded(), when there are more threads than cores, a thread that polls takes the
// core from one that works, hence sleep at once. (bench/all_reduce_bench.cpp)
template <class Done, class Crowded>
bool poll_until(Done done, Crowded crowded) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::microseconds poll_time(2), yield_time(1000);
    const auto begin = Clock::now();
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (Clock::now() - begin < poll_time);
    do {
        if (done()) return true;
        if (crowded()) return false;
        std::this_thread::yield();
    } while (Clock::now() - begin < yield_time);
    return false;
}

}  // namespace infinilm
