// One thread per rank, bound to its backend: everything that touches a rank's weights, cache and device runs there, in
// the order submitted. The lock guards the queue only; an idle worker sleeps.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"

namespace infinilm {

class RankWorker {
public:
    // The thread is named infinilm-rank<rank>. It, and the threads that its tasks start, run on these CPUs; none given:
    // anywhere. ConfigError: CPUs that this process may not use.
    explicit RankWorker(int rank = 0, const std::vector<int>& cpus = {});
    ~RankWorker();  // finishes what was submitted, then joins
    RankWorker(const RankWorker&) = delete;
    RankWorker& operator=(const RankWorker&) = delete;

    // Runs task() on the worker's thread; the future carries its result or its exception.
    template <class F>
    auto submit(F task) -> std::future<decltype(task())> {
        auto packaged = std::make_shared<std::packaged_task<decltype(task())()>>(std::move(task));
        auto future = packaged->get_future();
        push([packaged] { (*packaged)(); });
        return future;
    }

private:
    void push(std::function<void()> task);
    void work();
    void stop();

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::function<void()>> queue_;
    bool stop_ = false;
    std::thread thread_;  // last: starts when the rest exists
};

}  // namespace infinilm
