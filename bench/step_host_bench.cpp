// The host's part of a decode step for a GPU, without any call of a driver: what InferEngine and StepGraphs do between
// a batch of the scheduler and the launch. Microseconds of the thread's CPU time, the least of 300.
//   g++ -std=c++20 -O3 -DNDEBUG -Isrc -Itests/cpp bench/step_host_bench.cpp
//       src/model/{batch,block_table,kv_cache}.cpp src/ops/{attention_work,backend_defaults,ops,values}.cpp
//       src/core/{check,tensor}.cpp
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "fake_backend.h"
#include "model/batch.h"

using namespace infinilm;

namespace {

// upload() as that of cuda/host/transfers.cpp, into memory that is there.
class HostMemory final : public test::FakeBackend {
public:
    using FakeBackend::FakeBackend;
    int num_sms() const override { return 132; }
    std::vector<TensorView> upload(Upload, std::span<const TensorView> arrays) override {
        std::vector<TensorView> out;
        size_t offset = 0;
        for (const TensorView& array : arrays) {
            out.push_back(array ? TensorView(array.data(), array.dtype(), array.shape(), device()) : TensorView());
            if (!array) continue;
            std::memcpy(pinned_.data() + offset, array.data(), array.bytes());
            offset += (array.bytes() + 255) / 256 * 256;
        }
        uploaded = offset;
        return out;
    }
    void update_step(const UpdateStepParams&) override {}
    size_t uploaded = 0;  // bytes, of the last step

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
    spec.max_model_len = 16384;
    // Short heads, so that the cache takes little memory: nothing reads it.
    spec.layers = {
        {.mixer = AttentionSpec{.num_heads = 32, .num_kv_heads = 8, .head_dim = 2}, .mlp = {}, .experts = {}}};
    const KvCache cache(device, spec, {.num_blocks = 100000, .block_size = 16, .dtype = DType::bfloat16});
    const Batch batch = make_batch(num_seqs, context);
    const Tensor previous_ids = device.allocate(DType::int32, std::array<int64_t, 1>{num_seqs});
    double least = 1e9;
    BlockTable table;
    for (int call = 0; call < 300; ++call) {  // every sixteenth sequence begins a block in each of them
        for (int s = call % 16; s < num_seqs; s += 16)
            batch.block_table.as<int32_t>()[(s + 1) * batch.block_table.shape(1) - 1] = call;
        const double begin = now_us();
        Batch step = resolve(batch, previous_ids);
        check_values(step, spec, cache, table);
        stage(device, spec, cache, table, step);
        if (call > 0) least = std::min(least, now_us() - begin);
    }
    std::printf("%3d sequences of %5d tokens: %6.1f us, %zu bytes\n", num_seqs, context, least, device.uploaded);
}

}  // namespace

int main() {
    for (const auto& [num_seqs, context] : {std::pair(1, 1000), {64, 1000}, {64, 9000}, {256, 1000}, {256, 9000}})
        measure(num_seqs, context);
}
