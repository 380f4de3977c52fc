// The CPU backend: each op fills the argument struct of its kernel and runs it over the thread pool, or on the caller
// alone when a region would cost more than the work (the bits do not depend on that choice). Activations are float32.
// Scratch grows to what the largest call so far needed. Called through ops::*, which has validated the arguments.
#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/sum_parts.h"
#include "core/topology.h"
#include "cpu/delta.h"
#include "cpu/experts.h"
#include "cpu/gguf_panels.h"
#include "cpu/isa.h"
#include "cpu/packed_linear.h"
#include "cpu/rope_rows.h"
#include "cpu/sampling.h"
#include "cpu/thread_pool.h"
#include "ops/args.h"

namespace infinilm::cpu {

namespace {

// Multiply-adds, or as long-lasting steps, below which the caller works alone: several times what a region of threads
// that are awake costs, and less than it takes to wake one.
constexpr int64_t region_work = 32768;
constexpr int shares_per_thread = 4;

}  // namespace

CpuOptions checked(CpuOptions options) {
    constexpr int most = 1024;
    if (options.num_threads < 0 || options.num_threads > most)
        throw ConfigError(concat("num_threads must be 0 (one per core) to ", most, ", got ", options.num_threads));
    if (!is_floating(options.compute_dtype))
        throw ConfigError(
            concat("compute_dtype must be float32, bfloat16 or float16, got ", name(options.compute_dtype)));
    if (options.num_threads == 0) options.num_threads = default_num_threads();
    return options;
}

class CpuBackend final : public Backend {
public:
    explicit CpuBackend(const CpuOptions& options)
        : kernels_(select_kernels(options.isa)),
          compute_dtype_(options.compute_dtype),
          pool_(options.num_threads),
          sampler_(pool_),
          scratch_(static_cast<size_t>(pool_.size())),
          scratch_data_(scratch_.size(), nullptr) {}

    Device device() const override { return {}; }
    DType activation_dtype() const override { return cpu::activation_dtype; }
    Tensor allocate(DType dtype, std::span<const int64_t> shape) override { return allocate_host(dtype, shape); }
    void copy(const TensorView& src, const TensorView& dst) override {
        if (src.bytes() == 0) return;
        if (!src.is_contiguous() || !dst.is_contiguous()) {
            for (int64_t row = 0; row < src.shape(0); ++row) copy(src.select(0, row), dst.select(0, row));
            return;
        }
        std::memmove(dst.data(), src.data(), static_cast<size_t>(src.bytes()));
    }

    std::unique_ptr<PreparedLinear> prepare_linear(std::vector<LinearPart> parts, LinearKind kind, int head_dim,
                                                   Quantization quantization) override;
    bool takes_blocks(std::string_view type) const override { return format_of_blocks(type).has_value(); }
    void check_packed(const PackedSource& source) const override { PackedLinear::check(source); }
    std::unique_ptr<PreparedLinear> adopt_linear(const PackedSource& source) override {
        return std::make_unique<PackedLinear>(memory_, source);
    }
    Tensor unpack_linear(const PreparedLinear& linear, size_t part) override;
    std::unique_ptr<PreparedExperts> prepare_experts(SharedLinears gate_up, SharedLinears down) override {
        return std::make_unique<PackedExperts>(std::move(gate_up), std::move(down));
    }
    Tensor prepare_vector(const Tensor& vector) override { return vector; }
    void fill_random(const TensorView& weight, uint64_t seed) override;

