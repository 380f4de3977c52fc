// Ranks that fail: whatever the moment, everybody gets the first cause, and nothing is left behind.
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

#include "check.h"
#include "dist/in_process.h"
#include "engine/rank_worker.h"

namespace infinilm::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Injected : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Collectives of random sizes until one throws. Tensors are freed at once, as a rank that fails does: a rank that still
// used one would show under the sanitizers.
void talk(Communicator& communicator, uint32_t seed, int failing_step) {
    std::mt19937 random(seed);  // the same on every rank
    for (int step = 0;; ++step) {
        const auto n = static_cast<int64_t>(random() % (random() % 3 ? 500 : 60000));
        const uint32_t op = random() % 8;
        if (step == failing_step) throw Injected(concat("rank ", communicator.rank(), " broke at step ", step));
        std::vector<float> x(static_cast<size_t>(n), 1.0f);
        const TensorView view(x.data(), DType::float32, {n});
        if (op < 5) {
            communicator.all_reduce(view);
            for (float value : x) CHECK(value == static_cast<float>(communicator.size()));
        } else if (op == 5) {
            std::vector<float> out(x.size() * static_cast<size_t>(communicator.size()));
            communicator.all_gather(view, TensorView(out.data(), DType::float32, {communicator.size(), n}));
        } else if (op == 6) {
            communicator.broadcast(view, static_cast<int>(n) % communicator.size());
        } else {
            communicator.barrier();
        }
    }
}

bool is_nested_cause(const std::exception_ptr& error, std::string_view text) {
    try {
        std::rethrow_exception(error);
    } catch (const std::nested_exception& nested) {
        return is<Injected>(nested.nested_ptr()) && message(nested.nested_ptr()) == text;
    } catch (...) {
        return false;
    }
}

TEST(abort_anytime) {
    std::mt19937 random(std::random_device{}());
    double longest = 0;
    for (int round = 0; round < (rounds ? rounds : 1000); ++round) {
        const int size = std::vector{2, 2, 3, 4, 8}[random() % 5];
        const uint32_t seed = random();
        const bool outside = random() % 2;
        const int failing_rank = outside ? -1 : static_cast<int>(random() % static_cast<uint32_t>(size));
        const int failing_step = static_cast<int>(random() % 20);
        const auto patience = std::chrono::microseconds(random() % 1000);
        const auto group = make_in_process_group(size);
        std::atomic<Clock::time_point> aborted{Clock::time_point::max()};
        const auto abort = [&](std::exception_ptr cause) {
            if (aborted.load() == Clock::time_point::max()) aborted = Clock::now();
            group->abort(std::move(cause));
        };
        std::thread other([&] {
            std::this_thread::sleep_for(patience);
            if (outside) abort(std::make_exception_ptr(Injected("stopped from outside")));
        });
        const auto errors = run_ranks(size, [&](int rank) {
            const auto communicator = group->join(rank, nullptr);
            try {
                talk(*communicator, seed, rank == failing_rank ? failing_step : -1);
            } catch (...) {
                abort(std::current_exception());
                CHECK(contains(error_of([&] { communicator->barrier(); }), "the ranks have stopped: "));
                CHECK(contains(error_of([&] { communicator->check(); }), "the ranks have stopped: "));
                throw;
            }
        });
        longest = std::max(longest, seconds_since(aborted));
        other.join();
        const std::string cause =
            outside ? "stopped from outside" : concat("rank ", failing_rank, " broke at step ", failing_step);
        for (int rank = 0; rank < size; ++rank) {
            const auto& error = errors[static_cast<size_t>(rank)];
            if (rank == failing_rank) {
                CHECK(is<Injected>(error));
                continue;
            }
            CHECK(message(error) == "the ranks have stopped: " + cause);
            CHECK(is<EngineDeadError>(error));
            CHECK(is_nested_cause(error, cause));
        }
    }
    std::printf("longest time from an abort to the return of all ranks: %.1f ms\n", longest * 1e3);
}

TEST(an_aborted_group_stays_aborted) {
    for (int size : {1, 2}) {
        const auto group = make_in_process_group(size);
        const auto first = group->join(0, nullptr);
        first->check();
        group->abort(std::make_exception_ptr(Injected("one")));
        group->abort(std::make_exception_ptr(Injected("two")));
        float data[1] = {};
        const TensorView x(data, DType::float32, {1});
        const auto dead = [](const std::string& text) { return text == "the ranks have stopped: one"; };
        CHECK(dead(error_of([&] { first->all_reduce(x); })));
        CHECK(dead(error_of([&] { first->broadcast(x, 0); })));
        CHECK(dead(error_of([&] { first->barrier(); })));
        CHECK(dead(error_of([&] { first->check(); })));
        if (size == 2) CHECK(dead(error_of([&] { group->join(1, nullptr); })));
    }
    const auto group = make_in_process_group(1);
    group->abort(nullptr);
    CHECK(contains(error_of([&] { group->join(0, nullptr); }), "no cause given"));
}

int64_t entries(const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

int64_t resident_bytes() {
    std::ifstream file("/proc/self/statm");
    int64_t pages = 0, resident = 0;
    file >> pages >> resident;
    return resident * 4096;
}

// What an engine does: workers, a group, some steps, a fault in one of them, and the end.
void engine_that_fails(int size, int round) {
    const auto group = make_in_process_group(size);
    std::vector<std::unique_ptr<Communicator>> communicators(static_cast<size_t>(size));
    std::vector<std::unique_ptr<RankWorker>> workers;
    std::vector<std::future<void>> steps;
    for (int rank = 0; rank < size; ++rank) {
        workers.push_back(std::make_unique<RankWorker>(rank));
        steps.push_back(workers.back()->submit([&, rank] {
            try {
                if (round % 4 == 0 && rank == 1) throw Injected("while loading");
                auto& communicator = communicators[static_cast<size_t>(rank)] = group->join(rank, nullptr);
                if (round % 4 == 1 && rank == 1) throw std::bad_alloc();
                talk(*communicator, static_cast<uint32_t>(round), rank == round % size ? round % 9 : -1);
            } catch (...) {
                group->abort(std::current_exception());
                throw;
            }
        }));
    }
    for (auto& step : steps) CHECK(error_of([&] { step.get(); }) != "");
}

// The system lists a thread a little longer than it lives: whether there come to be no more than so many.
bool comes_down_to(int64_t threads) {
    const auto begin = Clock::now();
    while (entries("/proc/self/task") > threads && seconds_since(begin) < 60)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return entries("/proc/self/task") <= threads;
}

TEST(nothing_is_left) {
    const int count = rounds ? rounds : 200;
    mallopt(M_ARENA_MAX, 1);  // what threads leave in arenas of their own comes and goes
    int64_t threads = 0, files = 0, bytes = 0;
    const auto resident = [] {
        malloc_trim(0);  // how much free memory stays with the heap is chance
        return resident_bytes();
    };
    for (int round = -count / 4; round < count; ++round) {
        if (round == 0) {  // after a warm-up: memory and thread stacks are reused from now on
            threads = entries("/proc/self/task"), files = entries("/proc/self/fd"), bytes = resident();
        }
        engine_that_fails(4, std::abs(round));
    }
    CHECK(comes_down_to(threads));
    CHECK(entries("/proc/self/fd") == files);
    const int64_t grown = resident() - bytes;
    std::printf("after %d engines: %+ld KiB\n", count, long(grown >> 10));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which keep freed memory for a while
    CHECK(grown < int64_t{count} * 8192);                            // less than two pages each: a group alone has more
#endif
}

}  // namespace
}  // namespace infinilm::test
