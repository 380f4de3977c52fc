// A spin-then-park pool: one per rank, the caller is worker 0. run(f) calls f(worker, num_workers) on every worker and
// returns when all are done. Between regions workers spin briefly, since the next region of a forward pass is
// microseconds away, then sleep in the kernel: an idle engine costs no CPU. Not reentrant; one caller at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace infinilm::cpu {

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return num_threads_; }

    template <class F> void run(F&& f) {
        if (num_threads_ == 1) return f(0, 1);
        using Fn = std::remove_reference_t<F>;
        run_erased([](void* fn, int worker, int count) { (*static_cast<Fn*>(fn))(worker, count); },
                   const_cast<void*>(static_cast<const void*>(&f)));
    }

private:
    using Task = void (*)(void* argument, int worker, int count);
    void run_erased(Task task, void* argument);
    void work(int worker);
    void stop_workers();
    int spin_limit_ns() const;

    // Each on its own cache line: workers poll one while the others change.
    alignas(64) std::atomic<uint32_t> epoch_{0};    // a new value starts a region
    alignas(64) std::atomic<uint32_t> pending_{0};  // workers that have not finished it
    alignas(64) std::atomic<uint32_t> parked_{0};   // workers asleep on epoch_
    std::atomic<uint32_t> caller_parked_{0};        // the caller asleep on pending_
    Task task_ = nullptr;
    void* argument_ = nullptr;
    std::atomic<bool> stop_{false};
    int num_threads_;
    int num_cores_;
    std::vector<std::thread> threads_;
};

}  // namespace infinilm::cpu
