// The connections of stages: what goes from one to the next, and messages that are not due.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <string>
#include <thread>

#include "check.h"
#include "dist/in_process.h"
#include "dist/stage_link.h"
#include "fake_backend.h"

namespace infinilm::test {
namespace {

// Memory of the host, as a CPU has it.
class HostBackend : public FakeBackend {
public:
    HostBackend() : FakeBackend(0) {}
    Device device() const override { return {}; }
    DeviceQueue* queue() override { return nullptr; }
    Tensor allocate(DType dtype, std::span<const int64_t> shape) override { return allocate_host(dtype, shape); }
};

Tensor filled(Backend& backend, int64_t size, float value) {
    Tensor out = backend.allocate(DType::float32, std::array{size});
    std::fill_n(out.as<float>(), size, value);
    return out;
}

// Three stages of two ranks, in steps of different sizes; some are stopped by one of the stages. A rank waits for the
// stages behind it only while these are full.
template <class MakeBackend>
void hand_on(int num_steps, const MakeBackend& make_backend, bool by_peers = false) {
    constexpr int num_stages = 3, ranks = 2;
    const auto connections = connect_stages({.num_stages = num_stages});
    std::vector<std::shared_ptr<CommunicatorGroup>> groups;
    for (int s = 0; s < num_stages; ++s) groups.push_back(make_in_process_group(ranks, 1));
    using RankBackend = decltype(make_backend(0));
    std::vector<std::unique_ptr<RankBackend>> backends(num_stages * ranks);
    std::vector<std::unique_ptr<StageLink>> links(num_stages * ranks);  // until all have what lies in their outboxes
    rethrow_any(run_ranks(num_stages * ranks, [&](int index) {
        const int stage = index / ranks, rank = index % ranks;
        RankBackend& backend = *(backends[static_cast<size_t>(index)] =
                                     std::unique_ptr<RankBackend>(new RankBackend(make_backend(index))));
        const auto communicator = groups[static_cast<size_t>(stage)]->join(rank, &backend);
        StageLink& link = *(
            links[static_cast<size_t>(index)] = std::make_unique<StageLink>(
                rank == 0 ? connections[static_cast<size_t>(stage)].get() : nullptr, *communicator, backend, by_peers));
        for (int step = 0; step < num_steps; ++step) {
            const int64_t size = 1 + step * step * 37;
            const int stops_at = step % 7 < num_stages ? step % 7 : -1;
            const bool is_last = stage == num_stages - 1;
            Tensor x = filled(backend, size, 1);
            bool stopped = stage > 0 && !link.receive(x);
            CHECK(stopped == (stops_at >= 0 && stops_at < stage));
            CHECK(stopped || x.as<float>()[size - 1] == static_cast<float>(stage > 0 ? step * 10 + stage : 1));
            stopped |= stops_at == stage;
            if (!is_last && stopped) link.stop();
            if (!is_last && !stopped) link.send(filled(backend, size, static_cast<float>(step * 10 + stage + 1)));
        }
    }));
}

TEST(stages_hand_on) {
    const int num_steps = rounds ? rounds : 60;
    hand_on(num_steps, [](int) { return HostBackend(); });
    hand_on(num_steps, [](int index) { return FakeBackend(index); });  // a GPU for each rank
    hand_on(num_steps, [](int index) { return FakeBackend(index); }, true);
}

// A GPU that notes how much was copied between it and memory of the host, and from other places of GPUs.
class CountingBackend : public FakeBackend {
public:
    using FakeBackend::FakeBackend;
    void copy(const TensorView& src, const TensorView& dst) override {
        (src.device() == dst.device() ? by_device : by_host) += src.bytes();
        FakeBackend::copy(src, dst);
    }
    int64_t by_host = 0, by_device = 0;
};

// Between GPUs of a process the residual stream goes from one to the other. A stage may be one step ahead: what it
// hands on lies in memory of its own until the stage behind has it.
TEST(gpus_of_a_process_copy_from_each_other) {
    const auto connections = connect_stages({.num_stages = 2});
    const auto group = make_in_process_group(1, 1);
    const auto communicator = group->join(0, nullptr);
    CountingBackend one(0), other(1);
    StageLink first(connections[0].get(), *communicator, one, true),
        second(connections[1].get(), *communicator, other, true);
    const Tensor x = filled(one, 5, 0), y = filled(other, 5, -1);
    for (int step = 0; step < 3; ++step) {
        std::fill_n(x.as<float>(), 5, static_cast<float>(step));
        first.send(x);
        std::fill_n(x.as<float>(), 5, -2.0f);  // as the next step would
        CHECK(second.receive(y) && std::all_of(y.as<float>(), y.as<float>() + 5, [&](float v) { return v == step; }));
    }
    CHECK(one.by_device == 3 * 5 * 4 && other.by_device == 3 * 5 * 4);
    CHECK(one.by_host == 0 && other.by_host == 3 * 4);  // whether the stage before has stopped
    first.stop();
    CHECK(!second.receive(y));
    first.send(x);
    std::string error;
    std::thread waiting([&] { error = error_of([&] { first.send(x); }); });
    connections[0]->abort();  // while the first one waits until its last step has been taken
    waiting.join();
    CHECK(contains(error, "stage 1 of the pipeline has ended"));
}

// An address is believed between stages of a process alone.
TEST(addresses_from_elsewhere) {
    const auto connections = connect_stages({.num_stages = 2});
    const auto group = make_in_process_group(1, 1);
    const auto communicator = group->join(0, nullptr);
    FakeBackend one(0), other(1);
    const Tensor x = filled(one, 4, 1);
    StageLink first(connections[0].get(), *communicator, one, true), second(connections[1].get(), *communicator, other);
    first.send(x);
    CHECK(contains(error_of([&] { second.receive(x); }), "all stages must be of one version, model and start"));
}

// A stage that is ahead goes on while the one behind has not begun.
TEST(a_stage_does_not_wait_for_the_next) {
    const auto connections = connect_stages({.num_stages = 2});
    const auto group = make_in_process_group(1, 1);
    const auto communicator = group->join(0, nullptr);
    HostBackend backend;
    StageLink first(connections[0].get(), *communicator, backend), second(connections[1].get(), *communicator, backend);
    for (int step = 0; step < 3; ++step) first.send(filled(backend, 4, static_cast<float>(step)));
    const Tensor x = filled(backend, 4, -1);
    for (int step = 0; step < 3; ++step) CHECK(second.receive(x) && *x.as<float>() == static_cast<float>(step));
}

// Each stage has its own dtype: what it receives is rounded once, to nearest even, or widened.
TEST(stages_of_unlike_dtypes) {
    const auto connections = connect_stages({.num_stages = 3});
    const auto group = make_in_process_group(1, 1);
    const auto communicator = group->join(0, nullptr);
    HostBackend backend;
    FakeBackend gpu(0);
    StageLink first(connections[0].get(), *communicator, backend), second(connections[1].get(), *communicator, gpu),
        third(connections[2].get(), *communicator, backend);
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
        const Tensor x = filled(backend, 3, 0), narrow = gpu.allocate(dtype, std::array{int64_t{3}}),
                     wide = filled(backend, 3, 0);
        const float unit = dtype == DType::bfloat16 ? 0x1p-7f : 0x1p-10f;  // between 1 and the next number
        const float values[] = {1 + unit / 2, 1 + unit * 1.5f, -3.0f}, rounded[] = {1, 1 + 2 * unit, -3.0f};
        std::copy_n(values, 3, x.as<float>());
        first.send(x);
        CHECK(second.receive(narrow));
        second.send(narrow);
        CHECK(third.receive(wide) && std::equal(rounded, rounded + 3, wide.as<float>()));
    }
}

TEST(messages_that_are_not_due) {
    const auto group = make_in_process_group(1, 1);
    const auto communicator = group->join(0, nullptr);
    HostBackend backend;
    const Tensor x = filled(backend, 4, 1);
    {
        const auto connections = connect_stages({.num_stages = 2});
        StageLink first(connections[0].get(), *communicator, backend),
            second(connections[1].get(), *communicator, backend);
        first.send(filled(backend, 3, 1));  // of another model
        CHECK(contains(error_of([&] { second.receive(x); }),
                       "expected 4 numbers of step 0, and got 12 bytes of float32 of step 0"));
    }
    {
        const auto connections = connect_stages({.num_stages = 2});
        connections[0]->send(std::as_bytes(std::span("GET /v1/models HTTP/1.1 and so on, longer than a header")));
        StageLink second(connections[1].get(), *communicator, backend);
        CHECK(contains(error_of([&] { second.receive(x); }), "all stages must be of one version, model and start"));
    }
    auto connections = connect_stages({.num_stages = 2});
    StageLink first(connections[0].get(), *communicator, backend), second(connections[1].get(), *communicator, backend);
    connections[0]->abort();
    CHECK(contains(error_of([&] { second.receive(x); }), "stage 0 of the pipeline has ended"));
    CHECK(contains(error_of([&] { first.send(x); }), "stage 1 of the pipeline has ended"));
    CHECK(contains(error_of([&] { connect_stages({.num_stages = 2, .stage = 1}); }), "cannot connect the stages"));
}

}  // namespace
}  // namespace infinilm::test
