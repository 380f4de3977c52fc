// Which CPUs the process may use, also on machines of more CPUs than a cpu_set_t holds.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <set>
#include <utility>

#include "check.h"
#include "core/topology.h"

// As a system of that many CPUs answers: it refuses a set that is too small for all of them, and lets this thread use
// the last one. 0: the real answer.
static thread_local int simulated_cpus = 0;

extern "C" int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t* set) noexcept {
    if (simulated_cpus == 0) {
        const long written = syscall(SYS_sched_getaffinity, pid, bytes, set);
        if (written < 0) return -1;
        std::fill(reinterpret_cast<char*>(set) + written, reinterpret_cast<char*>(set) + bytes, '\0');
        return 0;
    }
    if (8 * bytes < static_cast<size_t>(simulated_cpus)) {
        errno = EINVAL;
        return -1;
    }
    CPU_ZERO_S(bytes, set);
    CPU_SET_S(static_cast<size_t>(simulated_cpus - 1), bytes, set);
    return 0;
}

namespace infinilm::test {
namespace {

TEST(cpus_of_large_machines) {
    const std::vector<int> here = allowed_cpus();
    CHECK(!here.empty() && static_cast<int>(here.size()) == available_cores());
    for (const int cpus : {64, 1024, 1025, 4096, 100000}) {
        simulated_cpus = cpus;
        const std::vector<int> found = allowed_cpus();
        const std::vector<CpuPlace> places = available_cpus();
        simulated_cpus = 0;
        CHECK(found == std::vector<int>{cpus - 1});
        CHECK(places.size() == 1 && places[0].cpu == cpus - 1);
    }
}

TEST(bound_to_cpus_beyond_the_machine) {
    rethrow_any(run_ranks(1, [](int) {  // a thread of its own
        const int first = allowed_cpus().front();
        CHECK(bind_thread(pthread_self(), std::vector{first, 5000}) == 0);  // what of them there is
        CHECK(allowed_cpus() == std::vector{first});
    }));
    for (const std::vector<int>& none : {std::vector<int>{}, {5000}, {-1}, {1 << 30}})
        CHECK(bind_thread(pthread_self(), none) == EINVAL);
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

TEST(a_thread_per_core) {
    constexpr double none = std::numeric_limits<double>::infinity();
    std::vector<CpuPlace> machine;  // two nodes of four cores of two logical CPUs; ids of cores begin anew in each node
    for (int cpu = 0; cpu < 16; ++cpu) machine.push_back({.node = cpu % 2, .core = cpu % 8 / 2, .cpu = cpu});
    CHECK(threads_for(machine, none) == 8);
    CHECK(threads_for(machine, 12) == 8);  // of the quota's CPUs, those beyond the cores would be siblings
    CHECK(threads_for(machine, 3.9) == 3);
    CHECK(threads_for(machine, 0.5) == 1);
    const auto allowed = [&](const Cpus& cpus) {
        std::vector<CpuPlace> places;
        for (int cpu : cpus) places.push_back(machine[static_cast<size_t>(cpu)]);
        return threads_for(places, none);
    };
    CHECK(allowed({0, 8}) == 1);  // siblings
    CHECK(allowed({0, 1}) == 2);  // one CPU of two cores, of one id in two nodes
    CHECK(allowed({0, 8, 2, 10, 5, 13}) == 3);
    CHECK(allowed({0, 8, 2, 5}) == 3);
    CHECK(allowed({}) == 1);
    std::vector<CpuPlace> unknown;  // where the system names no siblings, a core for each CPU
    for (int cpu = 0; cpu < 5; ++cpu) unknown.push_back({.core = cpu, .cpu = cpu});
    CHECK(threads_for(unknown, none) == 5);

    std::set<std::pair<int, int>> cores;  // of this machine
    for (const CpuPlace& place : available_cpus()) cores.emplace(place.node, place.core);
    CHECK(default_num_threads() >= 1 && default_num_threads() <= static_cast<int>(cores.size()));
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

}  // namespace
}  // namespace infinilm::test
