// The thread of a rank: order, results, exceptions, its name and its CPUs, and that it sleeps.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <ctime>
#include <set>
#include <stdexcept>

#include "check.h"
#include "core/topology.h"
#include "core/wait.h"
#include "engine/rank_worker.h"

namespace infinilm::test {
namespace {

std::string thread_name() {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

TEST(worker_runs_tasks_in_order) {
    std::vector<int> order;  // touched by the worker alone
    std::vector<std::future<int>> futures;
    {
        RankWorker worker(3);
        CHECK(worker.submit([] { return thread_name(); }).get() == "infinilm-rank3");
        for (int i = 0; i < 500; ++i)
            futures.push_back(worker.submit([&, i] {
                order.push_back(i);
                if (i == 7) throw std::out_of_range("seven");
                return i;
            }));
    }  // finishes what was submitted
    for (int i = 0; i < 500; ++i) {
        CHECK(order[static_cast<size_t>(i)] == i);
        auto& future = futures[static_cast<size_t>(i)];
        if (i == 7)
            CHECK(error_of([&] { future.get(); }) == "seven");
        else
            CHECK(future.get() == i);
    }
    CHECK(RankWorker(123456).submit([] { return thread_name(); }).get() == "infinilm-rank12");
}

TEST(worker_takes_tasks_from_many_threads) {
    RankWorker worker;
    int sum = 0;  // touched by the worker alone
    rethrow_any(run_ranks(4, [&](int rank) {
        for (int i = 0; i < 200; ++i) worker.submit([&, rank] { sum += rank; }).get();
    }));
    CHECK(worker.submit([&] { return sum; }).get() == 200 * (0 + 1 + 2 + 3));
}

TEST(worker_on_its_cpus) {
    const std::vector<CpuPlace> all = available_cpus();
    const int size = static_cast<int>(all.size());
    CHECK(size == available_cores());
    std::set<int> joined;
    for (int rank = 0; rank < size; ++rank) {
        const std::vector<int> cpus = cpus_of_rank(all, rank, size);
        CHECK(cpus.size() == 1 && joined.insert(cpus[0]).second);
        RankWorker worker(rank, cpus);
        const auto inherited = [] {
            int cores = 0;
            std::thread([&] { cores = available_cores(); }).join();
            return cores;
        };
        CHECK(worker.submit(inherited).get() == 1);
    }
    const std::string error = error_of([] { RankWorker worker(2, {1000000}); });
    CHECK(contains(error, "rank 2 cannot run on CPUs 1000000: "));
}

TEST(worker_sleeps_when_idle) {
    RankWorker worker;
    const auto cpu_seconds = [&] {
        return worker
            .submit([] {
                timespec t{};
                clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
                return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
            })
            .get();
    };
    const double begin = cpu_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(cpu_seconds() - begin < 0.1);  // a worker that polled would have used all of it
}

}  // namespace
}  // namespace infinilm::test