    void embedding(const EmbeddingParams&) override;
    void rms_norm(const RmsNormParams&) override;
    void mean_square(const MeanSquareParams&) override;
    void add_rms_norm(const AddRmsNormParams&) override;
    void row_moment(const RowMomentParams& p) override { run(kernels_.row_moment, row_moment_args(p), p.x.numel()); }
    void sparsify(const SparsifyParams& p) override { run(kernels_.sparsify, sparsify_args(p), p.x.numel()); }
    void match_rms(const MatchRmsParams& p) override { run(kernels_.match_rms, match_rms_args(p), 3 * p.x.numel()); }
    void mix_streams(const MixStreamsParams& p) override {
        const int64_t n = p.streams.shape(0);
        run(kernels_.mix_streams, mix_streams_args(p), (p.corrects ? 2 : n + 1) * p.streams.numel());
    }
    void linear(const LinearParams& p) override { linear(p, false); }
    void linear_act(const LinearParams& p) override { linear(p, true); }
    void linear_rope_store_kv(const LinearParams& p, const RopeStoreParams& rope) override {
        linear(p);
        qk_norm_rope_store_kv(rope);
    }
    void head_linear(const HeadLinearParams&) override;
    void rope_table(const RopeTableParams&) override;
    void qk_norm_rope_store_kv(const RopeStoreParams&) override;
    void paged_attention(const AttentionParams&) override;
    void choose_keys(const ChooseKeysParams&) override;
    void act_mul(const ActMulParams&) override;
    void clip(const ClipParams&) override;
    void soft_cap(const SoftCapParams&) override;
    void gather_rows(const GatherRowsParams&) override;
    void route(const RouteParams& p) override {
        const int64_t num_tokens = p.ids.shape(0);
        split(num_tokens, num_tokens * p.logits.shape(1) * (p.ids.shape(1) + 16),
              [&](int64_t begin, int64_t end) { cpu::route(p, begin, end); });
    }
    void experts(const ExpertsParams&) override;
    void lora(const LoraParams&) override;
    void causal_conv(const CausalConvParams&) override;
    void delta_rule(const DeltaRuleParams&) override;
    void selective_scan(const SelectiveScanParams&) override;
    void gated_norm(const GatedNormParams&) override;
    void log_drafts(const LogDraftsParams&) override;
    void sum_parts(const SumPartsParams&) override;
    void find_best(const FindBestParams& p) override { cpu::find_best(pool_, p); }
    void sample(const SampleParams& p) override { sampler_.sample(p); }
    void log_probs(const LogProbsParams& p) override { sampler_.log_probs(p); }

private:
    // One where a region would cost more than the work; else several per thread, so that a thread that is late, or that
    // the system does not let run, leaves its shares to the others.
    int num_shares(int64_t work) const {
        if (work < region_work) return 1;
        return static_cast<int>(
            std::min<int64_t>(work / region_work + 1, pool_.size() == 1 ? 1 : shares_per_thread * pool_.size()));
    }
    // kernel(args, share) over the pool, or here.
    template <class Args>
    void run(void (*kernel)(const Args&, Share), const Args& args, int64_t work) {
        const int shares = num_shares(work);
        pool_.run(shares, [&](int share, int thread) { kernel(args, Share{share, shares, thread}); });
    }
    // f(begin, end) over [0, n), which costs `work` in all.
    template <class F>
    void split(int64_t n, int64_t work, F f) {
        const int shares = num_shares(work);
        pool_.run(shares, [&](int share, int) { f(n * share / shares, n * (share + 1) / shares); });
    }
    static void* grow(Tensor& buffer, size_t bytes) {
        if (!buffer || static_cast<size_t>(buffer.bytes()) < bytes) {
            buffer = {};  // first, so that both are never there
            buffer = allocate_host(DType::uint8, {static_cast<int64_t>(bytes)});
            if (buffer.bytes() >= large_buffer) prefer_huge_pages(buffer);
        }
        return buffer.data();
    }
    void* const* worker_scratch(size_t bytes) {
        for (size_t i = 0; i < scratch_.size(); ++i) scratch_data_[i] = grow(scratch_[i], bytes);
        return scratch_data_.data();
    }
    void* shared_scratch(size_t bytes) { return grow(shared_scratch_, bytes); }
    template <class Make>
    void make_all_gates(const TensorView& gates, const Make& make);
    template <class Make>
    StateLogArgs log_of_gates(const StateSteps& sequences, const TensorView& log, const Make& make);
    void linear(const LinearParams& p, bool activates);
    // What does not depend on the tokens.
    LinearArgs linear_args(const PackedPiece& piece, LinearKind kind) const;
    void run_linears(std::span<LinearArgs> linears);
    using LinearKernel = void (*LinearKernels::*)(const LinearArgs&, Share);
    void run_over(LinearKernel kernel, std::span<const LinearArgs> linears, bool columns);
    template <class Params>
    void run_norm(const Params& p, DType weight);

