// The in-process communicator: results against a serial sum in rank order, bit for bit; arguments; mismatches.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "check.h"
#include "dist/in_process.h"
#include "fake_backend.h"
#include "fill.h"

namespace infinilm::test {
namespace {

constexpr int sizes[] = {1, 2, 3, 4, 8};
// Empty, tiny, odd, around the longest message that goes through the mail, and long.
constexpr int64_t lengths[] = {0, 1, 7, 64, 989, 1024, 1025, 2048, 2049, 4096, 4097, 100003};
constexpr std::byte poison{0xA5};

enum class Op { all_reduce, all_gather, broadcast, barrier };

struct Step {
    Op op;
    DType dtype;
    int64_t numel;
    int root;
    int64_t offset;  // in elements, of the tensor in its memory
    uint32_t seed;
};

Step random_step(std::mt19937& random, int size) {
    const DType all[] = {DType::float32, DType::bfloat16, DType::float16, DType::int32, DType::int64, DType::uint8};
    Step step{};
    step.op = static_cast<Op>(random() % 4);
    step.dtype = all[random() % (step.op == Op::all_reduce ? 4 : 6)];
    step.numel = lengths[random() % std::size(lengths)];
    if (random() % 4 == 0) step.numel = static_cast<int64_t>(random() % 40000);
    step.root = static_cast<int>(random() % static_cast<uint32_t>(size));
    step.offset = static_cast<int64_t>(random() % 5);
    step.seed = static_cast<uint32_t>(random());
    return step;
}

using Bytes = std::vector<std::byte>;

Bytes contribution(const Step& step, int rank) {
    Bytes out(static_cast<size_t>(step.numel * size_bytes(step.dtype)));
    fill(step.dtype, out.data(), step.numel, step.seed * 31 + static_cast<uint32_t>(rank));
    return out;
}

template <class T>
void add_serially(const std::vector<Bytes>& parts, Bytes& out) {
    for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
        const auto at = [&](size_t rank) { return reinterpret_cast<const T*>(parts[rank].data())[i]; };
        if constexpr (std::is_same_v<T, int32_t>) {
            uint32_t sum = 0;
            for (size_t r = 0; r < parts.size(); ++r) sum += static_cast<uint32_t>(at(r));
            reinterpret_cast<uint32_t*>(out.data())[i] = sum;
        } else {
            float sum = to_float(at(0));
            for (size_t r = 1; r < parts.size(); ++r) sum = sum + to_float(at(r));
            reinterpret_cast<T*>(out.data())[i] = from_float<T>(sum);
        }
    }
}

Bytes expected_sum(const Step& step, int size) {
    std::vector<Bytes> parts;
    for (int r = 0; r < size; ++r) parts.push_back(contribution(step, r));
    Bytes out(parts[0].size());
    if (step.dtype == DType::int32)
        add_serially<int32_t>(parts, out);
    else
        visit_floating(step.dtype, [&]<class T>(T) { add_serially<T>(parts, out); });
    return out;
}

// A tensor inside poisoned memory.
struct Guarded {
    Guarded(const Step& step, int64_t numel) : step(step), numel(numel) {
        memory.assign(static_cast<size_t>((numel + 2 * margin) * size_bytes(step.dtype)), poison);
    }
    std::byte* data() { return memory.data() + (margin + step.offset) * size_bytes(step.dtype); }
    TensorView view(std::initializer_list<int64_t> shape) { return {data(), step.dtype, shape}; }
    bool untouched_around() {
        const std::byte *begin = data(), *end = begin + numel * size_bytes(step.dtype);
        for (const std::byte* p = memory.data(); p < memory.data() + memory.size(); ++p)
            if ((p < begin || p >= end) && *p != poison) return false;
        return true;
    }
    static constexpr int64_t margin = 16;
    Step step;
    int64_t numel;
    Bytes memory;
};

void run_step(Communicator& communicator, const Step& step) {
    const int rank = communicator.rank(), size = communicator.size();
    const Bytes mine = contribution(step, rank);
    const auto same = [](const void* a, const Bytes& b) {
        return b.empty() || std::memcmp(a, b.data(), b.size()) == 0;
    };
    const auto put = [&](std::byte* to, const Bytes& from) { std::copy(from.begin(), from.end(), to); };
    switch (step.op) {
        case Op::all_reduce: {
            Guarded x(step, step.numel);
            put(x.data(), mine);
            communicator.all_reduce(x.view({step.numel}));
            CHECK(same(x.data(), expected_sum(step, size)) && x.untouched_around());
            break;
        }
        case Op::all_gather: {
            Guarded out(step, size * step.numel);
            const bool in_place = step.seed & 1;
            std::byte* part = out.data() + static_cast<size_t>(rank) * mine.size();
            if (in_place) put(part, mine);
            const TensorView in(in_place ? part : const_cast<std::byte*>(mine.data()), step.dtype, {step.numel});
            communicator.all_gather(in, step.seed & 2 ? out.view({size, step.numel}) : out.view({size * step.numel}));
            for (int r = 0; r < size; ++r)
                CHECK(same(out.data() + static_cast<size_t>(r) * mine.size(), contribution(step, r)));
            CHECK(out.untouched_around());
            break;
        }
        case Op::broadcast: {
            Guarded x(step, step.numel);
            if (rank == step.root) put(x.data(), mine);
            communicator.broadcast(x.view({step.numel}), step.root);
            CHECK(same(x.data(), contribution(step, step.root)) && x.untouched_around());
            break;
        }
        case Op::barrier: communicator.barrier(); break;
    }
}

TEST(random_schedules) {
    for (int size : sizes) {
        const uint32_t seed = std::random_device()();
        std::printf("%d ranks: seed %u\n", size, seed);
        const auto group = make_in_process_group(size);
        rethrow_any(run_ranks(size, [&](int rank) {
            const auto communicator = group->join(rank, nullptr);
            std::mt19937 random(seed);  // the same schedule on every rank
            try {
                for (int i = 0; i < (rounds ? rounds : 150); ++i) run_step(*communicator, random_step(random, size));
            } catch (...) {
                group->abort(std::current_exception());
                throw;
            }
        }));
    }
}

// A barrier holds back until the last rank: no rank sees a counter that lacks one.
TEST(barriers) {
    for (int size : sizes) {
        const auto group = make_in_process_group(size);
        std::atomic<int> entered{0};
        rethrow_any(run_ranks(size, [&](int rank) {
            const auto communicator = group->join(rank, nullptr);
            for (int i = 1; i <= (rounds ? rounds : 2000); ++i) {
                entered.fetch_add(1);
                communicator->barrier();
                CHECK(entered.load() == i * size);
                communicator->barrier();
            }
        }));
    }
}

TEST(arguments) {
    const auto group = make_in_process_group(2);
    const auto communicator = group->join(0, nullptr);
    float data[64] = {};
    const TensorView x(data, DType::float32, {4, 8});
    const auto reduce = [&](TensorView view) { return error_of([&] { communicator->all_reduce(view); }); };
    CHECK(contains(reduce(x.slice(1, 0, 3)), "all_reduce: x: expected a contiguous tensor, got shape [4, 3] with "));
    CHECK(contains(reduce({data, DType::int64, {4}}), "expected float32, bfloat16, float16 or int32, got int64"));
    CHECK(contains(reduce({nullptr, DType::float32, {4}}), "x: tensor is missing"));
    CHECK(contains(reduce({data, DType::float32, {4}, Device{DeviceKind::cuda, 1}}),
                   "a tensor is on cuda:1, but rank 0 joined its group without a backend"));
    FakeBackend backend(0);
    CHECK(contains(error_of([&] { communicator->all_reduce_add_rms_norm(backend, {x.slice(1, 0, 3), x, x, x, 0}); }),
                   "all_reduce_add_rms_norm: x: expected a contiguous tensor"));
    const auto gather = [&](TensorView in, TensorView out) {
        return error_of([&] { communicator->all_gather(in, out); });
    };
    CHECK(contains(gather(x.slice(0, 0, 1), x), "expected [2, ...] for in of shape [1, 8] and 2 ranks, got [4, 8]"));
    CHECK(contains(gather(x, {data, DType::int32, {2, 4, 8}}), "out: expected float32 as in, got int32"));
    CHECK(
        contains(gather(x, {data, DType::float32, {8, 8}, Device{DeviceKind::cuda, 0}}), "expected device cpu as in"));
    CHECK(contains(error_of([&] { communicator->broadcast(x, 2); }), "broadcast: root must be in 0..1, got 2"));
    CHECK(contains(error_of([&] { group->join(0, nullptr); }), "rank 0 has joined its group already"));
    CHECK(contains(error_of([&] { group->join(2, nullptr); }), "rank 2 cannot join a group of 2 ranks"));
    CHECK(contains(error_of([&] { make_in_process_group(0); }), "at least 1 rank, got 0"));
}

TEST(mismatches) {
    const auto texts = [](auto call) {
        const auto group = make_in_process_group(3);
        const auto errors = run_ranks(3, [&](int rank) { call(*group->join(rank, nullptr)); });
        for (const auto& error : errors) {
            CHECK(message(error) == message(errors[0]));
            CHECK(is<EngineDeadError>(error));
        }
        return message(errors[0]);
    };
    std::vector<float> data(3 * 40000);  // one tensor for all: nothing may touch it
    const auto view = [&](DType dtype, std::initializer_list<int64_t> shape) {
        return TensorView(data.data(), dtype, shape);
    };
    for (int i = 0; i < (rounds ? rounds : 20); ++i) {
        CHECK(contains(
            texts([&](Communicator& c) {
                if (c.rank() == 1) return c.barrier();
                c.all_reduce(view(DType::float32, {3, 7}));
            }),
            "different collectives: rank 0: all_reduce of [3, 7] float32; rank 1: barrier; rank 2: all_reduce"));
        CHECK(contains(texts([&](Communicator& c) { c.all_reduce(view(DType::float32, {c.rank() == 2 ? 40000 : 8})); }),
                       "rank 1: all_reduce of [8] float32; rank 2: all_reduce of [40000] float32"));
        CHECK(contains(
            texts([&](Communicator& c) { c.all_reduce(view(c.rank() ? DType::int32 : DType::float32, {40000})); }),
            "rank 0: all_reduce of [40000] float32; rank 1: all_reduce of [40000] int32"));
        CHECK(contains(texts([&](Communicator& c) { c.broadcast(view(DType::float32, {8}), c.rank() / 2); }),
                       "rank 1: broadcast of [8] float32 from rank 0; rank 2: broadcast of [8] float32 from rank 1"));
        CHECK(contains(texts([&](Communicator& c) {
                           const int64_t n = c.rank() ? 8 : 9;
                           c.all_gather(view(DType::float32, {n}), view(DType::float32, {3, n}));
                       }),
                       "rank 0: all_gather of [9] float32; rank 1: all_gather of [8] float32"));
    }
    for (float value : data) CHECK(value == 0);
}

}  // namespace
}  // namespace infinilm::test
