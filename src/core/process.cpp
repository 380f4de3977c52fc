#include "core/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "core/error.h"

namespace infinilm {

namespace {

// Forks between the first process and this one. Counted, because asking for the process id is a system call, and it is
// wanted in every region of a thread pool.
std::atomic<unsigned> generation{0};
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

OwnerProcess::OwnerProcess() : id_(getpid()), generation_(generation.load(std::memory_order_relaxed)) {}

bool OwnerProcess::is_current() const noexcept { return generation.load(std::memory_order_relaxed) == generation_; }

void OwnerProcess::check() const {
    if (!is_current())
        throw EngineDeadError(concat("the engine was made in process ", id_,
                                     "; after a fork make a new one, or use the 'spawn' start method"));
}

}  // namespace infinilm