    const Kernels& kernels_;
    const DType compute_dtype_;
    PackedMemory memory_;
    ThreadPool pool_;
    Sampler sampler_;
    std::vector<Tensor> scratch_;      // [num_workers] uint8
    std::vector<void*> scratch_data_;  // [num_workers]
    Tensor shared_scratch_;            // uint8
    // The call of experts that is under way.
    ExpertRows expert_rows_;
    std::vector<LinearArgs> linears_, packing_;
    std::vector<std::pair<const LinearArgs*, Share>> linear_shares_;
};

std::unique_ptr<PreparedLinear> CpuBackend::prepare_linear(std::vector<LinearPart> parts, LinearKind kind, int head_dim,
                                                           Quantization quantization) {
    if (quantization == Quantization::fp8) throw ConfigError("quantization 'fp8': CPUs have int8 and int4");
    if (kind == LinearKind::act_mul && parts[0].blocks.type != parts[1].blocks.type)
        throw WeightError("act_mul takes gate and up as blocks of one type, or both as numbers, on a CPU");
    return std::make_unique<PackedLinear>(
        memory_, parts, kind, head_dim, quantization,
        [&](const PackArgs& args) { run(kernels_.pack, args, args.num_panels * panel_outputs * args.in_features); },
        [&](int64_t n, int64_t work, const std::function<void(Range)>& f) {
            split(n, work, [&](int64_t begin, int64_t end) { f({begin, end}); });
        });
}

Tensor CpuBackend::unpack_linear(const PreparedLinear& linear, size_t part) {
    const auto& weight = static_cast<const PackedLinear&>(linear);
    const Format format = weight.place(part, 0).weight.format;
    const DType dtype = format == Format::bf16  ? DType::bfloat16
                        : format == Format::f16 ? DType::float16
                                                : DType::float32;
    const int64_t rows = weight.rows_of(part), n = weight.in_features;
    const Tensor out = allocate_host(dtype, {rows, n});
    split(rows, rows * n, [&](int64_t begin, int64_t end) {
        std::vector<float> values(static_cast<size_t>(n));
        for (int64_t row = begin; row < end; ++row) {
            const auto [table, packed_row] = weight.place(part, row);
            const auto id = static_cast<int32_t>(packed_row);
            const EmbeddingArgs args{.ids = &id,
                                     .table = table,
                                     .first_id = 0,
                                     .num_rows = table.num_panels * panel_outputs,
                                     .multiplier = 1,
                                     .num_tokens = 1,
                                     .out = values.data(),
                                     .out_stride = n};
            kernels_.embedding(args, {0, 1, 0});
            visit_floating(dtype, [&]<class T>(T) {
                for (int64_t i = 0; i < n; ++i)
                    out.as<T>()[row * n + i] = from_float<T>(values[static_cast<size_t>(i)]);
            });
        }
    });
    return out;
}

// Uniform in [-0.02, 0.02] * sqrt(3), so the standard deviation is that of a freshly initialised model; cheap, since it
// fills gigabytes. xorshift64*: Vigna 2016.
void CpuBackend::fill_random(const TensorView& weight, uint64_t seed) {
    visit_floating(weight.dtype(), [&]<class T>(T) {
        uint64_t state = (seed + 1) * 0x9e3779b97f4a7c15ull;
        for (int64_t i = 0; i < weight.numel(); ++i) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            const auto bits = static_cast<int32_t>((state * 0x2545f4914f6cdd1dull) >> 32);
            weight.as<T>()[i] = from_float<T>(static_cast<float>(bits) * (0.02f * 1.7320508f / 2147483648.0f));
        }
    });
}

