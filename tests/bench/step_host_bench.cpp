// The host's part of a decode step for a GPU, without any call of a driver: what InferEngine and StepGraphs do between
// a batch of the scheduler and the launch. Microseconds of the thread's CPU time, the least of 300.
//   g++ -std=c++20 -O3 -DNDEBUG -Isrc -Itests/cpp tests/bench/step_host_bench.cpp
//       src/model/{batch,kv_cache}.cpp src/ops/{attention_work,backend_defaults,values}.cpp src/core/{check,tensor}.cpp
#include <time.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "fake_backend.h"
#include "model/batch.h"

using namespace infinilm;

namespace {

// upload() as that of cuda/transfers.cpp, into memory that is there.
class HostMemory final : public test::FakeBackend {
public:
    using FakeBackend::FakeBackend;
    int num_sms() const override { return 132; }
    std::vector<TensorView> upload(Upload, std::span<const UploadArray> arrays) override {
        std::vector<TensorView> out;
        size_t offset = 0;
        for (const UploadArray& array : arrays) {
            const TensorView& source = array.source;
            if (source && !array.columns) std::memcpy(pinned_.data() + offset, source.data(), source.bytes());
            if (source && array.columns) {
                const int64_t given = 4 * source.shape(1), kept = 4 * array.columns;
                for (int64_t row = 0; row < source.shape(0); ++row)
                    std::memcpy(pinned_.data() + offset + row * kept, source.as<const std::byte>() + row * given,
                                std::min(given, kept));
            }
            out.push_back(source);
            offset += (array.bytes() + 255) / 256 * 256;
        }
        return out;
    }

private:
    std::vector<std::byte> pinned_ = std::vector<std::byte>(64 << 20);
};

double now_us() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

// A decode step of num_seqs sequences of `context` tokens in blocks of 16.
Batch make_batch(int num_seqs, int context) {
    Batch b;
    const int columns = (context + 15) / 16;
    for (Tensor* field : {&b.input_ids, &b.previous_rows, &b.positions, &b.context_lens, &b.logits_rows, &b.top_k})
        *field = allocate_host(DType::int32, {num_seqs});
    for (Tensor* field : {&b.temperature, &b.top_p, &b.min_p, &b.random_val})
        *field = allocate_host(DType::float32, {num_seqs});
    b.slot_mapping = allocate_host(DType::int64, {num_seqs});
    b.cu_seqlens_q = allocate_host(DType::int32, {num_seqs + 1});
    b.block_table = allocate_host(DType::int32, {num_seqs, columns});
    for (int s = 0; s < num_seqs; ++s) {
        b.previous_rows.as<int32_t>()[s] = b.logits_rows.as<int32_t>()[s] = s;
        b.context_lens.as<int32_t>()[s] = context;
        b.cu_seqlens_q.as<int32_t>()[s + 1] = s + 1;
        for (int i = 0; i < columns; ++i) b.block_table.as<int32_t>()[s * columns + i] = (s * columns + i) % 100000;
    }
    return b;
}

void measure(int num_seqs, int context) {
    HostMemory device(0);
    ModelSpec spec;
    spec.dtype = DType::bfloat16;
    spec.vocab_size = 128256;
    spec.num_layers = 1;
    spec.attention = {.num_heads = 32, .num_kv_heads = 8, .head_dim = 128};
    spec.layers.resize(1);
    constexpr KvCacheSpec in_use{.num_blocks = 100000, .block_size = 16, .dtype = DType::bfloat16};
    const KvCache cache(device, spec, {.num_blocks = 20000, .block_size = 1, .dtype = DType::bfloat16});  // smaller
    const Batch batch = make_batch(num_seqs, context);
    const Tensor previous_ids = allocate_host(DType::int32, {num_seqs});
    double least = 1e9;
    for (int call = 0; call < 300; ++call) {
        const double begin = now_us();
        Batch step = resolve(batch, previous_ids);
        check_values(step, spec, in_use);
        step.table_columns = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(step.max_context_len))) / 16;
        stage(device, spec, cache, step);
        least = std::min(least, now_us() - begin);
    }
    std::printf("%3d sequences of %5d tokens: %6.1f us\n", num_seqs, context, least);
}

}  // namespace

int main() {
    for (const auto& [num_seqs, context] : {std::pair(1, 1000), {64, 1000}, {64, 9000}, {256, 1000}, {256, 9000}})
        measure(num_seqs, context);
}
