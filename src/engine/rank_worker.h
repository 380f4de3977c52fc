// One thread per rank, bound to its backend: everything that touches a rank's weights, cache and device runs there, in
// the order submitted. The lock guards the queue only; an idle worker polls for a while (core/wait.h), then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/process.h"

namespace infinilm {

class RankWorker {
public:
    // The thread is named infinilm-rank<rank>. It, and the threads that its tasks start, run on these CPUs; none given:
    // anywhere. ConfigError: CPUs that this process may not use. DeviceError: no more threads are to be had.
    explicit RankWorker(int rank = 0, const std::vector<int>& cpus = {});
    ~RankWorker();  // finishes what was submitted, then joins; in a forked process there is nothing to wait for
    RankWorker(const RankWorker&) = delete;
    RankWorker& operator=(const RankWorker&) = delete;

    // Runs task(), which does not throw, on the worker's thread. EngineDeadError: in a process that was forked from the
    // worker's.
    void post(std::function<void()> task);
    // Whether a task waits behind the one that runs. By any thread.
    bool has_more() const { return queue_->waiting > 0; }
    // As post; the future carries its result or its exception.
    template <class F>
    auto submit(F task) -> std::future<decltype(task())> {
        auto packaged = std::make_shared<std::packaged_task<decltype(task())()>>(std::move(task));
        auto future = packaged->get_future();
        post([packaged] { (*packaged)(); });
        return future;
    }

private:
    // What the thread uses. A forked process leaves it as it is: the lock may be held, and the condition waited on, by
    // a thread that is not there.
    struct Queue {
        std::mutex mutex;
        std::condition_variable wake;
        std::deque<std::function<void()>> tasks;
        std::atomic<int> waiting = 0;  // of them, for who does not have the lock
        std::atomic<bool> stop = false;
        std::thread thread;
    };
    void stop();
    static void work(Queue& queue);

    const OwnerProcess process_;
    std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
};

}  // namespace infinilm
