#include "cpu/machine_limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace infinilm::cpu {

namespace {

template <class F>
double seconds(F f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What disturbs a measurement can only make it smaller, so the largest is nearest to what the machine can do.
template <class F>
double best_of(int repeats, F f) {
    double best = 0;
    for (int i = 0; i < repeats; ++i) best = std::max(best, f());
    return best;
}

double measure_read(const Kernels& kernels, ThreadPool& pool, int64_t buffer_bytes) {
    const int64_t bytes = std::clamp<int64_t>(buffer_bytes, 64 << 20, 1 << 30);
    const Tensor buffer = allocate_host(DType::uint8, {bytes});
    prefer_huge_pages(buffer);          // as weights have them
    std::atomic<uint64_t> checksum{0};  // so that reading cannot be left out
    auto share = [&](int worker, int count, auto f) {
        const int64_t begin = bytes * worker / count / 4096 * 4096, end = bytes * (worker + 1) / count / 4096 * 4096;
        f(buffer.as<char>() + begin, static_cast<size_t>(end - begin));
    };
    // Written first, each part by who will read it: pages never written are all the same page of zeros.
    const int count = pool.size();
    pool.run(count,
             [&](int worker, int) { share(worker, count, [](char* data, size_t n) { std::memset(data, 1, n); }); });
    return best_of(5, [&] {
        return static_cast<double>(bytes) / seconds([&] {
                   pool.run(count, [&](int worker, int) {
                       share(worker, count, [&](char* data, size_t n) { checksum += kernels.read_memory(data, n); });
                   });
               });
    });
}

double measure_dot(const Kernels& kernels, ThreadPool& pool, bool multiply_bf16) {
    int64_t iterations = 1 << 14;
    auto round = [&] {
        std::atomic<double> flops{0};
        const double elapsed = seconds([&] {
            pool.run(pool.size(), [&](int, int) { flops.fetch_add(kernels.dot_flops(iterations, multiply_bf16)); });
        });
        return std::pair(flops.load(), elapsed);
    };
    while (round().second < 0.02 && iterations < (int64_t{1} << 34)) iterations *= 2;
    return best_of(7, [&] {
        const auto [flops, elapsed] = round();
        return flops / elapsed;
    });
}

}  // namespace

MachineLimits measure_limits(const CpuOptions& options, int64_t buffer_bytes) {
    const CpuOptions used = checked(options);
    const Kernels& kernels = select_kernels(used.isa);
    ThreadPool pool(used.num_threads);
    const bool multiply_bf16 = used.compute_dtype == DType::bfloat16 && kernels.multiplies_bf16();
    return {.read_bytes_per_second = measure_read(kernels, pool, buffer_bytes),
            .dot_flops_per_second = measure_dot(kernels, pool, multiply_bf16)};
}

}  // namespace infinilm::cpu
