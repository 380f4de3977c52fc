// Turns of engines that share GPUs.
#include <atomic>
#include <optional>
#include <thread>

#include "check.h"
#include "core/error.h"
#include "engine/device_turns.h"

namespace infinilm::test {
namespace {

const int first_engine = 0, second_engine = 0, third_engine = 0;

TEST(turns_come_in_order) {
    std::optional<DeviceTurn> a(std::in_place, &first_engine, std::vector{0, 1});
    const DeviceTurn again(&first_engine, {0, 1}), elsewhere(&second_engine, {2, 3}), nowhere(&second_engine, {});
    CHECK(a->has_come() && again.has_come() && elsewhere.has_come() && nowhere.has_come());
    DeviceTurn b(&second_engine, {1, 2});
    const DeviceTurn behind(&first_engine, {0, 1}), beside(&third_engine, {4});
    CHECK(!b.has_come() && !behind.has_come() && beside.has_come());
    a.reset();             // as when a task could not be submitted
    CHECK(!b.has_come());  // `again` is there, too
    nowhere.wait();
}

TEST(turns_within_turns) {
    const DeviceTurn a(&first_engine, {0, 1});
    const auto refuses = [](const int& engine, int device) {
        try {
            const DeviceTurn turn(&engine, {device});
            return false;
        } catch (const Error&) {
            return true;
        }
    };
    {
        const DeviceTurn::Running running(a);
        CHECK(refuses(second_engine, 1) && !refuses(second_engine, 2) && !refuses(first_engine, 1));
    }
    CHECK(!refuses(second_engine, 1));
}

TEST(turns_are_waited_for) {
    DeviceTurn a(&first_engine, {0, 1}), b(&second_engine, {1});
    std::atomic<bool> come = false;
    std::thread waiting([&] {
        b.wait();
        come = true;
    });
    CHECK(!come && !b.has_come());
    a.end();
    a.end();
    waiting.join();
    CHECK(come && b.has_come());
}

}  // namespace
}  // namespace infinilm::test
