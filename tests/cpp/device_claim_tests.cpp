// GPUs that one engine of several GPUs has to itself.
#include <optional>

#include "check.h"
#include "core/error.h"
#include "engine/device_claim.h"

namespace infinilm::test {
namespace {

std::vector<Device> gpus(std::initializer_list<int> indices) {
    std::vector<Device> out;
    for (const int index : indices) out.push_back({DeviceKind::cuda, index});
    return out;
}

TEST(gpus_are_claimed_once) {
    const auto refused = [](std::initializer_list<int> indices) {
        return error_of([&] { const DeviceClaim claim(gpus(indices)); });
    };
    std::optional<DeviceClaim> first(std::in_place, gpus({1, 0}));
    CHECK(contains(refused({1, 2}), "cuda:1 is in use by another engine of several GPUs"));
    CHECK(contains(refused({3, 0, 3}), "cuda:0 is in use"));
    const DeviceClaim elsewhere(gpus({2, 3})), one(gpus({0})), shared(gpus({1, 1})), none(std::vector<Device>(4));
    CHECK(contains(refused({0, 4}), "cuda:0"));
    first.reset();
    const DeviceClaim again(gpus({0, 1}));
    CHECK(contains(refused({1, 4}), "cuda:1") && contains(refused({3, 4}), "cuda:3"));
}

}  // namespace
}  // namespace infinilm::test
