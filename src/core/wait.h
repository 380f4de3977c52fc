// Waiting for an atomic word to change: poll for a while, then sleep in the kernel. Linux's futex where it is;
// elsewhere the standard's wait, which does the same. Used by cpu/thread_pool.cpp and dist/in_process.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace infinilm {

// Cores that this thread may run on.
inline int available_cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

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
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    word.wait(value);
#endif
}

inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

// True as soon as done(); false when it is time to sleep. The gap between two regions of a forward pass is
// microseconds, between two steps some hundred, and waking a sleeper costs 5 to 50. After the first microseconds the
// core is given away between two looks: the system may run the awaited thread on it, where polling alone keeps it from
// running (measured: 600 us for an all_reduce of 8 KiB instead of 7). While crowded(), when there are more threads than
// cores, whoever polls takes the core from whoever works (measured: 40 times slower), hence sleep at once.
template <class Done, class Crowded>
bool poll_until(Done done, Crowded crowded) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::microseconds poll_time(2), yield_time(300);
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
