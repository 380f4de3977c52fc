// Both sides wait (core/wait.h): a thread for the next region on epoch_, the caller for the last thread inside on
// gate_. Each side announces that it goes to sleep (parked_, caller_parked_) before it looks at the awaited word once
// more, and the other side changes the word before it reads the announcement; with sequentially consistent operations
// one of the two sees the other, so no wake-up is lost.
//
// A region is open from run_erased's start until the caller has drawn the last share. A thread that joins while it is
// open keeps the caller from returning, and so the task alive, until it leaves; a thread that comes later finds the
// gate shut.
#include "cpu/thread_pool.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/topology.h"
#include "core/wait.h"

namespace infinilm::cpu {

namespace {

constexpr uint32_t open_gate = 1u << 31;  // of gate_, beside the count

// Threads of all pools of the process that are at work or poll for it: several ranks, each with its pool, and several
// engines share the cores. A pool whose threads sleep counts nothing. The caller of a pool counts while its thread 1 is
// awake: counting it in each region would have all pools write one cache line.
std::atomic<int> awake_threads{0};
constexpr int weight(int thread) { return thread == 1 ? 2 : 1; }

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads < 1 ? 1 : num_threads), num_cores_(available_cores()) {
    try {
        threads_.reserve(static_cast<size_t>(num_threads_) - 1);
        for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error& error) {  // no more threads to be had: end those that started
        const size_t started = threads_.size();
        stop_threads();
        throw DeviceError(concat("cannot start ", num_threads_ - 1, " threads beside the caller's, only ", started,
                                 ": ", error.what(),
                                 "; lower num_threads (or tensor_parallel_size), or raise the limits of threads and "
                                 "memory of this process"));
    } catch (...) {
        stop_threads();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop_threads(); }

void ThreadPool::stop_threads() {
    if (!process_.is_current()) {  // there are no threads; their handles may by now be those of others
        [[maybe_unused]] const auto* leaked = new std::vector<std::thread>(std::move(threads_));
        return;
    }
    stop_.store(true, std::memory_order_relaxed);  // published by the new epoch
    epoch_.fetch_add(1);
    wake_all(epoch_);
    for (std::thread& thread : threads_) thread.join();
}

int ThreadPool::num_awake() { return awake_threads.load(std::memory_order_relaxed); }

bool ThreadPool::crowded() const { return num_awake() > num_cores_; }

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

// Threads draw mostly in turn, so that each has neighbouring shares: it reads on where it was, which memory does faster
// than to begin elsewhere. (docs/measurements/benchmarks.md, "One linear")
int ThreadPool::share_of(int draw) const {
    const int turn = draw % num_threads_, of_each = num_shares_ / num_threads_;
    return turn * of_each + std::min(turn, num_shares_ % num_threads_) + draw / num_threads_;
}

void ThreadPool::draw_shares(int thread) {
    try {
        for (int draw; (draw = next_draw_.fetch_add(1, std::memory_order_relaxed)) < num_shares_;)
            task_(argument_, share_of(draw), thread);
    } catch (...) {  // the caller throws the first one, once no thread is inside; shares not begun are left out
        next_draw_.store(num_shares_, std::memory_order_relaxed);
        if (!failed_.exchange(true)) error_ = std::current_exception();
    }
}

void ThreadPool::work(int thread) {
    const auto announced_after = [this](uint32_t seen) { return epoch_.load(std::memory_order_acquire) != seen; };
    const auto is_crowded = [this] { return crowded(); };
    awake_threads.fetch_add(weight(thread), std::memory_order_relaxed);
    for (uint32_t seen = 0;;) {
        if (!poll_until([&] { return announced_after(seen); }, is_crowded)) {
            awake_threads.fetch_sub(weight(thread), std::memory_order_relaxed);
            parked_.fetch_add(1);
            while (epoch_.load() == seen) sleep_while(epoch_, seen);
            parked_.fetch_sub(1, std::memory_order_relaxed);
            awake_threads.fetch_add(weight(thread), std::memory_order_relaxed);
        }
        if (stop_.load(std::memory_order_relaxed)) break;
        seen = epoch_.load(std::memory_order_acquire);  // regions that came and went meanwhile are done without us
        if (!join()) continue;
        draw_shares(thread);
        leave();
    }
    awake_threads.fetch_sub(weight(thread), std::memory_order_relaxed);
}

void ThreadPool::run_erased(Task task, void* argument, int num_shares) {
    process_.check();
    task_ = task;
    argument_ = argument;
    num_shares_ = num_shares;
    next_draw_.store(0, std::memory_order_relaxed);
    gate_.store(open_gate, std::memory_order_release);  // publishes the four above to those who join
    epoch_.fetch_add(1);
    if (parked_.load() != 0) wake_all(epoch_);
    draw_shares(0);

    gate_.fetch_and(~open_gate, std::memory_order_acquire);
    const auto empty = [&] { return gate_.load(std::memory_order_acquire) == 0; };
    if (!poll_until(empty, [this] { return crowded(); })) {
        caller_parked_.store(1);
        for (uint32_t inside; (inside = gate_.load()) != 0;) sleep_while(gate_, inside);
        caller_parked_.store(0, std::memory_order_relaxed);
    }
    if (failed_.load(std::memory_order_relaxed)) {
        failed_.store(false, std::memory_order_relaxed);
        std::rethrow_exception(std::exchange(error_, nullptr));
    }
}

}  // namespace infinilm::cpu
