// Both sides wait (core/wait.h): a thread for the next region on epoch_, the caller for the last thread inside on
// gate_. Each side announces that it goes to sleep (parked_, caller_parked_) before it looks at the awaited word once
// more, and the other side changes the word before it reads the announcement; with sequentially consistent operations
// one of the two sees the other, so no wake-up is lost.
//
// A region is open from run_erased's start until the caller has drawn the last share. A thread that joins while it is
// open keeps the caller from returning, and so the task alive, until it leaves; a thread that comes later finds the
// gate shut.
#include "cpu/thread_pool.h"

#include "core/topology.h"
#include "core/wait.h"

namespace infinilm::cpu {

namespace {

constexpr uint32_t open_gate = 1u << 31;  // of gate_, beside the count

// Threads of all pools of the process: several ranks, each with its pool, share the cores.
std::atomic<int> live_threads{0};

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads < 1 ? 1 : num_threads), num_cores_(available_cores()) {
    live_threads.fetch_add(num_threads_, std::memory_order_relaxed);
    try {
        threads_.reserve(static_cast<size_t>(num_threads_) - 1);
        for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { work(i); });
    } catch (...) {  // no more threads to be had: end those that started
        stop_threads();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop_threads(); }

void ThreadPool::stop_threads() {
    stop_.store(true, std::memory_order_relaxed);  // published by the new epoch
    epoch_.fetch_add(1);
    wake_all(epoch_);
    for (std::thread& thread : threads_) thread.join();
    live_threads.fetch_sub(num_threads_, std::memory_order_relaxed);
}

bool ThreadPool::crowded() const { return live_threads.load(std::memory_order_relaxed) > num_cores_; }

bool ThreadPool::join() {
    uint32_t gate = gate_.load(std::memory_order_relaxed);
    while (gate & open_gate)
        if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire, std::memory_order_relaxed))
            return true;
    return false;
}

void ThreadPool::leave() {
    if (gate_.fetch_sub(1) == 1 && caller_parked_.load() != 0) wake_all(gate_);
}

void ThreadPool::draw_shares(int thread) {
    for (int share; (share = next_share_.fetch_add(1, std::memory_order_relaxed)) < num_shares_;)
        task_(argument_, share, thread);
}

void ThreadPool::work(int thread) {
    for (uint32_t seen = 0;;) {
        const auto announced = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
        if (!poll_until(announced, crowded())) {
            parked_.fetch_add(1);
            while (epoch_.load() == seen) sleep_while(epoch_, seen);
            parked_.fetch_sub(1, std::memory_order_relaxed);
        }
        if (stop_.load(std::memory_order_relaxed)) return;
        seen = epoch_.load(std::memory_order_acquire);  // regions that came and went meanwhile are done without us
        if (!join()) continue;
        draw_shares(thread);
        leave();
    }
}

void ThreadPool::run_erased(Task task, void* argument, int num_shares) {
    task_ = task;
    argument_ = argument;
    num_shares_ = num_shares;
    next_share_.store(0, std::memory_order_relaxed);
    gate_.store(open_gate, std::memory_order_release);  // publishes the four above to those who join
    epoch_.fetch_add(1);
    if (parked_.load() != 0) wake_all(epoch_);
    draw_shares(0);

    gate_.fetch_and(~open_gate, std::memory_order_acquire);
    const auto empty = [&] { return gate_.load(std::memory_order_acquire) == 0; };
    if (poll_until(empty, crowded())) return;
    caller_parked_.store(1);
    for (uint32_t inside; (inside = gate_.load()) != 0;) sleep_while(gate_, inside);
    caller_parked_.store(0, std::memory_order_relaxed);
}

}  // namespace infinilm::cpu
