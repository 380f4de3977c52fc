// Speed of the in-process all_reduce of float32, against memcpy of the same tensor by each rank.
//
//   all_reduce_bench [--ranks n] [--seconds s] [--bytes n]...
//
// Ranks, each on its share of the cores, repeat a call, and rank 0 takes the time of each; medians, and the quartiles
// around them, over rounds that alternate with memcpy. Built by tests/dist/test_communicator.py; for numbers build it
// with -O3:
//   g++ -std=c++20 -O3 -Isrc -pthread src/core/*.cpp src/ops/ops.cpp src/ops/values.cpp
//       src/dist/*.cpp src/engine/rank_worker.cpp bench/all_reduce_bench.cpp -ldl
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/topology.h"
#include "dist/in_process.h"
#include "engine/rank_worker.h"

using namespace infinilm;
using Clock = std::chrono::steady_clock;

namespace {

struct Quartiles {
    double low, median, high;
};

Quartiles quartiles(std::vector<double>& v) {
    std::ranges::sort(v);
    return {v[v.size() / 4], v[v.size() / 2], v[v.size() * 3 / 4]};
}

double us_since(Clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

void measure(int ranks, int64_t bytes, double seconds) {
    const auto group = make_in_process_group(ranks);
    std::vector<double> reduce_us, copy_us;  // rank 0's
    const auto work = [&](int rank) {
        const auto communicator = group->join(rank, nullptr);
        const Tensor x = allocate_host(DType::uint8, {bytes}), y = allocate_host(DType::uint8, {bytes});
        const TensorView values(x.data(), DType::float32, {bytes / 4});
        const auto until = Clock::now() + std::chrono::duration<double>(seconds);
        for (int32_t go = 1, round = 0;; ++round) {
            if (rank == 0) go = round < 20 || Clock::now() < until;
            communicator->broadcast({&go, DType::int32, {1}}, 0);
            if (!go) break;
            communicator->barrier();
            auto begin = Clock::now();
            communicator->all_reduce(values);
            if (rank == 0) reduce_us.push_back(us_since(begin));
            communicator->barrier();
            begin = Clock::now();
            std::memcpy(y.data(), x.data(), static_cast<size_t>(bytes));
            if (rank == 0) copy_us.push_back(us_since(begin));
        }
    };
    {
        std::vector<std::unique_ptr<RankWorker>> workers;
        for (int rank = 0; rank < ranks; ++rank) {
            workers.push_back(std::make_unique<RankWorker>(rank, cpus_of_rank(available_cpus(), rank, ranks)));
            workers.back()->submit([&, rank] { work(rank); });
        }
    }
    const Quartiles reduce = quartiles(reduce_us), copy = quartiles(copy_us);
    std::printf("%d ranks %7ld KiB: all_reduce %9.2f us (%.2f .. %.2f)  memcpy %9.2f us (%.2f .. %.2f)  ratio %.1f\n",
                ranks, long(bytes >> 10), reduce.median, reduce.low, reduce.high, copy.median, copy.low, copy.high,
                reduce.median / copy.median);
}

}  // namespace

int main(int argc, char** argv) {
    int ranks = 2;
    double seconds = 2;
    std::vector<int64_t> sizes;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i];
        if (name == "--ranks") ranks = std::atoi(argv[i + 1]);
        if (name == "--seconds") seconds = std::atof(argv[i + 1]);
        if (name == "--bytes") sizes.push_back(std::atol(argv[i + 1]));
    }
    if (sizes.empty()) sizes = {8 << 10, 64 << 10, 1 << 20, 16 << 20};
    for (int64_t bytes : sizes) measure(ranks, bytes, seconds);
}
