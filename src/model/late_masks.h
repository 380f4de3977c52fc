// Masks of a step that its owner completes while the forward pass runs: what may come next depends on the tokens of the
// step before, which the host has only then. Ranks wait here before they sample.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace infinilm {

class LateMasks {
public:
    // From any thread: Batch::allowed holds what it should, and stays so.
    void give() {
        {
            std::lock_guard lock(mutex_);
            given_ = true;
        }
        changed_.notify_all();
    }
    bool given() {
        std::lock_guard lock(mutex_);
        return given_;
    }
    // By ranks: waits until they are given, or until given_up() is true, which is asked now and then.
    template <class GivenUp>
    void wait(GivenUp given_up) {
        constexpr std::chrono::milliseconds pause{10};
        std::unique_lock lock(mutex_);
        while (!changed_.wait_for(lock, pause, [&] { return given_; }) && !given_up()) {
        }
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool given_ = false;
};

}  // namespace infinilm