LinearArgs CpuBackend::linear_args(const PackedPiece& piece, LinearKind kind) const {
    LinearArgs args{};
    args.weight = piece.weight;
    args.out_features = piece.out_features;
    args.pairs = args.act_mul = kind == LinearKind::act_mul;
    const Format format = piece.weight.format;
    args.multiply_bf16 =
        compute_dtype_ == DType::bfloat16 && kernels_.multiplies_bf16() && (format == Format::bf16 || is_f8(format));
    args.bias = piece.bias.empty() ? nullptr : piece.bias.data();
    return args;
}

void CpuBackend::linear(const LinearParams& p, bool activates) {
    const TensorView& x = p.norm.weight ? p.norm.scratch : p.x;
    if (p.norm.weight) rms_norm({.x = p.x, .weight = p.norm.weight, .out = x, .eps = p.norm.eps});
    linears_.clear();
    for (const PackedPiece& piece : static_cast<const PackedLinear&>(p.weight).pieces()) {
        LinearArgs args = linear_args(piece, p.weight.kind);
        args.x = x.as<const float>();
        args.x_stride = x.stride(0);
        args.num_tokens = x.shape(0);
        args.act_mul = args.pairs && !p.gate_up_apart;
        args.activates = activates;
        args.activation = p.activation;
        args.residual = p.residual ? p.residual.as<const float>() + piece.first_output : nullptr;
        args.residual_stride = p.residual ? p.residual.stride(0) : 0;
        args.out = p.out.as<float>() + piece.first_output;
        args.out_stride = p.out.stride(0);
        linears_.push_back(args);
    }
    run_linears(linears_);
}

void CpuBackend::head_linear(const HeadLinearParams& p) {
    linears_.clear();
    for (const PackedPiece& piece : static_cast<const PackedLinear&>(p.weight).pieces()) {
        const auto head = static_cast<int64_t>(linears_.size());
        LinearArgs args = linear_args(piece, p.weight.kind);
        args.x = p.x.as<const float>() + head * p.x.stride(1);
        args.x_stride = p.x.stride(0);
        args.num_tokens = p.x.shape(0);
        args.out = p.out.as<float>() + head * p.out.stride(1);
        args.out_stride = p.out.stride(0);
        linears_.push_back(args);
    }
    run_linears(linears_);
}

// Whether two linears pack the same x alike, which experts of one token do.
static bool packs_as(const LinearArgs& a, const LinearArgs& b) {
    const auto first_row = [](const LinearArgs& of) { return of.x + (of.rows ? of.rows[0] : 0) * of.x_stride; };
    return a.num_tokens == 1 && b.num_tokens == 1 && first_row(a) == first_row(b) &&
           a.weight.format == b.weight.format && a.weight.in_features == b.weight.in_features &&
           a.multiply_bf16 == b.multiply_bf16;
}

// Linears that do not depend on each other, in one region: a thread that is done with its part of one goes on with
// another.
void CpuBackend::run_linears(std::span<LinearArgs> linears) {
    size_t of_a_thread = 0, shared = 0;
    const auto shared_bytes = [&](const LinearArgs& args) {
        return (kernels_.linear(args).shared_scratch_bytes(args) + line_bytes - 1) / line_bytes * line_bytes;
    };
    for (const LinearArgs& args : linears) {
        if (args.num_tokens == 0) return;
        of_a_thread = std::max(of_a_thread, kernels_.linear(args).scratch_bytes(args));
        shared += shared_bytes(args);
    }
    void* const* const scratch = worker_scratch(of_a_thread);
    auto* next = static_cast<std::byte*>(shared_scratch(shared));
    packing_.clear();
    for (LinearArgs& args : linears) {
        args.scratch = scratch;
        if (&args != linears.data() && packs_as((&args)[-1], args)) {
            args.shared_scratch = (&args)[-1].shared_scratch;
            continue;
        }
        args.shared_scratch = next;
        next += shared_bytes(args);
        packing_.push_back(args);
    }
    if (shared > 0) run_over(&LinearKernels::pack_x, packing_, false);
    run_over(&LinearKernels::multiply, linears, true);
}

