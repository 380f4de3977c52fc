#include "core/topology.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "core/error.h"

namespace infinilm {

namespace {

constexpr int kMostCpus = 1 << 20;  // of a list that is damaged

// A set of CPUs of any size, where cpu_set_t ends at 1,024.
class CpuSet {
public:
    explicit CpuSet(int num_cpus)
        : num_cpus_(num_cpus), bytes_(CPU_ALLOC_SIZE(num_cpus)), set_(CPU_ALLOC(static_cast<size_t>(num_cpus))) {
        if (!set_) throw std::bad_alloc();
        CPU_ZERO_S(bytes_, set_.get());
    }
    void add(int cpu) { CPU_SET_S(static_cast<size_t>(cpu), bytes_, set_.get()); }
    std::vector<int> cpus() const {
        std::vector<int> out;
        for (int cpu = 0; cpu < num_cpus_; ++cpu)
            if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes_, set_.get())) out.push_back(cpu);
        return out;
    }
    size_t bytes() const { return bytes_; }
    cpu_set_t* get() const { return set_.get(); }

private:
    struct Free {
        void operator()(cpu_set_t* set) const { CPU_FREE(set); }
    };
    int num_cpus_;
    size_t bytes_;
    std::unique_ptr<cpu_set_t, Free> set_;
};

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

// A number of CPUs from one cgroup's quota, or none if unlimited. v2: cpu.max holds "max 100000" or "150000 100000".
std::optional<double> read_quota(const std::string& folder, bool v2) {
    double quota = -1, period = 0;
    if (v2) {
        std::ifstream(folder + "/cpu.max") >> quota >> period;  // "max" is no number: quota becomes 0
    } else {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    if (quota > 0 && period > 0) return quota / period;
    return std::nullopt;
}

// The tightest CPU quota of this process's cgroups and of those around them.
std::optional<double> cgroup_quota() {
    std::optional<double> tightest;
    std::ifstream groups("/proc/self/cgroup");  // lines "0::/a/b" (v2) or "4:cpu,cpuacct:/a/b" (v1)
    for (std::string line; std::getline(groups, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = concat(",", line.substr(first + 1, second - first - 1), ",");
        const bool v2 = controllers == ",,";
        if (!v2 && controllers.find(",cpu,") == std::string::npos) continue;
        const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
        std::string path = line.substr(second + 1);
        for (;;) {
            if (path == "/") path.clear();
            if (const auto quota = read_quota(root + path, v2)) tightest = std::min(tightest.value_or(*quota), *quota);
            if (path.empty()) break;
            path.erase(path.find_last_of('/'));
        }
    }
    return tightest;
}

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

std::vector<int> allowed_cpus() {
    // The system refuses a set that is smaller than its own.
    for (int num_cpus = CPU_SETSIZE; num_cpus <= kMostCpus; num_cpus *= 2) {
        const CpuSet set(num_cpus);
        if (sched_getaffinity(0, set.bytes(), set.get()) == 0) return set.cpus();
        if (errno != EINVAL) break;
    }
    return {};
}

int available_cores() {
    const size_t allowed = allowed_cpus().size();
    return std::max(1, static_cast<int>(allowed > 0 ? allowed : std::thread::hardware_concurrency()));
}

int default_num_threads() {
    std::vector<CpuPlace> cpus = available_cpus();
    if (cpus.empty())  // the system does not say which
        for (int cpu = 0; cpu < available_cores(); ++cpu) cpus.push_back({.core = cpu, .cpu = cpu});
    return threads_for(cpus, cgroup_quota().value_or(std::numeric_limits<double>::infinity()));
}

int threads_for(const std::vector<CpuPlace>& cpus, double quota) {
    std::set<std::pair<int, int>> cores;
    for (const CpuPlace& place : cpus) cores.emplace(place.node, place.core);
    // Rounded down: a thread that is throttled while the others wait for it costs more than it adds.
    return std::max(1, static_cast<int>(std::min(static_cast<double>(cores.size()), quota)));
}

std::vector<CpuPlace> available_cpus() {
    std::vector<CpuPlace> places;
    const std::map<int, int> nodes = nodes_of_cpus();
    for (int cpu : allowed_cpus()) {
        const auto node = nodes.find(cpu);
        places.push_back({.node = node == nodes.end() ? 0 : node->second, .core = core_of(cpu), .cpu = cpu});
    }
    return places;
}

int bind_thread(pthread_t thread, std::span<const int> cpus) {
    const bool known = std::ranges::all_of(cpus, [](int cpu) { return cpu >= 0 && cpu < kMostCpus; });
    if (cpus.empty() || !known) return EINVAL;
    CpuSet set(*std::ranges::max_element(cpus) + 1);
    for (int cpu : cpus) set.add(cpu);
    return pthread_setaffinity_np(thread, set.bytes(), set.get());
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
