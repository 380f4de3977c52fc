#include "engine/rank_worker.h"

#include <pthread.h>

#include <cstring>
#include <system_error>

#include "core/topology.h"
#include "core/wait.h"
#include "cpu/thread_pool.h"

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

RankWorker::RankWorker(int rank, const std::vector<int>& cpus) {
    try {
        queue_->thread = std::thread([queue = queue_.get()] { work(*queue); });
    } catch (const std::system_error& error) {
        throw DeviceError(concat("cannot start the thread of rank ", rank, ": ", error.what(),
                                 "; lower tensor_parallel_size or num_threads, or raise the limits of threads and "
                                 "memory of this process"));
    }
    try {
        place(queue_->thread, rank, cpus);
    } catch (...) {
        stop();
        throw;
    }
}

RankWorker::~RankWorker() { stop(); }

void RankWorker::stop() {
    if (!process_.is_current()) {
        [[maybe_unused]] const Queue* leaked = queue_.release();
        return;
    }
    {
        std::lock_guard lock(queue_->mutex);
        queue_->stop = true;
    }
    queue_->wake.notify_one();
    queue_->thread.join();
}

void RankWorker::post(std::function<void()> task) {
    process_.check();
    {
        std::lock_guard lock(queue_->mutex);
        queue_->tasks.push_back(std::move(task));
        ++queue_->waiting;
    }
    queue_->wake.notify_one();
}

void RankWorker::work(Queue& queue) {
    const int num_cores = available_cores();
    for (;;) {
        poll_until([&] { return queue.waiting > 0 || queue.stop; },
                   [&] { return cpu::ThreadPool::num_awake() > num_cores; });
        std::unique_lock lock(queue.mutex);
        queue.wake.wait(lock, [&] { return queue.stop || !queue.tasks.empty(); });
        if (queue.tasks.empty()) return;
        std::function<void()> task = std::move(queue.tasks.front());
        queue.tasks.pop_front();
        --queue.waiting;
        lock.unlock();
        task();
    }
}

}  // namespace infinilm