// Each linear has a part of the shares as large as its part of the work, at least one. columns: whether the work grows
// with out_features; if not, a number is packed, which lasts as long as some multiply-adds.
void CpuBackend::run_over(LinearKernel kernel, std::span<const LinearArgs> linears, bool columns) {
    const auto work_of = [&](const LinearArgs& args) {
        return args.num_tokens * args.weight.in_features * (columns ? args.out_features : 3);
    };
    int64_t work = 0;
    for (const LinearArgs& args : linears) work += work_of(args);
    const int shares = num_shares(work);
    if (linears.size() == 1) return run(kernels_.linear(linears[0]).*kernel, linears[0], work);
    if (shares == 1) {
        for (const LinearArgs& args : linears) (kernels_.linear(args).*kernel)(args, {0, 1, 0});
        return;
    }
    linear_shares_.clear();
    for (const LinearArgs& args : linears) {
        const int count = static_cast<int>((shares * work_of(args) + work - 1) / work);
        for (int index = 0; index < count; ++index) linear_shares_.push_back({&args, {index, count, 0}});
    }
    pool_.run(static_cast<int>(linear_shares_.size()), [&](int item, int thread) {
        const auto& [args, share] = linear_shares_[static_cast<size_t>(item)];
        (kernels_.linear(*args).*kernel)(*args, {share.index, share.count, thread});
    });
}

// Rows grouped by expert: gate_up of all experts that are asked for, then their down, then each token's sum.
void CpuBackend::experts(const ExpertsParams& p) {
    const auto& experts = static_cast<const PackedExperts&>(p.experts);
    const int64_t num_tokens = p.ids.shape(0);
    if (num_tokens == 0) return;
    expert_rows_.group(p.ids, experts.num_experts);
    const int64_t top_k = p.ids.shape(1);
    const TensorView inner = p.inner.slice(1, 0, experts.intermediate_size);  // that of down
    if (p.weigh_inputs)
        split(num_tokens * top_k, p.parts.numel(),
              [&](int64_t begin, int64_t end) { weigh_inputs(p, expert_rows_.part_of(), begin, end); });
    const auto run_all = [&](bool down) {
        linears_.clear();
        for (int64_t expert = 0; expert < experts.num_experts; ++expert) {
            const auto [begin, end] = expert_rows_.range(expert);
            if (begin == end) continue;
            const PackedLinear& linear = down ? experts.down(expert) : experts.gate_up(expert);
            LinearArgs args = linear_args(linear.pieces()[0], linear.kind);  // of one or two parts, which are alike
            const bool of_parts = down || p.weigh_inputs;
            const TensorView x = down ? inner : of_parts ? p.parts : p.x, out = down ? p.parts : p.inner;
            args.x = x.as<const float>() + (of_parts ? begin * x.stride(0) : 0);
            args.x_stride = x.stride(0);
            args.activation = p.activation;
            args.act_mul = args.act_mul && !p.joins_apart();
            args.rows = of_parts ? nullptr : expert_rows_.tokens() + begin;
            args.num_tokens = end - begin;
            args.out = out.as<float>() + begin * out.stride(0);
            args.out_stride = out.stride(0);
            linears_.push_back(args);
        }
        run_linears(linears_);
    };
    run_all(false);
    if (!experts.gated || p.joins_apart())
        act_mul({.gate_up = p.inner, .out = inner, .activation = p.activation, .limit = p.limit});
    run_all(true);
    run(kernels_.combine, combine_args(p, expert_rows_.part_of()), p.parts.numel());
}

