// A poll-then-park pool: one per rank, the caller is thread 0. run(n, f) cuts a region into n shares, calls
// f(share, thread) once for each, and returns when all are done. Threads draw shares from a counter, and the caller
// waits only for threads that have begun: one that the system does not let run costs its part of the machine, not the
// whole step. Between regions threads poll briefly, since the next region of a forward pass is microseconds away, then
// sleep in the kernel: an idle engine costs no CPU. Not reentrant; one caller at a time. What a share throws, run
// throws when all threads have left; shares not begun by then are left out, and the pool stays usable.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/process.h"

namespace infinilm::cpu {

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);  // DeviceError: so many threads are not to be had
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return num_threads_; }
    // Threads of all pools, with callers, that work or poll for work. With more than cores, no thread polls.
    static int num_awake();

    // EngineDeadError: in a process that was forked from the one that made the pool.
    template <class F>
    void run(int num_shares, F&& f) {
        if (num_threads_ == 1 || num_shares == 1) {
            for (int share = 0; share < num_shares; ++share) f(share, 0);
            return;
        }
        using Fn = std::remove_reference_t<F>;
        run_erased([](void* fn, int share, int thread) { (*static_cast<Fn*>(fn))(share, thread); },
                   const_cast<void*>(static_cast<const void*>(&f)), num_shares);
    }

private:
    using Task = void (*)(void* argument, int share, int thread);
    void run_erased(Task task, void* argument, int num_shares);
    bool join();   // a thread enters the open region, if there is one
    void leave();  // and leaves it; the last one wakes a caller that sleeps
    void draw_shares(int thread);
    int share_of(int draw) const;  // that is drawn as number `draw`
    void work(int thread);
    void stop_threads();
    bool crowded() const;  // more threads are awake than there are cores

    // Each on its own cache line: threads poll one while the others change.
    alignas(64) std::atomic<uint32_t> epoch_{0};  // a new value announces a region
    alignas(64) std::atomic<uint32_t> gate_{0};   // `open`, and how many threads besides the caller are inside
    alignas(64) std::atomic<int> next_draw_{0};
    alignas(64) std::atomic<uint32_t> parked_{0};  // threads asleep on epoch_
    std::atomic<uint32_t> caller_parked_{0};       // the caller asleep on gate_
    // The open region; threads that are inside may read these.
    Task task_ = nullptr;
    void* argument_ = nullptr;
    int num_shares_ = 0;
    std::exception_ptr error_;  // the first that a share threw; written by who set failed_
    std::atomic<bool> failed_{false};
    std::atomic<bool> stop_{false};
    const OwnerProcess process_;
    int num_threads_;
    int num_cores_;
    std::vector<std::thread> threads_;
};

}  // namespace infinilm::cpu
