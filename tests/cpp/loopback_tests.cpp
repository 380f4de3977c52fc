// Ranks whose tensors the host cannot read: a device made of host memory whose addresses are not those of the memory.
#include <cstring>
#include <mutex>

#include "check.h"
#include "dist/in_process.h"
#include "fake_backend.h"

namespace infinilm::test {
namespace {

constexpr uintptr_t device_bit = uintptr_t{1} << 62;  // not an address that could be used

class FakeDevice final : public FakeBackend {
public:
    using FakeBackend::FakeBackend;

    Tensor allocate(DType dtype, std::span<const int64_t> shape) override {
        const Tensor memory = allocate_host(dtype, shape);
        return {TensorView(flip(memory.data()), dtype, shape, device()), memory.owner};
    }
    void copy(const TensorView& src, const TensorView& dst) override {
        if (fail_copy) throw DeviceError("the copy failed");
        FakeBackend::copy({host(src), src.dtype(), src.shape()}, {host(dst), dst.dtype(), dst.shape()});
    }
    static void* host(const TensorView& view) {
        return view.device().kind == DeviceKind::cuda ? flip(view.data()) : view.data();
    }
    bool fail_copy = false;

private:
    static void* flip(void* data) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) ^ device_bit); }
};

TEST(ranks_that_share_a_device) {
    const std::vector<Device> devices(3, Device{DeviceKind::cuda, 0});
    const auto group = make_group({.devices = devices, .threads_per_rank = 1, .nccl_library = "not needed"});
    rethrow_any(run_ranks(3, [&](int rank) {
        FakeDevice device(0);
        const auto communicator = group->join(rank, &device);
        CHECK(!communicator->capturable());
        for (int64_t n : {1, 0, 7, 989, 60000}) {
            const int64_t shape[] = {n}, gathered[] = {3, n};
            const Tensor x = device.allocate(DType::float32, shape), out = device.allocate(DType::float32, gathered);
            const auto at = [&](const Tensor& t, int64_t i) -> float& {
                return static_cast<float*>(device.host(t))[i];
            };
            for (int64_t i = 0; i < n; ++i) at(x, i) = static_cast<float>(i + rank);
            communicator->all_gather(x, out);
            communicator->all_reduce(x);
            for (int64_t i = 0; i < n; ++i) {
                CHECK(at(x, i) == static_cast<float>(3 * i + 3));
                for (int r = 0; r < 3; ++r) CHECK(at(out, r * n + i) == static_cast<float>(i + r));
            }
            for (int64_t i = 0; i < n; ++i) at(x, i) = static_cast<float>(rank);
            communicator->broadcast(x, 2);
            for (int64_t i = 0; i < n; ++i) CHECK(at(x, i) == 2);
        }
    }));
}

TEST(a_copy_that_fails) {
    const auto group = make_in_process_group(2);
    const auto errors = run_ranks(2, [&](int rank) {
        FakeDevice device(0);
        const auto communicator = group->join(rank, &device);
        const int64_t shape[] = {100000};
        const Tensor x = device.allocate(DType::float32, shape);
        communicator->all_reduce(x);
        device.fail_copy = rank == 1;
        try {
            communicator->all_reduce(x);
        } catch (...) {
            communicator->abort(std::current_exception());
            throw;
        }
    });
    CHECK(is<DeviceError>(errors[1]));
    CHECK(message(errors[0]) == "the ranks have stopped: the copy failed");
}

TEST(the_kind_of_group) {
    const Device cpu, gpu0{DeviceKind::cuda, 0}, gpu1{DeviceKind::cuda, 1};
    const auto make = [](std::vector<Device> devices) {
        return error_of([&] { make_group({std::move(devices), 1, "/nowhere/libnccl.so.2"}); });
    };
    CHECK(make({cpu}) == "" && make({gpu0}) == "" && make({cpu, cpu}) == "" && make({gpu0, gpu0}) == "");
    CHECK(make({gpu0, gpu1, gpu0}) == "" && make({cpu, gpu0}) == "");
    CHECK(contains(make({gpu0, gpu1}), "needs NCCL, and /nowhere/libnccl.so.2 cannot be opened"));
    CHECK(contains(make({}), "at least 1 rank, got 0"));
}

}  // namespace
}  // namespace infinilm::test
