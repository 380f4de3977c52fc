// InferEngine's joint paths: steps that are aborted, ranks that fail, close, all at any time. The backend computes
// nothing: it counts, and calls what the test wants to happen inside a step.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "check.h"
#include "core/sum_parts.h"
#include "cpu/cpu_backend.h"
#include "engine/infer_engine.h"
#include "fake_backend.h"
#include "model/step_abort.h"

namespace infinilm::test {
namespace {

std::atomic<int> backends{0};                     // that there are
std::function<void(int attention)> on_attention;  // called by each rank, with how many it has computed in this engine
std::function<void(int rank)> on_arrival;  // where there is one, backends have queues: called by who waits for one

struct FakeLinear final : PreparedLinear {};

struct FakeArrival final : Arrival {
    bool done() noexcept override { return true; }
    Tensor take() override {
        on_arrival(rank);
        return sampled;
    }
    int rank = 0;
    Tensor sampled;
};

class FakeCpu final : public FakeBackend {
public:
    FakeCpu() : FakeBackend(0) { arrival_.rank = backends++; }
    ~FakeCpu() override { --backends; }

    Device device() const override { return {}; }
    DeviceQueue* queue() override { return on_arrival ? this : nullptr; }
    std::vector<TensorView> upload(Upload, std::span<const TensorView> arrays) override {
        uploaded_.clear();
        for (const TensorView& array : arrays) {
            uploaded_.push_back(array ? allocate_host(array.dtype(), array.shape()) : Tensor());
            if (array) copy(array, uploaded_.back());
        }
        return {uploaded_.begin(), uploaded_.end()};
    }
    Arrival& fetch(const TensorView& sampled) override {
        if (sampled)
            arrival_.sampled = allocate_host(sampled.dtype(), sampled.shape()), copy(sampled, arrival_.sampled);
        return arrival_;
    }
    Tensor allocate(DType dtype, std::span<const int64_t> shape) override { return allocate_host(dtype, shape); }
    void copy(const TensorView& src, const TensorView& dst) override {
        if (src.is_contiguous() && dst.is_contiguous()) return FakeBackend::copy(src, dst);
        for (int64_t row = 0; row < src.shape(0); ++row) copy(src.select(0, row), dst.select(0, row));
    }
    std::unique_ptr<PreparedLinear> prepare_linear(std::vector<LinearPart> parts, LinearKind kind, int,
                                                   Quantization) override {
        auto out = std::make_unique<FakeLinear>();
        out->kind = kind;
        out->in_features = parts[0].weight.shape(1);
        for (const LinearPart& part : parts) out->out_features += part.weight.shape(0);
        if (kind == LinearKind::act_mul) out->out_features /= 2;
        return out;
    }
    Tensor prepare_vector(const Tensor& vector) override { return vector; }
    void fill_random(const TensorView&, uint64_t) override {}
    void embedding(const EmbeddingParams& p) override { fill(p.out); }
    void rms_norm(const RmsNormParams& p) override { fill(p.out); }
    void add_rms_norm(const AddRmsNormParams& p) override { fill(p.out); }
    void linear(const LinearParams& p) override { fill(p.out); }
    void linear_rope_store_kv(const LinearParams& p, const RopeStoreParams&) override { fill(p.out); }
    void rope_table(const RopeTableParams&) override {}
    void qk_norm_rope_store_kv(const RopeStoreParams&) override {}
    void paged_attention(const AttentionParams& p) override {
        fill(p.out);
        if (on_attention) on_attention(count_++);
    }
    void gather_rows(const GatherRowsParams& p) override { fill(p.out); }
    void find_best(const FindBestParams& p) override {
        check_mask(p.mask);
        std::memset(p.ids.data(), 0, 4);
    }
    void sample(const SampleParams& p) override {
        check_mask(p.mask);
        for (int64_t i = 0; i < p.ids.shape(0); ++i) p.ids.as<int32_t>()[i] = 7;
    }

private:
    // The steps of step_with_mask(): complete when they are looked at.
    static void check_mask(const AllowedTokens& mask) { CHECK(!mask.allowed || mask.words(0)[0] == 1); }
    static void fill(const TensorView& out) {  // every row is written: ThreadSanitizer sees who else does
        for (int64_t row = 0; row < out.shape(0); ++row) *out.select(0, row).as<float>() = 1;
    }
    int count_ = 0;
    FakeArrival arrival_;
    std::vector<Tensor> uploaded_;
};

constexpr int num_layers = 6;

ModelSpec spec() {
    ModelSpec s;
    s.dtype = DType::float32;
    s.vocab_size = 32;
    s.hidden_size = 16;
    s.num_layers = num_layers;
    s.max_model_len = 64;
    s.rms_norm_eps = 1e-5f;
    AttentionSpec attention;
    attention.num_heads = attention.num_kv_heads = attention.head_dim = 4;
    attention.rope = 0;
    MlpSpec mlp;
    mlp.intermediate_size = 32;
    LayerSpec layer;
    layer.mixer = attention;
    layer.mlp = mlp;
    s.layers.assign(num_layers, layer);
    s.ropes.resize(1);
    s.ropes[0].inv_freq = {1.0f, 0.1f};
    return s;
}

EngineOptions options(int ranks, int stages = 1) {
    EngineOptions out;
    out.devices.resize(static_cast<size_t>(ranks * stages));
    out.num_threads = ranks;
    out.pipeline.num_stages = stages;
    return out;
}

std::unique_ptr<InferEngine> make_engine(int ranks, int stages = 1) {
    on_attention = nullptr;
    auto engine = std::make_unique<InferEngine>(spec(), options(ranks, stages));
    engine->load_dummy(DType::float32, 0);
    engine->finish_loading();
    engine->reset_cache({.num_blocks = 8, .block_size = 16});
    return engine;
}

template <class T>
Tensor array(DType dtype, std::initializer_list<T> values, std::initializer_list<int64_t> shape = {}) {
    const int64_t size = static_cast<int64_t>(values.size());
    Tensor out = shape.size() ? allocate_host(dtype, shape) : allocate_host(dtype, {size});
    std::copy(values.begin(), values.end(), out.as<T>());
    return out;
}

Batch step_of_three() {
    Batch b;
    b.input_ids = array<int32_t>(DType::int32, {1, 2, 3});
    b.positions = array<int32_t>(DType::int32, {0, 1, 2});
    b.slot_mapping = array<int64_t>(DType::int64, {0, 1, 2}, {1, 3});
    b.block_table = array<int32_t>(DType::int32, {0}, {1, 1, 1});
    b.cu_seqlens_q = array<int32_t>(DType::int32, {0, 3});
    b.context_lens = array<int32_t>(DType::int32, {3});
    b.logits_rows = array<int32_t>(DType::int32, {2});
    b.temperature = array<float>(DType::float32, {0});
    b.top_k = array<int32_t>(DType::int32, {0});
    b.top_p = array<float>(DType::float32, {1});
    b.min_p = array<float>(DType::float32, {0});
    b.random_val = array<float>(DType::float32, {0});
    return b;
}

Batch step_with_mask() {  // which is not there yet
    Batch b = step_of_three();
    b.allowed = array<int32_t>(DType::int32, {0}, {1, 1});
    b.allowed_row = array<int32_t>(DType::int32, {0});
    return b;
}

void check_done(const StepOutput& output) {
    CHECK(!output.aborted && output.sampled && output.sampled.as<int32_t>()[0] == 7);
}

TEST(all_ranks_stop_at_the_same_piece) {
    for (int round = 0; round < (rounds ? rounds : 1500); ++round) {
        constexpr uint32_t pieces = 20;
        const int size = 1 + round % 4;
        StepAbort abort;
        std::vector<uint32_t> done(static_cast<size_t>(size));
        std::vector<std::exception_ptr> errors = run_ranks(size + 1, [&](int rank) {
            if (rank == size) {
                for (int i = 0; i < round % 50; ++i) std::this_thread::yield();
                return abort.request();
            }
            try {
                for (uint32_t& piece = done[static_cast<size_t>(rank)]; piece < pieces; ++piece) {
                    abort.begin(piece);
                    if ((round + rank) % 3 == 0) std::this_thread::yield();
                }
            } catch (const StepAborted&) {
            }
        });
        rethrow_any(errors);
        for (uint32_t d : done) CHECK(d == done[0]);
    }
    StepAbort abort;
    abort.begin(0);
    abort.begin(1);
    abort.request();
    abort.request();
    abort.begin(0);  // one who is behind comes as far as the first
    abort.begin(1);
    bool stopped = false;
    try {
        abort.begin(2);
    } catch (const StepAborted&) {
        stopped = true;
    }
    CHECK(stopped);
}

// Aborted in the middle: no layer is begun after the one that runs, the steps behind run, and the engine is as it was.
TEST(an_aborted_step_leaves_the_engine_usable) {
    for (int ranks : {1, 2, 4}) {
        const auto engine = make_engine(ranks);
        const Batch batch = step_of_three();
        for (int layer = 0; layer < num_layers; ++layer) {
            check_done(engine->forward(batch));
            const auto abort = std::make_shared<StepAbort>();
            std::atomic<int> attentions{0}, first{-1};
            on_attention = [&](int count) {
                int none = -1;
                first.compare_exchange_strong(none, count);
                if (count - first == layer) abort->request();
                ++attentions;
            };
            auto aborted = engine->submit(batch, abort);
            const StepOutput output = aborted.get();
            on_attention = nullptr;
            CHECK(output.aborted && !output.sampled && !output.logits);
            // Ranks may be a layer apart at most: each waits for the others twice in one.
            CHECK(attentions == ranks * (layer + 1) || (ranks > 1 && attentions <= ranks * (layer + 2)));
            check_done(engine->forward(batch));
        }
    }
    // Before it begins: behind one that runs.
    for (const auto& [ranks, stages] : {std::pair(1, 1), {2, 1}, {4, 1}, {1, 3}, {2, 2}}) {
        const auto engine = make_engine(ranks, stages);
        const Batch batch = step_of_three();
        const auto abort = std::make_shared<StepAbort>();
        abort->request();
        auto first = engine->submit(batch), second = engine->submit(batch, abort), third = engine->submit(batch);
        check_done(first.get());
        CHECK(second.get().aborted);
        check_done(third.get());
    }
}

// The device of a rank fails behind all that the host has to do for a step, while those of the others wait for it: they
// are told, though no rank comes to another step.
TEST(a_device_that_fails_behind_the_host) {
    std::atomic<bool> failed{false};
    std::atomic<InferEngine*> engine{nullptr};
    std::atomic<bool> told{false};
    const Batch batch = step_of_three();
    on_arrival = [](int) {};
    const auto owner = make_engine(2);
    engine = owner.get();
    check_done(owner->forward(batch));
    on_arrival = [&](int rank) {
        if (rank == 1) {
            failed = true;
            throw DeviceError("a fault of the device");
        }
        const auto dead = [&] { return contains(error_of([&] { engine.load()->submit(batch); }), "a fault").holds; };
        for (int i = 0; i < 60'000 && !(failed && dead()); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        told = failed && dead();
    };
    CHECK(contains(error_of([&] { owner->forward(batch); }), "a fault of the device"));
    CHECK(told);
    owner->close();
    on_arrival = nullptr;
}

// The first of two stages begins with a step while the second one is at the step before.
TEST(stages_compute_at_once) {
    const auto engine = make_engine(1, 2);
    std::atomic<int> attentions_of_first{0};
    std::atomic<bool> waited{false};
    on_attention = [&](int) {
        char name[16] = {};
        pthread_getname_np(pthread_self(), name, sizeof(name));
        if (std::string(name) == "infinilm-rank0") {
            ++attentions_of_first;
        } else if (!waited.exchange(true)) {
            for (int i = 0; attentions_of_first <= num_layers / 2 && i < 60'000; ++i)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            CHECK(attentions_of_first > num_layers / 2);
        }
    };
    const Batch batch = step_of_three();
    std::vector<std::future<StepOutput>> steps;
    for (int i = 0; i < 3; ++i) steps.push_back(engine->submit(batch));
    for (auto& step : steps) check_done(step.get());
    on_attention = nullptr;
    CHECK(waited);
}

TEST(engine_aborted_closed_and_failed_anytime) {
    uint32_t state = 1;
    const auto random = [&state](uint32_t n) { return (state = state * 1664525u + 1013904223u) / 65536 % n; };
    for (int round = 0; round < (rounds ? rounds : 300); ++round) {
        const int stages = 1 + static_cast<int>(random(3)), ranks = 1 << random(3 - (stages > 1));
        const int how = static_cast<int>(random(3));
        const bool several = ranks * stages > 1;
        const auto engine = make_engine(ranks, stages);
        const Batch batch = step_of_three();
        const int fails_at = how == 2 ? static_cast<int>(random(40)) : -1;
        std::atomic<int> left{fails_at};
        on_attention = [&](int) {
            if (fails_at >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
        };
        std::vector<std::shared_ptr<StepAbort>> aborts;
        for (int i = 0; i < 5; ++i) aborts.push_back(std::make_shared<StepAbort>());
        const uint32_t pause = random(300);
        rethrow_any(run_ranks(3, [&](int thread) {
            if (thread == 0) {
                try {
                    std::vector<std::future<StepOutput>> steps;
                    for (const auto& abort : aborts) steps.push_back(engine->submit(batch, abort));
                    for (auto& step : steps) {
                        try {
                            const StepOutput output = step.get();
                            if (!output.aborted) check_done(output);
                        } catch (const EngineDeadError&) {
                            CHECK(several && how == 2);
                        } catch (const std::bad_alloc&) {
                            CHECK(!several && how == 2);
                        }
                    }
                } catch (const EngineDeadError&) {  // closed, or a rank has failed
                    CHECK(how != 0);
                }
            } else if (thread == 1) {
                std::this_thread::sleep_for(std::chrono::microseconds(pause));
                for (size_t i = 0; i < aborts.size(); i += 1 + pause % 2) aborts[i]->request();
            } else if (how == 1) {
                std::this_thread::sleep_for(std::chrono::microseconds(2 * pause));
                engine->close();
            }
        }));
        on_attention = nullptr;
        if (how == 0) check_done(engine->forward(batch));
        engine->close();
        CHECK(backends == 0);
        CHECK(contains(error_of([&] { engine->forward(batch); }), "the engine is closed"));
    }
}

// Masks that are given, or never, while steps are aborted, the engine is closed, or a rank fails: no thread
// waits for ever, no rank samples before they are there, and ranks agree.
TEST(late_masks_given_aborted_closed_and_failed_anytime) {
    uint32_t state = 1;
    const auto random = [&state](uint32_t n) { return (state = state * 1664525u + 1013904223u) / 65536 % n; };
    int num_done = 0, num_aborted = 0;
    for (int round = 0; round < (rounds ? rounds : 200); ++round) {
        const int stages = 1 + static_cast<int>(random(3)), ranks = 1 << random(3 - (stages > 1));
        const int how = static_cast<int>(random(4));
        const bool several = ranks * stages > 1;
        const auto engine = make_engine(ranks, stages);
        std::atomic<int> left{how == 2 ? static_cast<int>(random(20)) : -1};
        on_attention = [&](int) {
            if (how == 2 && left.fetch_sub(1) == 0) throw std::bad_alloc();
        };
        constexpr size_t num_steps = 3;
        std::vector<Batch> batches;
        std::vector<std::shared_ptr<StepAbort>> aborts;
        std::vector<std::shared_ptr<LateMasks>> masks;
        std::vector<std::future<StepOutput>> steps;
        for (size_t i = 0; i < num_steps; ++i) {
            batches.push_back(step_with_mask());
            aborts.push_back(std::make_shared<StepAbort>());
            masks.push_back(std::make_shared<LateMasks>());
        }
        for (size_t i = 0; i < num_steps; ++i) {
            try {
                steps.push_back(engine->submit(batches[i], aborts[i], masks[i]));
            } catch (const EngineDeadError&) {  // a rank has failed meanwhile
                CHECK(several && how == 2);
            }
        }
        const uint32_t pause = random(400), gives = random(4);  // so many masks come
        rethrow_any(run_ranks(3, [&](int thread) {
            std::this_thread::sleep_for(std::chrono::microseconds(pause * (thread == 0 ? 1 : 2)));
            if (thread == 0) {
                for (size_t i = 0; i < gives; ++i) {
                    if (i == num_steps) break;
                    *batches[i].allowed.as<int32_t>() = 1;
                    masks[i]->give();
                }
            } else if (thread == 1) {
                if (how == 1) return engine->close();
                for (size_t i = how == 3 ? 0 : gives; i < num_steps; ++i) aborts[i]->request();
            }
        }));
        for (auto& step : steps) {
            try {
                const StepOutput output = step.get();
                ++(output.aborted ? num_aborted : num_done);
                if (!output.aborted) check_done(output);
            } catch (const EngineDeadError&) {
                CHECK(several && how == 2);
            } catch (const std::bad_alloc&) {
                CHECK(!several && how == 2);
            }
        }
        on_attention = nullptr;
        if (how == 0 || how == 3) check_done(engine->forward(step_of_three()));
        engine->close();
        CHECK(backends == 0);
    }
    CHECK(rounds || (num_done > 50 && num_aborted > 50));
}

TEST(weight_bytes_while_loading) {
    InferEngine engine(spec(), options(2));
    std::atomic<bool> done{false};
    rethrow_any(run_ranks(2, [&](int thread) {
        if (thread == 0) {
            engine.load_dummy(DType::float32, 0);
            done = true;
            return;
        }
        for (int64_t last = 0, now = 0; !done; last = now) {
            now = engine.weight_bytes();
            CHECK(now >= last);
        }
    }));
    CHECK(engine.weight_bytes() > 0);
}

}  // namespace
}  // namespace infinilm::test

// In place of src/cpu/cpu_backend.cpp.
namespace infinilm::cpu {
std::unique_ptr<Backend> make_cpu_backend(const CpuOptions&) { return std::make_unique<test::FakeCpu>(); }
}  // namespace infinilm::cpu
