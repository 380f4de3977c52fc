// A GPU made of host memory, with the ops that communicators use.
#pragma once

#include <cstring>
#include <functional>

#include "check.h"
#include "core/sum_parts.h"
#include "ops/device_queue.h"

namespace infinilm::test {

class FakeBackend : public Backend, public DeviceQueue {
public:
    explicit FakeBackend(int index, void* stream = nullptr) : device_{DeviceKind::cuda, index}, stream_(stream) {}

    Device device() const override { return device_; }
    DType activation_dtype() const override { return DType::float32; }
    DeviceQueue* queue() override { return this; }
    void* stream() const override { return stream_; }
    void activate() override {}
    Tensor allocate(DType dtype, std::span<const int64_t> shape) override {
        const Tensor memory = allocate_host(dtype, shape);
        return {TensorView(memory.data(), dtype, shape, device_), memory.owner};
    }
    void copy(const TensorView& src, const TensorView& dst) override {
        CHECK(src.dtype() == dst.dtype() && src.numel() == dst.numel());
        if (src.bytes() > 0) std::memcpy(dst.data(), src.data(), static_cast<size_t>(src.bytes()));
    }
    void synchronize() override {}
    int num_sms() const override { return 1; }
    GraphRecorder* recorder() override { return nullptr; }
    std::unique_ptr<OneShot> make_one_shot(const OneShotOptions&) override { return one_shot ? one_shot() : nullptr; }
    std::function<std::unique_ptr<OneShot>()> one_shot;
    void sum_parts(const SumPartsParams& p) override {
        std::vector<void*> parts;
        for (int64_t i = 0; i < p.parts.shape(0); ++i) parts.push_back(p.parts.select(0, i).data());
        void* out = p.out.data();
        infinilm::sum_parts(p.out.dtype(), parts, {&out, 1}, 0, p.out.numel());
    }

    std::vector<TensorView> upload(Upload, std::span<const TensorView>) override {
        return unused(), std::vector<TensorView>();
    }
    std::vector<TensorView> download(std::span<const TensorView>) override {
        return unused(), std::vector<TensorView>();
    }
    Arrival& fetch(const TensorView&) override { throw Failure("no step runs here"); }
    std::unique_ptr<PreparedLinear> prepare_linear(std::vector<LinearPart>, LinearKind, int, Quantization) override {
        return unused(), nullptr;
    }
    Tensor prepare_vector(const Tensor&) override { return unused(), Tensor(); }
    void fill_random(const TensorView&, uint64_t) override { unused(); }
    void embedding(const EmbeddingParams&) override { unused(); }
    void rms_norm(const RmsNormParams&) override { unused(); }
    void mean_square(const MeanSquareParams&) override { unused(); }
    void row_moment(const RowMomentParams&) override { unused(); }
    void sparsify(const SparsifyParams&) override { unused(); }
    void match_rms(const MatchRmsParams&) override { unused(); }
    void mix_streams(const MixStreamsParams&) override { unused(); }
    void add_rms_norm(const AddRmsNormParams&) override { unused(); }
    void linear(const LinearParams&) override { unused(); }
    void linear_rope_store_kv(const LinearParams&, const RopeStoreParams&) override { unused(); }
    void rope_table(const RopeTableParams&) override { unused(); }
    void qk_norm_rope_store_kv(const RopeStoreParams&) override { unused(); }
    void paged_attention(const AttentionParams&) override { unused(); }
    void choose_keys(const ChooseKeysParams&) override { unused(); }
    void act_mul(const ActMulParams&) override { unused(); }
    void clip(const ClipParams&) override { unused(); }
    void soft_cap(const SoftCapParams&) override { unused(); }
    void gather_rows(const GatherRowsParams&) override { unused(); }
    void find_best(const FindBestParams&) override { unused(); }
    void log_probs(const LogProbsParams&) override { unused(); }
    void sample(const SampleParams&) override { unused(); }

private:
    void unused() const { throw Failure("no communicator calls this"); }

    Device device_;
    void* stream_;
};

}  // namespace infinilm::test
