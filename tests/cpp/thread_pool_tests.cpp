// The thread pool: every share once, whatever it throws; idle pools cost nothing and count for nothing.
#include <atomic>
#include <chrono>
#include <new>
#include <vector>

#include "check.h"
#include "cpu/thread_pool.h"

namespace infinilm::test {
namespace {

using cpu::ThreadPool;

struct Random {
    uint32_t state = 1;
    uint32_t below(uint32_t n) {
        state = state * 1664525u + 1013904223u;
        return (state >> 16) % n;
    }
};

void pause_for(uint32_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// Each share writes its own element, and those of a thread its sum: ThreadSanitizer sees whether any two overlap.
void run_regions(Random& random, ThreadPool& pool, int count) {
    for (int region = 0; region < count; ++region) {
        const int shares = static_cast<int>(random.below(20));
        const long work = random.below(3) == 0 ? 2000 : 10;
        std::vector<int> done(static_cast<size_t>(shares));
        std::vector<long> sums(static_cast<size_t>(pool.size()));
        pool.run(shares, [&](int share, int thread) {
            ++done[static_cast<size_t>(share)];
            for (long k = 0; k < work; ++k) sums[static_cast<size_t>(thread)] += 1;
        });
        long sum = 0;
        for (long s : sums) sum += s;
        for (int d : done) CHECK(d == 1);
        CHECK(sum == work * shares);
        if (random.below(16) == 0) pause_for(random.below(700));
    }
}

TEST(pool_runs_every_share_once) {
    Random random;
    for (int round = 0; round < (rounds ? rounds : 400); ++round) {
        ThreadPool pool(1 + static_cast<int>(random.below(5)));
        if (random.below(2) == 0) {
            run_regions(random, pool, 100);
        } else {  // two at once share the cores
            ThreadPool other(1 + static_cast<int>(random.below(3)));
            rethrow_any(run_ranks(2, [&](int rank) {
                Random own{random.state + static_cast<uint32_t>(rank)};
                run_regions(own, rank == 0 ? pool : other, 50);
            }));
        }
    }
}

TEST(pool_throws_what_a_share_throws) {
    Random random;
    ThreadPool pool(3);
    for (int round = 0; round < (rounds ? rounds : 2000); ++round) {
        const int shares = 2 + static_cast<int>(random.below(12)), bad = static_cast<int>(random.below(3));
        std::atomic<int> inside{0}, thrown{0};
        // bad 0: the first thread; 1: the caller; 2: another thread
        auto region = [&](int, int thread) {
            ++inside;
            if (random.state % 2 == 0) pause_for(20);
            if (bad == 0 || (bad == 1) == (thread == 0)) {
                ++thrown;
                --inside;
                throw std::bad_alloc();
            }
            --inside;
        };
        bool caught = false;
        try {
            pool.run(shares, region);
        } catch (const std::bad_alloc&) {
            caught = true;
        }
        CHECK(inside == 0);  // no thread works on memory that the caller may free now
        CHECK(caught == (thrown > 0));
        run_regions(random, pool, 2);
    }
}

TEST(pool_sleeps_when_idle) {
    const auto all_sleep = [] {
        for (int i = 0; i < 5000 && ThreadPool::num_awake() != 0; ++i) pause_for(1000);
        return ThreadPool::num_awake() == 0;
    };
    // A region in which all threads of a pool are inside at once.
    const auto with_all = [](ThreadPool& pool, auto look) {
        std::atomic<int> begun{0}, looked{0};
        pool.run(pool.size(), [&](int, int) {
            for (++begun; begun < pool.size();) std::this_thread::yield();
            look();
            for (++looked; looked < pool.size();) std::this_thread::yield();
        });
    };
    ThreadPool alone(1), other(2), pool(3);
    with_all(other, [] {});
    with_all(pool, [] {});
    CHECK(all_sleep());
    alone.run(8, [](int, int) { CHECK(ThreadPool::num_awake() == 0); });  // it has no threads
    with_all(pool, [] { CHECK(ThreadPool::num_awake() == 3); });  // the caller among them, and none of the others
    CHECK(all_sleep());
}

}  // namespace
}  // namespace infinilm::test
