// Where the host runs the two cores of a virtual machine, which decides how fast both read together:
//
//     g++ -std=c++20 -O2 -march=native -pthread bench/placement_bench.cpp -o /tmp/placement && /tmp/placement 15
//
// In turn, for 20 ms each: what two pinned threads read of 1 GB in huge pages, and the multiplications and additions
// that they do on registers, together and alone; then the time in which a cache line goes from one to the other and
// back. A core reached over the L3 of a chiplet answers sooner than one on another chiplet. Two that share the
// arithmetic of one core do half as much together as alone. Needs AVX-512 and two cores.

#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

constexpr std::size_t kHalf = std::size_t{512} << 20;  // bytes of one thread
constexpr std::size_t kPiece = std::size_t{1} << 20;
constexpr double kSeconds = 0.02;
constexpr int kRounds = 20000;  // of the cache line

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
}

std::atomic<std::uint64_t> sink;  // keeps what is computed from being left out

// Bytes a second.
double read_memory(const char* half) {
    const double begin = now();
    std::size_t bytes = 0;
    __m512i sum = _mm512_setzero_si512();
    while (now() < begin + kSeconds) {
        const char* piece = half + bytes % kHalf;
        for (std::size_t i = 0; i < kPiece; i += 256) {
            for (std::size_t line = 0; line < 256; line += 64) {
                _mm_prefetch(piece + i + 8192 + line, _MM_HINT_NTA);
                sum = _mm512_or_si512(sum, _mm512_load_si512(piece + i + line));
            }
        }
        bytes += kPiece;
    }
    sink += static_cast<std::uint64_t>(_mm512_reduce_or_epi64(sum));
    return static_cast<double>(bytes) / (now() - begin);
}

// Multiplications and additions a second.
double multiply() {
    const double begin = now();
    double operations = 0;
    std::array<__m512, 12> sums;
    sums.fill(_mm512_set1_ps(1));
    const __m512 factor = _mm512_set1_ps(0.999F);
    while (now() < begin + kSeconds) {
        for (int i = 0; i < 500; ++i) {
#pragma GCC unroll 12
            for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, factor, factor);
        }
        operations += 500 * 12 * 32;
    }
    float total = 0;
    for (const __m512& sum : sums) total += _mm512_reduce_add_ps(sum);
    sink += static_cast<std::uint64_t>(total);
    return operations / (now() - begin);
}

// Seconds for which a cache line goes to the other thread and back, the best of four.
double round_trip(std::atomic<std::uint32_t>& line, std::uint32_t thread) {
    double best = 1;
    for (std::uint32_t turn = 0; turn < 4; ++turn) {
        const double begin = now();
        for (std::uint32_t i = 0; i < kRounds; ++i) {
            const std::uint32_t wanted = 2 * (turn * kRounds + i) + thread;
            while (line.load(std::memory_order_acquire) != wanted) _mm_pause();
            line.store(wanted + 1, std::memory_order_release);
        }
        best = std::min(best, (now() - begin) / kRounds);
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    constexpr std::size_t kHuge = std::size_t{2} << 20;
    void* mapped = mmap(nullptr, 2 * kHalf + 2 * kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return std::perror("mmap"), 1;
    char* memory = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(mapped) + kHuge - 1) & ~(kHuge - 1));
    madvise(memory, 2 * kHalf, MADV_HUGEPAGE);
    std::memset(memory, 1, 2 * kHalf);

    // Pieces of work: both read, one reads, the other reads; the same for arithmetic; the cache line.
    std::array<std::array<double, 2>, 7> found{};
    alignas(128) std::atomic<std::uint32_t> line{0};
    std::barrier both{2};
    std::atomic<bool> done{false};
    const auto work = [&](std::uint32_t thread) {
        pin(static_cast<int>(thread));
        const double begin = now();
        while (!done) {
            for (std::uint32_t piece = 0; piece < 7; ++piece) {
                both.arrive_and_wait();
                if (piece == 6) {
                    found[6][thread] = round_trip(line, thread);
                } else if (piece % 3 == 0 || piece % 3 == thread + 1) {
                    found[piece][thread] = piece < 3 ? read_memory(memory + thread * kHalf) : multiply();
                }
                both.arrive_and_wait();
            }
            if (thread == 0) {
                std::printf(
                    "read together %5.1f GB/s, alone %4.1f and %4.1f; arithmetic together %4.0f Gflop/s, alone %4.0f "
                    "and "
                    "%4.0f; round trip %3.0f ns\n",
                    1e-9 * (found[0][0] + found[0][1]), 1e-9 * found[1][0], 1e-9 * found[2][1],
                    1e-9 * (found[3][0] + found[3][1]), 1e-9 * found[4][0], 1e-9 * found[5][1], 1e9 * found[6][0]);
                line = 0;
                done = now() > begin + seconds;
            }
            both.arrive_and_wait();
        }
    };
    std::thread other{work, 1};
    work(0);
    other.join();
}