// The rows of all parts one behind the other, through a, then b; then what came of them is added where it belongs. The
// numbers are not rounded to bfloat16, whatever the model computes in: these products are few.
void CpuBackend::lora(const LoraParams& p) {
    const auto run_all = [&](bool up) {
        linears_.clear();
        int64_t begin = 0;
        for (const LoraPart& part : p.parts) {
            const int64_t num_rows = part.rows.shape(0);
            const PreparedLinear& linear = up ? *part.b : *part.a;
            LinearArgs args = linear_args(static_cast<const PackedLinear&>(linear).pieces()[0], linear.kind);
            const TensorView x = up ? p.inner : p.x, out = up ? p.delta : p.inner;
            args.multiply_bf16 = false;
            args.x = x.as<const float>() + (up ? begin * x.stride(0) : 0);
            args.x_stride = x.stride(0);
            args.rows = up ? nullptr : part.rows.as<const int32_t>();
            args.num_tokens = num_rows;
            args.out = out.as<float>() + begin * out.stride(0);
            args.out_stride = out.stride(0);
            if (num_rows > 0 && args.out_features > 0) linears_.push_back(args);
            begin += num_rows;
        }
        run_linears(linears_);
        return begin;
    };
    run_all(false);
    const int64_t num_rows = run_all(true), num_columns = p.out.shape(1);
    split(num_columns, num_rows * num_columns, [&](int64_t first, int64_t last) {
        const float* delta = p.delta.as<const float>();
        for (const LoraPart& part : p.parts)
            for (int64_t i = 0; i < part.rows.shape(0); ++i, delta += p.delta.stride(0)) {
                float* const out = p.out.as<float>() + part.rows.as<const int32_t>()[i] * p.out.stride(0);
                for (int64_t column = first; column < last; ++column) out[column] += part.scale * delta[column];
            }
    });
}

void CpuBackend::embedding(const EmbeddingParams& p) {
    const auto& table = static_cast<const PackedLinear&>(p.table);
    const EmbeddingArgs args{.ids = p.ids.as<const int32_t>(),
                             .table = table.pieces()[0].weight,
                             .first_id = p.first_id.value_or(0),
                             .num_rows = table.out_features,
                             .known_ids = p.known_ids,
                             .multiplier = p.multiplier,
                             .num_tokens = p.ids.shape(0),
                             .out = p.out.as<float>(),
                             .out_stride = p.out.stride(0)};
    run(kernels_.embedding, args, args.num_tokens * table.in_features);
}

template <class Params>
void CpuBackend::run_norm(const Params& p, DType weight) {
    const CpuNormArgs args{norm_args(p), element(weight)};
    run(kernels_.norm, args, 2 * p.x.numel());
}

void CpuBackend::rms_norm(const RmsNormParams& p) { run_norm(p, p.weight.dtype()); }
void CpuBackend::mean_square(const MeanSquareParams& p) { run_norm(p, DType::float32); }
void CpuBackend::add_rms_norm(const AddRmsNormParams& p) { run_norm(p, p.weight.dtype()); }

void CpuBackend::rope_table(const RopeTableParams& p) {
    const int64_t num_tokens = p.cos_sin.shape(0), half = p.inv_freq.shape(0);
    split(num_tokens, 64 * num_tokens * half, [&](int64_t begin, int64_t end) { rope_rows(p, begin, end); });
}

void CpuBackend::qk_norm_rope_store_kv(const RopeStoreParams& p) {
    const CpuRopeStoreArgs args{rope_store_args(p), element(p.q_norm.dtype())};
    run(kernels_.rope_store, args, 4 * p.qkv.numel());
}

void CpuBackend::paged_attention(const AttentionParams& p) {
    const int64_t num_seqs = p.context_lens.shape(0);
    const int32_t *cu_seqlens_q = p.cu_seqlens_q.as<const int32_t>(),
                  *context_lens = p.context_lens.as<const int32_t>();
    int64_t next_item = 0, work = 0;
    for (int64_t s = 0; s < num_seqs; ++s)
        work += int64_t{cu_seqlens_q[s + 1] - cu_seqlens_q[s]} * context_lens[s] * p.q.shape(1) * p.q.shape(2);
    CpuAttentionArgs args{attention_args(p), pool_.size(), &next_item, nullptr, nullptr};
    args.scratch = worker_scratch(kernels_.attention_scratch_bytes(args));
    const size_t shared_bytes = kernels_.attention_shared_scratch_bytes(args);
    args.shared_scratch = shared_scratch(shared_bytes);
    // Where a text lies in one step. Decoders go on in steps of one token, and mostly wait for memory there.
    const bool multiply_bf16 =
        p.two_way && compute_dtype_ == DType::bfloat16 && args.cache_type == Element::bf16 && kernels_.attention_bf16;
    run(multiply_bf16 ? kernels_.attention_bf16 : kernels_.attention, args, work);
    if (shared_bytes > 0) run(kernels_.attention_merge, args, static_cast<int64_t>(shared_bytes / sizeof(float)));
}

