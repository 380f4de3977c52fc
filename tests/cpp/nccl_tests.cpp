// The NCCL communicator over the fake NCCL, whose path INFINILM_NCCL_LIBRARY holds: the order of calls, errors, aborts.
// Whether the real one is served rightly only GPUs can tell.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <sstream>

#include "check.h"
#include "dist/in_process.h"
#include "dist/nccl.h"
#include "fake_backend.h"
#include "fake_nccl/fake_nccl.h"
#include "fill.h"

namespace infinilm::test {
namespace {

// What joins a group, and what it joins with.
struct Joined {
    Joined(CommunicatorGroup& group, int rank, void* stream = nullptr,
           std::function<std::unique_ptr<OneShot>()> one_shot = {})
        : backend(rank, stream) {
        backend.one_shot = std::move(one_shot);
        communicator = group.join(rank, &backend);
    }
    Communicator* operator->() { return communicator.get(); }
    TensorView view(void* data, DType dtype, std::initializer_list<int64_t> shape) const {
        return {data, dtype, shape, backend.device()};
    }
    FakeBackend backend;
    std::unique_ptr<Communicator> communicator;
};

struct Fake {
    Fake() {
        void* handle = dlopen(std::getenv("INFINILM_NCCL_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
        CHECK(handle != nullptr);
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
            CHECK(function != nullptr);
        };
        find(fail, "fake_nccl_fail");
        find(log, "fake_nccl_log");
        find(live_comms, "fake_nccl_live_comms");
        find(violations, "fake_nccl_violations");
    }
    decltype(&fake_nccl_fail) fail;
    decltype(&fake_nccl_log) log;
    decltype(&fake_nccl_live_comms) live_comms;
    decltype(&fake_nccl_violations) violations;

    // The calls of one rank since the last look, separated by "; ".
    static std::string calls_of(const std::string& log, int rank) {
        std::string out;
        std::istringstream lines(log);
        for (std::string line; std::getline(lines, line);)
            if (line.starts_with(concat(rank, " "))) out += (out.empty() ? "" : "; ") + line.substr(line.find(' ') + 1);
        return out;
    }
};

TEST(nccl_calls) {
    const Fake fake;
    {
        const auto group = make_nccl_group(3);
        rethrow_any(run_ranks(3, [&](int rank) {
            Joined communicator(*group, rank, reinterpret_cast<void*>(intptr_t{40 + rank}));
            CHECK(communicator->capturable());
            float x[5] = {1, 2, 3, 4, static_cast<float>(rank)};
            communicator->all_reduce(communicator.view(x, DType::float32, {5}));
            CHECK(x[0] == 3 && x[3] == 12 && x[4] == 3);
            uint16_t in[2] = {static_cast<uint16_t>(rank), 7}, out[6] = {};
            communicator->all_gather(communicator.view(in, DType::bfloat16, {2}),
                                     communicator.view(out, DType::bfloat16, {3, 2}));
            for (int r = 0; r < 3; ++r) CHECK(out[2 * r] == r && out[2 * r + 1] == 7);
            communicator->barrier();
            int32_t ids[2] = {rank, rank};
            communicator->broadcast(communicator.view(ids, DType::int32, {2}), 1);
            CHECK(ids[0] == 1 && ids[1] == 1);
            communicator->all_reduce(communicator.view(ids, DType::int32, {2}));
            CHECK(ids[0] == 3 && ids[1] == 3);
            communicator->check();
        }));
        CHECK(contains(error_of([&] { group->join(1, nullptr); }), "rank 1 has joined its group already"));
        CHECK(contains(error_of([&] { group->join(3, nullptr); }), "rank 3 cannot join"));
    }
    const std::string log = fake.log();
    CHECK(Fake::calls_of(log, -1) == "ncclGetUniqueId");
    for (int rank = 0; rank < 3; ++rank)
        CHECK(Fake::calls_of(log, rank) ==
              concat("ncclCommInitRankConfig size=3 blocking=0; ncclGroupEnd transfers=6 bytes=32 stream=", 40 + rank,
                     "; ncclAllGather count=8 type=7; ncclAllGather count=2 type=9; ncclBroadcast count=2 type=2 "
                     "root=1; ncclAllReduce count=2 type=2 op=0 stream=",
                     40 + rank, "; ncclCommFinalize; ncclCommDestroy"));
    CHECK(fake.live_comms() == 0);
    CHECK(fake.violations() == 0);
}

void check_sums(CommunicatorGroup& group, CommunicatorGroup& host, int rank, uint32_t seed) {
    Joined communicator(group, rank);
    const auto expected = host.join(rank, nullptr);
    for (DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::int32})
        for (int64_t n : {0, 1, 7, 64, 128, 111, 989, 840, 5040, 100003})
            for (int64_t offset : {0, 3}) {  // elements, from 16 bytes
                const int64_t begin = offset * size_bytes(dtype), bytes = begin + n * size_bytes(dtype) + 64;
                const Tensor x = allocate_host(DType::uint8, {bytes}), y = allocate_host(DType::uint8, {bytes});
                std::memset(x.data(), 0xA5, static_cast<size_t>(bytes));
                fill(dtype, x.as<std::byte>() + begin, n, seed + static_cast<uint32_t>(8 * n + rank));
                std::memcpy(y.data(), x.data(), static_cast<size_t>(bytes));
                communicator->all_reduce(communicator.view(x.as<std::byte>() + begin, dtype, {n}));
                expected->all_reduce({y.as<std::byte>() + begin, dtype, {n}});
                CHECK(std::memcmp(x.data(), y.data(), static_cast<size_t>(bytes)) == 0);
            }
}

// The bits of ranks in one process, for every number of ranks, dtype and size of message.
TEST(nccl_sums) {
    const Fake fake;
    std::mt19937 random(std::random_device{}());
    for (int size = 1; size <= 8; ++size) {
        const auto group = make_nccl_group(size), host = make_in_process_group(size);
        const auto seed = static_cast<uint32_t>(random());
        rethrow_any(run_ranks(size, [&](int rank) {
            try {
                check_sums(*group, *host, rank, seed);
            } catch (...) {  // the others would wait for this one
                group->abort(std::current_exception());
                host->abort(std::current_exception());
                throw;
            }
        }));
    }
    CHECK(fake.violations() == 0);
}

// A rank that never comes to a sum, of which the others wait for the parts or for the sums.
TEST(nccl_aborts_in_a_sum) {
    const Fake fake;
    for (const char* last : {"ncclSend", "ncclAllGather"}) {
        std::vector<float> x[3];  // as long as the group
        auto group = make_nccl_group(3);
        const auto errors = run_ranks(3, [&](int rank) {
            Joined communicator(*group, rank);
            x[rank].resize(100);
            try {
                if (rank == 2) fake.fail(last, 2, 5);
                communicator->all_reduce(communicator.view(x[rank].data(), DType::float32, {100}));
            } catch (...) {
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
                group->abort(std::current_exception());
                throw;
            }
        });
        fake.fail(last, 2, 0);
        CHECK(is<DeviceError>(errors[2]));
        CHECK(contains(message(errors[2]), last));
        for (int rank : {0, 1}) CHECK(message(errors[rank]) == "the ranks have stopped: " + message(errors[2]));
        group.reset();
        CHECK(fake.live_comms() == 0);
        CHECK(fake.violations() == 0);
    }
}

// A kernel that waits for the other ranks, as the stream does whom its rank waits for.
class WaitingOneShot final : public OneShot {
public:
    WaitingOneShot(std::atomic<int>& calls, bool reached) : calls_(calls), reached_(reached) { ++alive; }
    ~WaitingOneShot() override { --alive; }
    static inline std::atomic<int> alive{0};
    void* mailbox() const override { return const_cast<std::atomic<bool>*>(&aborted_); }
    void connect(std::span<void* const> mailboxes) override {
        CHECK(std::ranges::find(mailboxes, mailbox()) != mailboxes.end());
    }
    void send_proof() override {}
    bool has_proof() override { return reached_; }
    bool takes(const AddRmsNormParams& p) const override { return p.x.shape(0) < 3; }
    void all_reduce_add_rms_norm(const AddRmsNormParams&) override {
        calls_.fetch_add(1);
        while (!aborted_) std::this_thread::yield();
    }
    void abort() noexcept override {
        aborted_ = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the rank goes on before the group's abort does
    }
    void wait() noexcept override {
        while (!aborted_) std::this_thread::yield();
    }

private:
    std::atomic<int>& calls_;
    const bool reached_;  // by what its peers write
    std::atomic<bool> aborted_{false};
};

// Ranks in a one-shot sum leave it when another one fails; where one rank cannot have them, or is not reached, none
// uses them, and their mailboxes are freed.
TEST(nccl_one_shot) {
    const Fake fake;
    for (const bool all_can : {true, false})
        for (const bool all_reached : {true, false}) {
            std::atomic<int> calls{0};
            const int num_calls = all_can && all_reached ? 2 : 0, num_left = all_can && all_reached ? 3 : 0;
            std::vector<float> data[3];
            auto group = make_nccl_group(3);
            const auto errors = run_ranks(3, [&](int rank) {
                const bool can = all_can || rank != 1;
                Joined communicator(*group, rank, nullptr, [&]() -> std::unique_ptr<OneShot> {
                    return can ? std::make_unique<WaitingOneShot>(calls, all_reached || rank != 0) : nullptr;
                });
                data[rank].resize(64);
                const TensorView x = communicator.view(data[rank].data(), DType::float32, {2, 8}),
                                 weight = x.select(0, 0);
                try {
                    if (rank == 2) {
                        while (calls < num_calls) {  // the others are in the sum
                            communicator->check();
                            std::this_thread::yield();
                        }
                        throw DeviceError("a fault");
                    }
                    communicator->all_reduce_add_rms_norm(
                        communicator.backend, {.x = x, .residual = x, .weight = weight, .out = x, .eps = 0});
                    communicator->check();
                } catch (...) {
                    group->abort(std::current_exception());
                    throw;
                }
            });
            for (size_t rank : {0, 1}) CHECK(message(errors[rank]) == "the ranks have stopped: a fault");
            CHECK(is<DeviceError>(errors[2]));
            CHECK(calls == num_calls);
            CHECK(WaitingOneShot::alive == num_left);
            group.reset();
            CHECK(WaitingOneShot::alive == 0);
            CHECK(fake.live_comms() == 0);
            CHECK(fake.violations() == 0);
        }
}

// Every function that can fail, on rank 1 of 2; rank 0 waits until rank 1's owner aborts.
TEST(nccl_errors) {
    const Fake fake;
    const auto run = [&](const char* function, int result) {
        float x[2][4] = {};
        auto group = make_nccl_group(2);
        const std::vector<std::exception_ptr> errors = run_ranks(2, [&](int rank) {
            try {
                if (rank == 1 && std::string(function) != "async") fake.fail(function, rank, result);
                Joined communicator(*group, rank);
                communicator->all_reduce(communicator.view(x[rank], DType::float32, {4}));
                communicator->barrier();
                if (rank == 1) fake.fail(function, rank, result);
                if (rank == 1) communicator->check();
                communicator->barrier();
            } catch (...) {
                group->abort(std::current_exception());
                throw;
            }
        });
        fake.fail(function, 1, 0);
        CHECK(message(errors[0]) == "the ranks have stopped: " + message(errors[1]));
        CHECK(is<DeviceError>(errors[1]));
        CHECK(is<EngineDeadError>(errors[0]));
        group.reset();
        CHECK(fake.live_comms() == 0);
        return message(errors[1]);
    };
    CHECK(contains(run("ncclCommInitRankConfig", 2),
                   "ncclCommInitRankConfig on rank 1 failed: some error (the detail);"));
    CHECK(contains(run("ncclCommGetAsyncError", 3), "ncclCommInitRankConfig on rank 1 failed: some error"));
    for (const char* function : {"ncclSend", "ncclRecv", "ncclGroupEnd"})
        CHECK(contains(run(function, 5),
                       "ncclSend and ncclRecv on rank 1 failed: some error (the detail); NCCL_DEBUG=WARN"));
    CHECK(contains(run("ncclAllGather", 5), "ncclAllGather on rank 1 failed: some error"));
    CHECK(contains(run("async", 6), "an operation of NCCL on rank 1 failed: remote process exited"));
    fake.fail("ncclGetUniqueId", -1, 2);
    CHECK(contains(error_of([] { make_nccl_group(2); }), "ncclGetUniqueId failed: some error"));
    CHECK(fake.violations() == 0);
}

// Aborts at random moments: while joining, in a collective of which a rank is missing, between two.
TEST(nccl_aborts) {
    const Fake fake;
    std::mt19937 random(std::random_device{}());
    for (int round = 0; round < (rounds ? rounds : 200); ++round) {
        const int size = 2 + static_cast<int>(random() % 3);
        const int late_rank =
            static_cast<int>(random() % static_cast<uint32_t>(size + 1));  // never joins, if it is one
        const auto patience = std::chrono::microseconds(random() % 2000);
        std::vector<std::vector<float>> x(static_cast<size_t>(size), std::vector<float>(100));
        auto group = make_nccl_group(size);
        std::thread other([&] {
            std::this_thread::sleep_for(patience);
            group->abort(std::make_exception_ptr(Error("stopped from outside")));
        });
        const auto errors = run_ranks(size, [&](int rank) {
            if (rank == late_rank) throw EngineDeadError("the ranks have stopped: stopped from outside");
            Joined communicator(*group, rank);
            for (;;) {
                communicator->all_reduce(communicator.view(x[static_cast<size_t>(rank)].data(), DType::float32, {100}));
                communicator->check();
            }
        });
        other.join();
        for (const auto& error : errors) {
            CHECK(message(error) == "the ranks have stopped: stopped from outside");
            CHECK(is<EngineDeadError>(error));
        }
        group.reset();
        const std::string log = fake.log();
        for (int rank = 0; rank < size; ++rank) {
            const std::string calls = Fake::calls_of(log, rank);
            CHECK(calls.empty() || calls.ends_with("ncclCommAbort"));
            CHECK(calls.find("ncclCommAbort") == calls.rfind("ncclCommAbort"));  // once
        }
        CHECK(fake.live_comms() == 0);
        CHECK(fake.violations() == 0);
    }
}

// Prints why the library cannot be used; the caller chooses one that cannot.
TEST(nccl_library_error) {
    std::printf("%s\n", error_of([] { make_nccl_group(2); }).c_str());
}

}  // namespace
}  // namespace infinilm::test
