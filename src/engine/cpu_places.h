// Which CPUs each of several ranks runs on.
#pragma once

#include <string>
#include <vector>

namespace infinilm {

// A logical CPU and where in the machine it is. Ids of cores and NUMA nodes need only tell them apart.
struct CpuPlace {
    int node = 0, core = 0, cpu = 0;
    auto operator<=>(const CpuPlace&) const = default;
};

// Those this process may use. Linux says where they are; what it does not say counts as one node, and a core for each.
std::vector<CpuPlace> available_cpus();

// A rank's share of them, in order of node, core and id: whole cores, and neighbours, so that the rank's threads, and
// the memory that they touch first, stay on one node unless the number of ranks makes that impossible. The logical CPUs
// of a core are divided only where there are fewer cores than ranks. Empty, which is anywhere, when there are fewer
// CPUs than ranks.
std::vector<int> cpus_of_rank(std::vector<CpuPlace> cpus, int rank, int size);

// The numbers of a list as Linux writes it: "0-3,8,10-11". What is not one gives those before it.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace infinilm