void CpuBackend::choose_keys(const ChooseKeysParams& p) {
    CpuChooseKeysArgs args{choose_keys_args(p), 0, 0, nullptr};
    const auto* lens = p.context_lens.as<const int32_t>();
    const int most_keys = args.num_seqs > 0 ? *std::max_element(lens, lens + args.num_seqs) : 0;
    const ChosenAtOnce at_once = chosen_at_once(args.num_tokens, most_keys, args.top_k);
    args.scratch = worker_scratch(kernels_.choose_keys_scratch_bytes(args));
    args.scores = static_cast<float*>(shared_scratch(static_cast<size_t>(at_once.bytes())));
    args.scores_stride = at_once.keys;
    for (; args.first_token < args.num_tokens; args.first_token = args.last_token) {
        args.last_token = static_cast<int>(std::min<int64_t>(args.first_token + at_once.tokens, args.num_tokens));
        const int64_t scores = (args.last_token - args.first_token) * at_once.keys;
        if (scores > 0) run(kernels_.score_keys, args, scores * args.num_heads * args.head_dim);
        run(kernels_.choose_keys, args, 8 * scores + (args.last_token - args.first_token) * args.top_k);
    }
}

void CpuBackend::act_mul(const ActMulParams& p) { run(kernels_.act_mul, act_mul_args(p), 8 * p.out.numel()); }

void CpuBackend::clip(const ClipParams& p) {
    split(p.x.shape(0), p.x.numel(), [&](int64_t begin, int64_t end) {
        const auto* const x = p.x.as<const float>();
        auto* const out = p.out.as<float>();
        for (int64_t row = begin; row < end; ++row)
            std::transform(x + row * p.x.stride(0), x + row * p.x.stride(0) + p.x.shape(1), out + row * p.out.stride(0),
                           [&](float v) {
                               const float raised = v < p.low ? p.low : v;
                               return raised > p.high ? p.high : raised;
                           });
    });
}

void CpuBackend::soft_cap(const SoftCapParams& p) { run(kernels_.soft_cap, soft_cap_args(p), 8 * p.x.numel()); }

void CpuBackend::gather_rows(const GatherRowsParams& p) {
    const int64_t num_rows = p.rows.shape(0), hidden_size = p.x.shape(1);
    split(num_rows, num_rows * hidden_size, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy(p.out.as<float>() + i * p.out.stride(0),
                        p.x.as<const float>() + p.rows.as<const int32_t>()[i] * p.x.stride(0),
                        static_cast<size_t>(hidden_size) * sizeof(float));
    });
}

void CpuBackend::causal_conv(const CausalConvParams& p) {
    run(kernels_.causal_conv, causal_conv_args(p), 8 * p.out.numel());
}

constexpr int64_t gate_work = 64;  // logarithms and powers, of a head of a token

// A row of tokens [num_tokens, n], or of a part of a log [num_states, num_rows, n].
static const float* row_at(const TensorView& rows, int64_t row) {
    return rows.as<const float>() + row * rows.stride(rows.ndim() - 2);
}

// Calls make(t, gates of token t) for the tokens of a step; gates [num_tokens, 2 * num_heads].
template <class Make>
void CpuBackend::make_all_gates(const TensorView& gates, const Make& make) {
    split(gates.shape(0), gates.numel() / 2 * gate_work, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) make(t, gates.as<float>() + t * gates.shape(1));
    });
}

