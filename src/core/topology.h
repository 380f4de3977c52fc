// The CPUs of this machine that the process may use: the one place that asks the system which and how many they are,
// where in the machine they lie, and that binds threads to them. Logical CPUs, by the ids of Linux, ascending.
#pragma once

#include <pthread.h>

#include <span>
#include <string>
#include <vector>

namespace infinilm {

// A logical CPU and where in the machine it is. Ids of cores and NUMA nodes need only tell them apart.
struct CpuPlace {
    int node = 0, core = 0, cpu = 0;
    auto operator<=>(const CpuPlace&) const = default;
};

// Those that the calling thread may run on, however many the machine has; none if the system does not say.
std::vector<int> allowed_cpus();
// How many these are; if the system does not say, those of the machine.
int available_cores();
// How many threads to compute with: one per core of available_cpus(), and no more than the CPU quota of the process's
// cgroups.
int default_num_threads();
// allowed_cpus() with their places. What Linux does not say of a place counts as one node, and a core for each CPU.
std::vector<CpuPlace> available_cpus();

// Threads for these CPUs, at least one: one per core, since the logical CPUs of a core share the units and the cache
// that kernels fill already; and no more than `quota` CPUs (infinity: no quota).
int threads_for(const std::vector<CpuPlace>& cpus, double quota);

// A rank's share of the CPUs, in order of node, core and id: whole cores, and neighbours, so that the rank's threads,
// and the memory that they touch first, stay on one node unless the number of ranks makes that impossible. The logical
// CPUs of a core are divided only where there are fewer cores than ranks. Empty, which is anywhere, when there are
// fewer CPUs than ranks.
std::vector<int> cpus_of_rank(std::vector<CpuPlace> cpus, int rank, int size);

// Lets the thread run on these CPUs alone. 0, or the errno of a set of which the process may use none.
int bind_thread(pthread_t thread, std::span<const int> cpus);

// The numbers of a list as Linux writes it: "0-3,8,10-11". What is not one gives those before it.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace infinilm
