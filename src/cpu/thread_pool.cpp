// Waiting is a bounded spin and then a futex, on both sides: a worker waits for the next region on epoch_, the caller
// for the last worker on pending_. Each side announces that it goes to sleep (parked_, caller_parked_) before it looks
// at the awaited word once more, and the other side changes the word before it reads the announcement; with
// sequentially consistent operations one of the two sees the other, so no wake-up is lost.
#include "cpu/thread_pool.h"

#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace infinilm::cpu {

namespace {

// How long a thread polls before it sleeps. The gap between two regions of a forward pass is microseconds and between
// two steps some hundred; waking a sleeper costs 5 to 50. When threads outnumber cores whoever spins keeps the core
// from whoever works (measured: 40 times slower), hence nearly no spin there.
constexpr int spin_ns = 300'000, crowded_spin_ns = 2'000;

// Threads of all pools of the process: several ranks, each with its pool, share the cores.
std::atomic<int> live_threads{0};

int available_cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);  // returns at once if it has changed
#else
    word.wait(value);
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

// True as soon as done(); false when the time is up.
template <class Done> bool spin(Done done, int limit_ns) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::nanoseconds(limit_ns);
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (Clock::now() < deadline);
    return false;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads < 1 ? 1 : num_threads), num_cores_(available_cores()) {
    live_threads.fetch_add(num_threads_, std::memory_order_relaxed);
    try {
        threads_.reserve(static_cast<size_t>(num_threads_) - 1);
        for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { work(i); });
    } catch (...) {  // no more threads to be had: end those that started
        stop_workers();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::stop_workers() {
    stop_.store(true, std::memory_order_relaxed);  // published by the new epoch
    epoch_.fetch_add(1);
    wake(epoch_);
    for (std::thread& thread : threads_) thread.join();
    live_threads.fetch_sub(num_threads_, std::memory_order_relaxed);
}

int ThreadPool::spin_limit_ns() const {
    return live_threads.load(std::memory_order_relaxed) <= num_cores_ ? spin_ns : crowded_spin_ns;
}

void ThreadPool::work(int worker) {
    for (uint32_t seen = 0;; ++seen) {  // a region starts only after all workers finished the last: none is missed
        const auto started = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
        if (!spin(started, spin_limit_ns())) {
            parked_.fetch_add(1);
            while (epoch_.load() == seen) sleep_while(epoch_, seen);
            parked_.fetch_sub(1, std::memory_order_relaxed);
        }
        if (stop_.load(std::memory_order_relaxed)) return;
        task_(argument_, worker, num_threads_);
        if (pending_.fetch_sub(1) == 1 && caller_parked_.load() != 0) wake(pending_);
    }
}

void ThreadPool::run_erased(Task task, void* argument) {
    task_ = task;
    argument_ = argument;
    pending_.store(static_cast<uint32_t>(num_threads_ - 1), std::memory_order_relaxed);
    epoch_.fetch_add(1);  // publishes the three above
    if (parked_.load() != 0) wake(epoch_);
    task(argument, 0, num_threads_);

    const auto finished = [&] { return pending_.load(std::memory_order_acquire) == 0; };
    if (spin(finished, spin_limit_ns())) return;
    caller_parked_.store(1);
    for (uint32_t left; (left = pending_.load()) != 0;) sleep_while(pending_, left);
    caller_parked_.store(0, std::memory_order_relaxed);
}

}  // namespace infinilm::cpu
