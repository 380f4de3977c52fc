// Masks that are given while ranks wait for them: all see what was written before, and no rank waits for ever.
#include <array>
#include <atomic>
#include <chrono>
#include <random>

#include "check.h"
#include "model/late_masks.h"

namespace infinilm::test {
namespace {

// The words are no atomics: ThreadSanitizer sees whether giving them orders the writes before the reads.
TEST(late_masks_are_seen_whole) {
    std::mt19937 random(std::random_device{}());
    for (int round = 0; round < (rounds ? rounds : 500); ++round) {
        LateMasks masks;
        std::array<int, 64> words{};
        const int size = 1 + static_cast<int>(random() % 4);
        const auto patience = std::chrono::microseconds(random() % 300);
        std::thread giver([&] {
            std::this_thread::sleep_for(patience);
            CHECK(!masks.given());
            for (int& word : words) word = round + 1;
            masks.give();
            masks.give();  // again changes nothing
        });
        const auto errors = run_ranks(size, [&](int rank) {
            if (rank % 2) std::this_thread::sleep_for(2 * patience);  // some come when they are there already
            masks.wait([] { return false; });
            CHECK(masks.given());
            for (const int word : words) CHECK(word == round + 1);
        });
        giver.join();
        rethrow_any(errors);
    }
}

TEST(late_masks_that_never_come) {
    for (int round = 0; round < (rounds ? rounds : 20); ++round) {
        LateMasks masks;
        std::atomic<bool> given_up{false};
        std::atomic<int> num_waiting{0};
        std::thread stopper([&] {
            while (num_waiting < 3) std::this_thread::yield();
            given_up = true;
        });
        const auto errors = run_ranks(3, [&](int) {
            masks.wait([&] {
                ++num_waiting;
                return given_up.load();
            });
            CHECK(given_up && !masks.given());
        });
        stopper.join();
        rethrow_any(errors);
    }
    LateMasks masks;
    int num_asked = 0;
    masks.give();
    masks.wait([&] { return ++num_asked > 0; });
    CHECK(num_asked == 0);  // a mask that is there counts, also for ranks that have given up
}

}  // namespace
}  // namespace infinilm::test
