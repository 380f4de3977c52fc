#include "engine/cpu_places.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif

#include "core/error.h"

namespace infinilm {

namespace {

constexpr int kMostCpus = 1 << 20;  // of a list that is damaged

#if defined(__linux__)
const std::string kSystem = "/sys/devices/system";

std::string read_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

std::map<int, int> nodes_of_cpus() {
    std::map<int, int> nodes;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(kSystem + "/node", none)) {
        const std::string name = entry.path().filename();
        int node = 0;
        if (std::sscanf(name.c_str(), "node%d", &node) != 1) continue;
        for (int cpu : parse_cpu_list(read_line(entry.path() / "cpulist"))) nodes[cpu] = node;
    }
    return nodes;
}

// Siblings share a core, and name the same first one.
int core_of(int cpu) {
    const auto siblings = parse_cpu_list(read_line(concat(kSystem, "/cpu/cpu", cpu, "/topology/thread_siblings_list")));
    return siblings.empty() ? cpu : siblings.front();
}
#endif

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
    std::vector<int> cpus;
    std::istringstream in(text);
    int first = 0;
    while (in >> first && first >= 0) {
        int last = first;
        if (!in.eof() && in.peek() == '-' && !(in.ignore() >> last)) break;
        if (last < first || last >= kMostCpus) break;
        for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
        if (in.eof() || in.get() != ',') break;
    }
    return cpus;
}

std::vector<CpuPlace> available_cpus() {
    std::vector<CpuPlace> cpus;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return {};
    const std::map<int, int> nodes = nodes_of_cpus();
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(static_cast<size_t>(cpu), &set)) continue;
        const auto node = nodes.find(cpu);
        cpus.push_back({.node = node == nodes.end() ? 0 : node->second, .core = core_of(cpu), .cpu = cpu});
    }
#endif
    return cpus;
}

std::vector<int> cpus_of_rank(std::vector<CpuPlace> cpus, int rank, int size) {
    if (static_cast<int>(cpus.size()) < size) return {};
    std::ranges::sort(cpus);
    std::vector<std::vector<int>> units;  // cores; or single CPUs, if there are too few
    const auto same_core = [](const CpuPlace& a, const CpuPlace& b) { return a.node == b.node && a.core == b.core; };
    for (size_t i = 0; i < cpus.size(); ++i) {
        if (i == 0 || !same_core(cpus[i - 1], cpus[i])) units.emplace_back();
        units.back().push_back(cpus[i].cpu);
    }
    if (static_cast<int>(units.size()) < size) {
        units.clear();
        for (const CpuPlace& place : cpus) units.push_back({place.cpu});
    }
    const int count = static_cast<int>(units.size());
    std::vector<int> own;
    for (int u = count * rank / size; u < count * (rank + 1) / size; ++u)
        own.insert(own.end(), units[static_cast<size_t>(u)].begin(), units[static_cast<size_t>(u)].end());
    return own;
}

}  // namespace infinilm
