#include "engine/rank_worker.h"

#include <pthread.h>

#include <cstring>

#include "core/topology.h"

namespace infinilm {

namespace {

// Affinity is inherited: set before the first task, it holds for the thread pool that the rank's backend makes.
void place(std::thread& thread, int rank, const std::vector<int>& cpus) {
    const std::string name = concat("infinilm-rank", rank).substr(0, 15);  // as long as a name may be
    pthread_setname_np(thread.native_handle(), name.c_str());
    if (cpus.empty()) return;
    std::string list;
    for (int cpu : cpus) list += concat(list.empty() ? "" : ", ", cpu);
    const int error = bind_thread(thread.native_handle(), cpus);
    if (error)
        throw ConfigError(concat("rank ", rank, " cannot run on CPUs ", list, ": ", std::strerror(error),
                                 "; choose from those that this process may use"));
}

}  // namespace

RankWorker::RankWorker(int rank, const std::vector<int>& cpus) : thread_([this] { work(); }) {
    try {
        place(thread_, rank, cpus);
    } catch (...) {
        stop();
        throw;
    }
}

RankWorker::~RankWorker() { stop(); }

void RankWorker::stop() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
}

void RankWorker::push(std::function<void()> task) {
    {
        std::lock_guard lock(mutex_);
        queue_.push_back(std::move(task));
    }
    wake_.notify_one();
}

void RankWorker::work() {
    for (;;) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        std::function<void()> task = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        task();
    }
}

}  // namespace infinilm
