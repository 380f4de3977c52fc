// The thread of a rank: order, results, exceptions, its name and its CPUs, and that it sleeps.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <ctime>
#include <set>
#include <stdexcept>

#include "check.h"
#include "core/wait.h"
#include "engine/cpu_places.h"
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

using Cpus = std::vector<int>;

TEST(ranks_stay_on_their_node) {
    // Two nodes of four cores of two logical CPUs, numbered as machines do: siblings are 8 apart, nodes alternate.
    std::vector<CpuPlace> machine;
    for (int cpu = 0; cpu < 16; ++cpu) machine.push_back({.node = cpu % 2, .core = cpu % 8, .cpu = cpu});
    CHECK(cpus_of_rank(machine, 0, 1).size() == 16);
    CHECK(cpus_of_rank(machine, 0, 2) == Cpus({0, 8, 2, 10, 4, 12, 6, 14}));
    CHECK(cpus_of_rank(machine, 1, 2) == Cpus({1, 9, 3, 11, 5, 13, 7, 15}));
    CHECK(cpus_of_rank(machine, 1, 4) == Cpus({4, 12, 6, 14}));
    CHECK(cpus_of_rank(machine, 5, 8) == Cpus({3, 11}));
    CHECK(cpus_of_rank(machine, 5, 16) == Cpus({12}));  // more ranks than cores
    CHECK(cpus_of_rank(machine, 16, 17).empty());
    for (int size = 1; size <= 16; ++size) {  // three ranks cannot all have a node: evenly, then
        std::set<int> joined;
        size_t most = 0, least = 16;
        for (int rank = 0; rank < size; ++rank) {
            const Cpus cpus = cpus_of_rank(machine, rank, size);
            joined.insert(cpus.begin(), cpus.end());
            most = std::max(most, cpus.size());
            least = std::min(least, cpus.size());
        }
        CHECK(joined.size() == 16 && most - least <= 2);
    }
}

TEST(lists_of_cpus) {
    CHECK(parse_cpu_list("0-3,8,10-11\n") == Cpus({0, 1, 2, 3, 8, 10, 11}));
    CHECK(parse_cpu_list("5") == Cpus({5}));
    for (const char* bad : {"", "\n", "-1", "x", "3-", "3-1", "0-99999999999", "0-2000000"})
        CHECK(parse_cpu_list(bad).empty());
    for (const char* bad : {"7,", "7,x", "7 8", "7,9-8", "7,-3", "7;8"}) CHECK(parse_cpu_list(bad) == Cpus({7}));
    uint32_t state = 1;
    for (int i = 0; i < 20000; ++i) {  // any bytes end, and give no negative number
        std::string text;
        for (uint32_t n = state % 12; n > 0; --n) {
            state = state * 1664525u + 1013904223u;
            text += "0123456789-, x\n"[state >> 28];
        }
        for (int cpu : parse_cpu_list(text)) CHECK(cpu >= 0);
        state = state * 1664525u + 1013904223u;
    }
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
