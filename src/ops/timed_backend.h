// A Backend that passes everything on to another one and adds up the time of each op, for `infinilm bench --ops`.
// A decoder has it in place of the other one only while somebody asks, so that nothing is slower otherwise.
#pragma once

#include <chrono>
#include <map>
#include <string>

#include "ops/backend.h"

namespace infinilm {

struct OpTime {
    int64_t calls = 0;
    double seconds = 0;
};
using OpTimes = std::map<std::string, OpTime>;

class TimedBackend final : public Backend {
public:
    // The linears of the model by name; others count as "other", as do all ops that have no name of their own.
    using LinearNames = std::map<const PreparedLinear*, std::string>;
    // ConfigError: a device that works while the host goes on, whose ops would seem to take no time.
    TimedBackend(Backend& inner, LinearNames names);

    const OpTimes& times() const { return times_; }

    Device device() const override { return inner_.device(); }
    DType activation_dtype() const override { return inner_.activation_dtype(); }
    Tensor allocate(DType dtype, std::span<const int64_t> shape) override { return inner_.allocate(dtype, shape); }
    void copy(const TensorView& src, const TensorView& dst) override { inner_.copy(src, dst); }
    std::unique_ptr<PreparedLinear> prepare_linear(std::vector<LinearPart> parts, LinearKind kind, int head_dim,
                                                   Quantization quantization) override {
        return inner_.prepare_linear(std::move(parts), kind, head_dim, quantization);
    }
    void check_packed(const PackedSource& source) const override { inner_.check_packed(source); }
    std::unique_ptr<PreparedLinear> adopt_linear(const PackedSource& source) override {
        return inner_.adopt_linear(source);
    }
    Tensor unpack_linear(const PreparedLinear& linear, size_t part) override {
        return inner_.unpack_linear(linear, part);
    }
    Tensor prepare_vector(const Tensor& vector) override { return inner_.prepare_vector(vector); }
    void fill_random(const TensorView& weight, uint64_t seed) override { inner_.fill_random(weight, seed); }

    void embedding(const EmbeddingParams& p) override {
        timed("embedding", [&] { inner_.embedding(p); });
    }
    void rms_norm(const RmsNormParams& p) override {
        timed("other", [&] { inner_.rms_norm(p); });
    }
    void add_rms_norm(const AddRmsNormParams& p) override {
        timed("other", [&] { inner_.add_rms_norm(p); });
    }
    void linear(const LinearParams& p) override {
        timed(name(p.weight), [&] { inner_.linear(p); });
    }
    void linear_rope_store_kv(const LinearParams& p, const RopeStoreParams& rope) override {
        timed(name(p.weight), [&] { inner_.linear_rope_store_kv(p, rope); });
    }
    void rope_table(const RopeTableParams& p) override {
        timed("other", [&] { inner_.rope_table(p); });
    }
    void qk_norm_rope_store_kv(const RopeStoreParams& p) override {
        timed("other", [&] { inner_.qk_norm_rope_store_kv(p); });
    }
    void paged_attention(const AttentionParams& p) override {
        timed("attention", [&] { inner_.paged_attention(p); });
    }
    void act_mul(const ActMulParams& p) override {
        timed("other", [&] { inner_.act_mul(p); });
    }
    void soft_cap(const SoftCapParams& p) override {
        timed("other", [&] { inner_.soft_cap(p); });
    }
    void gather_rows(const GatherRowsParams& p) override {
        timed("other", [&] { inner_.gather_rows(p); });
    }
    void sum_parts(const SumPartsParams& p) override {
        timed("other", [&] { inner_.sum_parts(p); });
    }
    void find_best(const FindBestParams& p) override {
        timed("sampling", [&] { inner_.find_best(p); });
    }
    void sample(const SampleParams& p) override {
        timed("sampling", [&] { inner_.sample(p); });
    }

private:
    const std::string& name(const PreparedLinear& linear) const {
        static const std::string other = "other";
        const auto found = names_.find(&linear);
        return found == names_.end() ? other : found->second;
    }
    template <class F>
    void timed(const std::string& name, F f) {
        const auto start = std::chrono::steady_clock::now();
        f();
        OpTime& time = times_[name];
        time.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        ++time.calls;
    }

    Backend& inner_;
    const LinearNames names_;
    OpTimes times_;
};

}  // namespace infinilm