// The gates of what is replayed, where the log has it, in scratch. log: a part of it, with as many columns as heads.
// make: as above, of a row of the log.
template <class Make>
StateLogArgs CpuBackend::log_of_gates(const StateSteps& sequences, const TensorView& log, const Make& make) {
    if (!sequences.num_replayed) return {};
    const int64_t num_rows = log.shape(1), num_gates = 2 * log.shape(2);
    const int64_t bytes = log.shape(0) * num_rows * num_gates * static_cast<int64_t>(sizeof(float));
    auto* const gates = static_cast<float*>(shared_scratch(static_cast<size_t>(bytes)));
    const auto *in = sequences.state_in.as<const int32_t>(), *replayed = sequences.num_replayed.as<const int32_t>();
    for (int64_t s = 0; s < sequences.state_in.shape(0); ++s)
        for (int64_t row = in[s] * num_rows, end = row + replayed[s]; row < end; ++row)
            make(row, gates + row * num_gates);
    return {.rows = gates, .stride = num_gates, .num_rows = static_cast<int>(num_rows)};
}

void CpuBackend::delta_rule(const DeltaRuleParams& p) {
    const int64_t num_tokens = p.qkv.shape(0), num_heads = p.state.shape(1);
    const auto make = [&p](const TensorView& a, const TensorView& b) {
        return [&p, a, b](int64_t t, float* gates) { make_gates(p, row_at(a, t), row_at(b, t), gates); };
    };
    make_all_gates(p.gates, make(p.a, p.b));
    const StateLogArgs log = log_of_gates(p.sequences, p.b_log, make(p.a_log, p.b_log));
    const CpuDeltaRuleArgs args{delta_rule_args(p), p.gates.as<const float>(), log};
    run(kernels_.delta_rule, args, 4 * num_tokens * num_heads * p.state.shape(2) * p.state.shape(3));
}

void CpuBackend::selective_scan(const SelectiveScanParams& p) {
    const int64_t num_tokens = p.xbc.shape(0), num_heads = p.state.shape(1);
    const auto make = [&p](const TensorView& dt) {
        return [&p, dt](int64_t t, float* gates) { make_steps(p, row_at(dt, t), gates); };
    };
    make_all_gates(p.gates, make(p.dt));
    const StateLogArgs log = log_of_gates(p.sequences, p.dt_log, make(p.dt_log));
    const CpuSelectiveScanArgs args{selective_scan_args(p), p.gates.as<const float>(), log};
    run(kernels_.selective_scan, args, 3 * num_tokens * num_heads * p.state.shape(2) * p.state.shape(3));
}

void CpuBackend::gated_norm(const GatedNormParams& p) {
    run(kernels_.gated_norm, gated_norm_args(p), 16 * p.out.numel());
}

void CpuBackend::log_drafts(const LogDraftsParams& p) {
    const LogDraftsArgs a = log_drafts_args(p);
    const StateStepsArgs& steps = a.sequences;
    split(a.num_tokens, a.num_tokens * a.log_stride, [&](int64_t begin, int64_t end) {
        for (int s = 0; s < steps.num_seqs; ++s) {
            const int64_t first = steps.cu_seqlens_q[s] + steps.state_tokens[s];  // the first draft
            for (int64_t t = std::max(begin, first); t < std::min<int64_t>(end, steps.cu_seqlens_q[s + 1]); ++t) {
                float* to =
                    static_cast<float*>(a.log) + (int64_t{steps.state_out[s]} * a.num_rows + t - first) * a.log_stride;
                for (const LogDraftsArgs::Part& part : std::span(a.parts).first(static_cast<size_t>(a.num_parts))) {
                    const float* const from = static_cast<const float*>(part.rows) + t * part.stride;
                    to = std::copy(from, from + part.columns, to);
                }
            }
        }
    });
}

void CpuBackend::sum_parts(const SumPartsParams& p) {
    std::vector<void*> parts;
    for (int64_t i = 0; i < p.parts.shape(0); ++i) parts.push_back(p.parts.select(0, i).data());
    void* out = p.out.data();
    split(p.out.numel(), p.parts.numel(),
          [&](int64_t begin, int64_t end) { infinilm::sum_parts(p.out.dtype(), parts, {&out, 1}, begin, end); });
}

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
    return std::make_unique<CpuBackend>(checked(options));
}

}  // namespace infinilm::cpu
