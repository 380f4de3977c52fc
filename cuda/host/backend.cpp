// One CudaBackend serves one rank: one device, one stream. Called through ops::*, which has validated the arguments, by
// the rank's worker thread alone. Every op enqueues and returns; copies to and from the host wait.
#include "cuda/host/backend.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "cuda/attention/attention_host.h"
#include "cuda/core/kernel_list.h"
#include "cuda/delta/kernels.h"
#include "cuda/experts/experts_host.h"
#include "cuda/host/graph.h"
#include "cuda/host/transfers.h"
#include "cuda/linear/linear_choice.h"
#include "cuda/linear/linear_host.h"
#include "cuda/linear/packed_layout.h"
#include "cuda/ranks/peers.h"
#include "cuda/rows/kernels.h"
#include "cuda/rows/rows_host.h"
#include "cuda/sampling/sampling_host.h"
#include "ops/args.h"
#include "ops/device_queue.h"

namespace infinilm::cuda {

namespace {

constexpr int64_t piece_bytes = 4 << 20;  // of a copy between the host and the device

}  // namespace

class CudaBackend final : public Backend, public DeviceQueue {
public:
    explicit CudaBackend(const CudaOptions& options)
        : options_(options), type_(element(options.dtype)), device_{DeviceKind::cuda, options.device} {
        const std::vector<CudaDevice> found = devices();
        require(options.device >= 0 && options.device < count(static_cast<int64_t>(found.size())), "device '",
                to_string(device_), "': there are ", found.size(), " CUDA devices, 0 to ", found.size() - 1);
        const CudaDevice& device = found[static_cast<size_t>(options.device)];
        require(device.major >= 8, "device '", to_string(device_), "' (", device.name, ") has compute capability ",
                device.major, ".", device.minor, "; infinilm needs 8.0 or later; use device='cpu'");
        is_hopper_ = device.major == 9;
        num_sms_ = device.num_sms;
        activate();
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        pinned_ = std::make_unique<PinnedMemory>(piece_bytes);
        landings_ = std::make_unique<Landings>();
        sampling_ = std::make_unique<SamplingWorkspace>(stream_);
        check(load_kernels(), "loading the kernels");
        // Any kernel tells whether this build has code for the device.
        const Tensor probe = allocate(DType::float32, std::array<int64_t, 1>{8});
        run(cuda::fill_random(
                {.dst = probe.data(), .type = Element::f32, .count = probe.numel(), .seed = 0, .deviation = 0},
                stream_),
            to_string(device_), probe.shape());
        if (shares_tiles(type_, is_hopper_)) split_workspace_ = make_split_workspace(stream_);
        if (options.fp8_inputs) {
            require(device.major > 8 || device.minor >= 9, "device '", to_string(device_), "' (", device.name,
                    ") has compute capability ", device.major, ".", device.minor,
                    "; inputs of 8 bits need 8.9 or later");
            rounded_inputs_ = device_memory(fp8_inputs_bytes, "inputs of linears in 8 bits");
        }
        synchronize();
    }
    ~CudaBackend() override {
        on_device(options_.device, [&] {  // on a lost one nothing here works, and nothing is left to be done
            cudaStreamSynchronize(stream_);
            cudaStreamDestroy(stream_);
        });
    }

    Device device() const override { return device_; }
    DType activation_dtype() const override { return options_.dtype; }
    DeviceQueue* queue() override { return this; }

    Tensor allocate(DType dtype, std::span<const int64_t> shape) override;
    void copy(const TensorView& src, const TensorView& dst) override;
    void join_columns(const TensorView& parts, const TensorView& out) override {
        activate();
        run(run_join_columns(parts, out, stream_), "join_columns", parts.shape());
    }

    void* stream() const override { return stream_; }
    // Whatever comes behind weights waits for them: a linear may read its own before kernels in front of it have ended.
    void activate() override {
        make_current();
        if (std::exchange(is_packing_, false)) synchronize();
    }
    std::vector<TensorView> upload(Upload purpose, std::span<const TensorView> arrays) override;
    std::vector<TensorView> download(std::span<const TensorView> arrays) override {
        activate();
        return download_.fetch(arrays, stream_);
    }
    Arrival& fetch(const TensorView& sampled) override {
        activate();
        return landings_->fetch(sampled, *pinned_, stream_);
    }
    int num_sms() const override { return num_sms_; }
    void synchronize() override { check(cudaStreamSynchronize(stream_), "synchronize"); }
    std::unique_ptr<OneShot> make_one_shot(const OneShotOptions& options) override {
        activate();
        return cuda::make_one_shot(options, type_, stream_);
    }
    // To wait after every launch and to record launches exclude each other.
    GraphRecorder* recorder() override { return sync_ ? nullptr : &recorder_; }

    bool takes_blocks(std::string_view type) const override { return find_blocks(type) != nullptr; }
    bool rounds_blocks(std::string_view type) const override {  // scales of rows alone multiply sums
        const BlockType* const blocks = find_blocks(type);
        return blocks && unit_shape(blocks->format).scale_bytes > 0;
    }
    std::unique_ptr<PreparedLinear> prepare_linear(std::vector<LinearPart> parts, LinearKind kind, int head_dim,
                                                   Quantization quantization) override;
    Tensor unpack_linear(const PreparedLinear& linear, size_t part) override;
    Tensor prepare_vector(const Tensor& vector) override;
    void fill_random(const TensorView& weight, uint64_t seed) override;

    void embedding(const EmbeddingParams&) override;
    void rms_norm(const RmsNormParams& p) override { run_norm(norm_args(p), "rms_norm", p.x); }
    void mean_square(const MeanSquareParams& p) override { run_norm(norm_args(p), "mean_square", p.x); }
    void add_rms_norm(const AddRmsNormParams& p) override { run_norm(norm_args(p), "add_rms_norm", p.x); }
    void row_moment(const RowMomentParams& p) override {
        activate();
        run(cuda::row_moment(row_moment_args(p), stream_), "row_moment", p.x.shape());
    }
    void sparsify(const SparsifyParams& p) override {
        activate();
        run(cuda::sparsify(sparsify_args(p), stream_), "sparsify", p.x.shape());
    }
    void match_rms(const MatchRmsParams& p) override {
        activate();
        run(cuda::match_rms(match_rms_args(p), stream_), "match_rms", p.x.shape());
    }
    void mix_streams(const MixStreamsParams& p) override {
        activate();
        run(cuda::mix_streams(mix_streams_args(p), stream_), "mix_streams", p.x.shape());
    }
    void linear(const LinearParams&) override;
    void linear_rope_store_kv(const LinearParams&, const RopeStoreParams&) override;
    bool fuses_rope_store(const LinearParams&, const RopeStoreParams&) override;
    void check_head(int head_dim) override { cuda::check_head(head_dim); }
    void head_linear(const HeadLinearParams& p) override {
        activate();
        run(run_head_linear(p, stream_), "head_linear", p.x.shape());
    }
    void rope_table(const RopeTableParams&) override;
    void qk_norm_rope_store_kv(const RopeStoreParams&) override;
    void paged_attention(const AttentionParams&) override;
    void store_kv_and_attend(const RopeStoreParams&, const AttentionParams&) override;
    void choose_keys(const ChooseKeysParams& p) override {
        activate();
        run(cuda::choose_keys(choose_keys_args(p), stream_), "choose_keys", p.q.shape());
    }
    void act_mul(const ActMulParams&) override;
    void clip(const ClipParams&) override;
    void soft_cap(const SoftCapParams&) override;
    void gather_rows(const GatherRowsParams&) override;
    void update_step(const UpdateStepParams&) override;
    std::unique_ptr<PreparedExperts> prepare_experts(SharedLinears gate_up, SharedLinears down) override {
        activate();
        return make_experts(std::move(gate_up), std::move(down), is_hopper_, options_.fp8_inputs);
    }
    void route(const RouteParams& p) override {
        activate();
        run(run_route(p, stream_), "route", p.logits.shape());
    }
    void experts(const ExpertsParams& p) override {
        activate();
        const auto activate = [&](const TensorView& inner) {
            const ActMulParams joined{.gate_up = p.inner, .out = inner, .activation = p.activation, .limit = p.limit};
            return cuda::act_mul(act_mul_args(joined), stream_);
        };
        if (p.ids.numel() > 0) run(run_experts(p, type_, stream_, activate), "experts", p.x.shape());
    }
    void lora(const LoraParams& p) override {
        activate();
        run(run_lora(p, stream_), "lora", p.out.shape());
    }
    void causal_conv(const CausalConvParams& p) override {
        activate();
        run(cuda::causal_conv(causal_conv_args(p), stream_), "causal_conv", p.x.shape());
    }
    void delta_rule(const DeltaRuleParams& p) override {
        activate();
        run(cuda::delta_rule(delta_rule_args(p), stream_), "delta_rule", p.qkv.shape());
    }
    void selective_scan(const SelectiveScanParams& p) override {
        activate();
        run(cuda::selective_scan(selective_scan_args(p), stream_), "selective_scan", p.xbc.shape());
    }
    void gated_norm(const GatedNormParams& p) override {
        activate();
        run(cuda::gated_norm(gated_norm_args(p), stream_), "gated_norm", p.x.shape());
    }
    void log_drafts(const LogDraftsParams& p) override {
        activate();
        run(cuda::log_drafts(log_drafts_args(p), stream_), "log_drafts", p.log.shape());
    }
    void sum_parts(const SumPartsParams&) override;
    void change_logits(const ChangeLogitsParams& p) override {
        activate();
        run(run_change_logits(p, stream_), "change_logits", p.logits.shape());
    }
    void find_best(const FindBestParams& p) override {
        activate();
        run(run_find_best(p, *sampling_, stream_), "find_best", p.logits.shape());
    }
    void log_probs(const LogProbsParams& p) override {
        activate();
        run(run_log_probs(p, *sampling_, stream_), "log_probs", p.logits.shape());
    }
    void sample(const SampleParams& p) override {
        activate();
        if (p.ids.numel() > 0) run(run_sample(p, *sampling_, stream_), "sample", p.logits.shape());
    }

private:
    void make_current() { check(cudaSetDevice(options_.device), "cudaSetDevice"); }
    std::unique_ptr<DeviceMemory> device_memory(size_t bytes, std::string_view what) {
        recorder_.memory_asked_for();
        return std::make_unique<DeviceMemory>(bytes, what);
    }
    // After a launch. Faults of kernels show only when something waits for them; with INFINILM_CUDA_SYNC=1 that is
    // here, so that the error has the op and its shape.
    void run(cudaError_t launched, std::string_view op, std::span<const int64_t> shape) {
        if (launched == cudaSuccess && sync_) launched = cudaStreamSynchronize(stream_);
        if (launched != cudaSuccess) check(launched, concat(op, " of ", shape_string(shape)));
    }
    LinearKernel kernel_of(const LinearArgs& args) const { return choose_linear(args, is_hopper_, num_sms_); }
    // The arguments for a piece of a linear whose inputs may be rounded to 8 bits, and whether they are.
    LinearArgs args_of(const LinearParams& p, const CudaPiece& piece) const;
    bool rounds_inputs(const CudaPiece& piece) const { return rounded_inputs_ && piece.fits_rounded_inputs; }
    void linear_at_once(const LinearParams& p);
    // The norm in front, in the arguments if it is fused; else it runs here, and what reads p.x then reads normed rows.
    void add_norm(LinearParams& p, LinearArgs& args);
    AttentionWorkArgs attention_work(const AttentionParams&) const;
    // x of such arguments becomes rows of 8 bits, unless `last` of these are what the piece takes.
    void round_inputs(LinearArgs& args, const CudaPiece& piece, const CudaPiece*& last);
    // A part's rows in a packed weight, through a staging buffer when they are in host memory. blocks: null, numbers.
    CudaPiece make_piece(std::span<const LinearPart> parts, LinearKind kind, int head_dim, Quantization quantization);
    void pack(const TensorView& weight, const BlockType* blocks, int first, const PackedWeight& dst);
    void* load_staging(int64_t bytes);
    std::unique_ptr<DeviceMemory> device_floats(const std::vector<TensorView>& vectors);
    void run_norm(const NormArgs& args, std::string_view op, const TensorView& x);
    void run_linear(const LinearArgs& args);

    const CudaOptions options_;
    const Element type_;
    const Device device_;
    const bool sync_ = sync_launches();
    bool is_hopper_ = false;
    int num_sms_ = 0;
    cudaStream_t stream_ = nullptr;
    StreamRecorder recorder_{stream_};
    std::array<Staging, num_uploads> staging_;       // of upload, by purpose
    Tensor load_staging_;                            // uint8: of pack
    std::unique_ptr<LoadPieces> load_pieces_;        // the same, from the first weight on
    bool is_packing_ = false;                        // a weight may be under way: see activate()
    std::unique_ptr<DeviceMemory> split_workspace_;  // of linear_prefill; null where that has no shared tiles
    std::unique_ptr<DeviceMemory> rounded_inputs_;   // fp8_inputs_bytes; null: inputs are not rounded
    std::unique_ptr<PinnedMemory> pinned_;
    Download download_;
    std::unique_ptr<Landings> landings_;
    std::unique_ptr<SamplingWorkspace> sampling_;
};

// ---- memory ------------------------------------------------------------------------------------------------------

Tensor CudaBackend::allocate(DType dtype, std::span<const int64_t> shape) {
    activate();
    const TensorView view(nullptr, dtype, shape, device_);
    const auto bytes = static_cast<size_t>(view.bytes());
    const std::shared_ptr<DeviceMemory> memory =
        device_memory(bytes, concat("a tensor of shape ", shape_string(shape)));
    check(cudaMemsetAsync(memory->data, 0, bytes, stream_), "allocate");
    return {TensorView(memory->data, dtype, shape, device_), memory};
}

void CudaBackend::copy(const TensorView& src, const TensorView& dst) {
    activate();
    cuda::copy(src, dst, *pinned_, stream_);
}

std::vector<TensorView> CudaBackend::upload(Upload purpose, std::span<const TensorView> arrays) {
    activate();
    Staging& staging = staging_[static_cast<size_t>(purpose)];
    if (!staging.fits(arrays)) {
        while_quiet([&] {
            staging.reset({});
            staging.reset(allocate(DType::uint8, std::array{upload_growth * Staging::bytes_of(arrays)}));
        });
    }
    return staging.upload(arrays, stream_);
}

// ---- weights -----------------------------------------------------------------------------------------------------

std::unique_ptr<PreparedLinear> CudaBackend::prepare_linear(std::vector<LinearPart> parts, LinearKind kind,
                                                            int head_dim, Quantization quantization) {
    make_current();  // the device takes the weight before, while the host reads this one
    auto out = std::make_unique<CudaLinear>();
    out->kind = kind;
    out->in_features = parts[0].in_features();
    for (std::span<const LinearPart> left = parts; !left.empty();) {
        const auto of_piece = first_piece(left);
        CudaPiece& piece = out->pieces.emplace_back(make_piece(of_piece, kind, head_dim, quantization));
        piece.first_output = out->out_features;
        require(piece.first_output % 8 == 0, "a weight of blocks begins at output ", piece.first_output,
                " of a linear: on CUDA this must be a multiple of 8; use device='cpu'");
        for (const LinearPart& part : of_piece) {
            const int64_t first = out->out_features - piece.first_output, rows = part.weight.shape(0);
            out->parts.push_back({out->pieces.size() - 1, {first, first + rows}});
            out->out_features += rows;
        }
        left = left.subspan(of_piece.size());
    }
    if (kind == LinearKind::act_mul) out->out_features /= 2;
    return out;
}

CudaPiece CudaBackend::make_piece(std::span<const LinearPart> parts, LinearKind kind, int head_dim,
                                  Quantization quantization) {
    CudaPiece out;
    PackedWeight& weight = out.packed = packed_layout(parts, kind, head_dim, quantization, type_);
    out.data = device_memory(packed_bytes(weight), concat("a weight of shape [", weight.n, ", ", weight.k, "]"));
    weight.data = out.data->data;
    out.fits_rounded_inputs = fits_rounded_inputs(weight.format, find_blocks(parts[0].blocks.type));
    check(cudaMemsetAsync(out.data->data, 0, packed_bytes(weight), stream_), "prepare_linear");
    int first = 0;
    std::vector<TensorView> biases;
    for (const LinearPart& part : parts) {
        pack(part.weight, find_blocks(part.blocks.type), first, weight);
        first += count(part.weight.shape(0));
        biases.push_back(part.bias ? part.bias.view() : TensorView(nullptr, DType::float32, {part.weight.shape(0)}));
    }
    if (std::ranges::any_of(parts, [](const LinearPart& part) { return static_cast<bool>(part.bias); })) {
        biases.emplace_back(nullptr, DType::float32, std::initializer_list<int64_t>{weight.n - first});
        out.bias = device_floats(biases);
        weight.bias = static_cast<const float*>(out.bias->data);
    }
    return out;
}

void* CudaBackend::load_staging(int64_t bytes) {
    if (!load_staging_ || load_staging_.bytes() < bytes) {
        load_staging_ = {};
        load_staging_ = allocate(DType::uint8, std::array{bytes});
    }
    return load_staging_.data();
}

void CudaBackend::pack(const TensorView& weight, const BlockType* blocks, int first, const PackedWeight& dst) {
    const int64_t rows = weight.shape(0), row_bytes = weight.shape(1) * size_bytes(weight.dtype());
    auto run_pack = [&](const void* src, int64_t begin, int64_t end) {
        const int from = first + count(begin), size = count(end - begin);
        run(blocks ? pack_blocks({.src = static_cast<const uint8_t*>(src),
                                  .type = *blocks,
                                  .first = from,
                                  .rows = size,
                                  .dst = dst},
                                 stream_)
                   : pack_weight(
                         {.src = src, .src_type = element(weight.dtype()), .first = from, .rows = size, .dst = dst},
                         stream_),
            "prepare_linear", weight.shape());
    };
    if (rows == 0) return;  // the last ranks may have no token of the vocabulary
    if (weight.device() == device_) {
        require(weight.is_contiguous(), "prepare_linear: a weight on the device must be contiguous");
        run_pack(weight.data(), 0, rows);
        return synchronize();  // a linear may read weights before the kernels in front of it have ended
    }
    require(row_bytes <= piece_bytes, "a weight of shape ", shape_string(weight.shape()), " has too long rows");
    const int64_t chunk = std::min(rows, piece_bytes / row_bytes);
    void* staging = load_staging(chunk * row_bytes);
    if (!load_pieces_) load_pieces_ = std::make_unique<LoadPieces>(piece_bytes);
    for (int64_t begin = 0; begin < rows; begin += chunk) {
        const int64_t end = std::min(begin + chunk, rows);
        load_pieces_->copy(weight.slice(0, begin, end), staging, stream_);
        run_pack(staging, begin, end);
    }
    is_packing_ = true;
}

// For weights that came in blocks; others are still where they came from.
Tensor CudaBackend::unpack_linear(const PreparedLinear& linear, size_t part) {
    const auto& [piece, rows_of_part] = static_cast<const CudaLinear&>(linear).parts.at(part);
    const auto [begin, end] = rows_of_part;
    const PackedWeight& weight = pieces(linear)[piece].packed;
    const Tensor out = allocate_host(DType::float32, {end - begin, weight.k});
    const int64_t row_bytes = int64_t{4} * weight.k, chunk = std::max<int64_t>(piece_bytes / row_bytes, 1);
    activate();
    for (int64_t row = begin; row < end; row += chunk) {
        const int64_t rows = std::min(chunk, end - row);
        auto* staging = static_cast<float*>(load_staging(rows * row_bytes));
        run(unpack_weight({.src = weight, .first = count(row), .rows = count(rows), .out = staging}, stream_),
            "unpack_linear", out.shape());
        copy({staging, DType::float32, {rows, weight.k}, device_}, out.slice(0, row - begin, row - begin + rows));
    }
    return out;
}

// Vectors of any floating dtype, one after the other as float32; absent ones are zero.
std::unique_ptr<DeviceMemory> CudaBackend::device_floats(const std::vector<TensorView>& vectors) {
    std::vector<float> values;
    for (const TensorView& vector : vectors) {
        const size_t at = values.size();
        values.resize(at + static_cast<size_t>(vector.numel()), 0.0f);
        if (!vector) continue;
        Tensor host = allocate_host(vector.dtype(), vector.shape());
        copy(vector, host);
        visit_floating(vector.dtype(), [&]<class T>(T) {
            for (int64_t i = 0; i < vector.numel(); ++i)
                values[at + static_cast<size_t>(i)] = infinilm::to_float(host.as<const T>()[i]);
        });
    }
    auto memory = device_memory(values.size() * sizeof(float), "a bias or norm");
    check(cudaMemcpyAsync(memory->data, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice, stream_),
          "prepare");
    synchronize();
    return memory;
}

Tensor CudaBackend::prepare_vector(const Tensor& vector) {
    if (!vector) return {};
    activate();
    std::shared_ptr<DeviceMemory> memory = device_floats({vector});
    return {TensorView(memory->data, DType::float32, vector.shape(), device_), memory};
}

void CudaBackend::fill_random(const TensorView& weight, uint64_t seed) {
    activate();
    run(cuda::fill_random({.dst = weight.data(),
                           .type = element(weight.dtype()),
                           .count = weight.numel(),
                           .seed = seed,
                           .deviation = 0.02f},
                          stream_),
        "fill_random", weight.shape());
}

// ---- ops ---------------------------------------------------------------------------------------------------------

void CudaBackend::embedding(const EmbeddingParams& p) {
    activate();
    if (p.ids.numel() == 0) return;
    run(cuda::embedding({.ids = p.ids.as<const int>(),
                         .first_id = p.first_id.value_or(0),
                         .is_part = p.first_id.has_value(),
                         .table = packed(p.table),
                         .out = p.out.data(),
                         .out_stride = p.out.stride(0),
                         .num_tokens = count(p.ids.shape(0)),
                         .multiplier = p.multiplier,
                         .known_ids = p.known_ids},
                        stream_),
        "embedding", p.out.shape());
}

void CudaBackend::run_norm(const NormArgs& args, std::string_view op, const TensorView& x) {
    activate();
    if (x.numel() > 0) run(cuda::rms_norm(args, stream_), op, x.shape());
}

void CudaBackend::add_norm(LinearParams& p, LinearArgs& args) {
    if (!p.norm.weight) return;
    if (p.norm.weight.ndim() == 1 && fuses_norm(kernel_of(args), args.num_tokens, args.weight.format)) {
        args.norm_weight = p.norm.weight.as<const float>();
        args.norm_eps = p.norm.eps;
        return;
    }
    rms_norm({.x = p.x, .weight = p.norm.weight, .out = p.norm.scratch, .eps = p.norm.eps});
    p.x = p.norm.scratch;
    p.norm = {};
    args.x = p.x.data();
    args.x_stride = p.x.stride(0);
}

LinearArgs CudaBackend::args_of(const LinearParams& p, const CudaPiece& piece) const {
    LinearArgs args = linear_args(p, piece, type_, split_workspace_.get());
    if (rounds_inputs(piece)) args.weight = as_pairs(args.weight);
    return args;
}

void CudaBackend::round_inputs(LinearArgs& args, const CudaPiece& piece, const CudaPiece*& last) {
    const int columns = piece.packed.k;
    const bool box_scales = piece.packed.format == WeightFormat::fp8_blocks;
    const RoundInputsArgs rounding{.x = args.x,
                                   .x_stride = args.x_stride,
                                   .out = rounded_inputs_->data,
                                   .out_stride = rounded_row_bytes(columns, box_scales) / 2,
                                   .num_rows = args.num_tokens,
                                   .k = columns,
                                   .box_scales = box_scales,
                                   .type = type_};
    args.x = rounding.out, args.x_stride = rounding.out_stride;
    if (last && last->packed.format == piece.packed.format) return;
    run(cuda::round_inputs(rounding, stream_), "round_inputs", std::array<int64_t, 2>{args.num_tokens, columns});
    last = &piece;
}

void CudaBackend::run_linear(const LinearArgs& args) {
    run(launch_linear(kernel_of(args), args, stream_), "linear",
        std::array<int64_t, 3>{args.num_tokens, args.weight.n, args.weight.k});
}

// For as many rows at a time as rounded inputs have room for: a row's bits depend on no other.
void CudaBackend::linear(const LinearParams& p) {
    activate();
    if (p.x.numel() == 0) return;
    if (!std::ranges::any_of(pieces(p.weight), [&](const CudaPiece& piece) { return rounds_inputs(piece); }))
        return linear_at_once(p);
    const int64_t tokens = p.x.shape(0), most = fp8_inputs_bytes / rounded_row_bytes(p.weight.in_features, true);
    for (int64_t begin = 0; begin < tokens; begin += most) {
        const auto rows = [&](const TensorView& all) {
            return all ? all.slice(0, begin, std::min(begin + most, tokens)) : all;
        };
        LinearParams part = p;
        part.x = rows(p.x), part.norm.scratch = rows(p.norm.scratch);
        part.residual = rows(p.residual), part.out = rows(p.out);
        linear_at_once(part);
    }
}

void CudaBackend::linear_at_once(const LinearParams& p) {
    LinearParams of_piece = p;
    const CudaPiece* last_rounded = nullptr;
    for (const CudaPiece& piece : pieces(p.weight)) {
        LinearArgs args = args_of(of_piece, piece);
        add_norm(of_piece, args);
        if (rounds_inputs(piece)) round_inputs(args, piece, last_rounded);
        run_linear(args);
    }
}

bool CudaBackend::fuses_rope_store(const LinearParams& p, const RopeStoreParams& rope) {
    const LinearArgs args = args_of(p, pieces(p.weight)[0]);
    return pieces(p.weight).size() == 1 && args.weight.order == RowOrder::rope_pairs && fuses_rope(kernel_of(args)) &&
           p.x.numel() > 0 && !rope.q_norm && !rope.q_cos_sin && !rope.q_turned && !rope.k_scales &&
           rope.slot_mapping && rope.cos_sin && rope.cos_sin.shape(1) == rope.head_dim;
}

void CudaBackend::linear_rope_store_kv(const LinearParams& p, const RopeStoreParams& rope) {
    if (!fuses_rope_store(p, rope)) {
        linear(p);
        return qk_norm_rope_store_kv(rope);
    }
    activate();
    const CudaPiece& piece = pieces(p.weight)[0];
    LinearArgs args = args_of(p, piece);
    LinearParams normed = p;
    add_norm(normed, args);
    const CudaPiece* last_rounded = nullptr;
    if (rounds_inputs(piece)) round_inputs(args, piece, last_rounded);
    args.has_rope = true;
    args.rope = rope_store_args(rope).rope;
    run_linear(args);
}

void CudaBackend::rope_table(const RopeTableParams& p) {
    activate();
    if (p.positions.numel() == 0) return;
    run(cuda::rope_table({.positions = p.positions.as<const int>(),
                          .inv_freq = p.inv_freq.as<const float>(),
                          .axes = p.axes.as<const int>(),
                          .cos_sin = p.cos_sin.as<float>(),
                          .num_tokens = count(p.cos_sin.shape(0)),
                          .half = count(p.inv_freq.shape(0)),
                          .attention_factor = p.attention_factor,
                          .scale_beta = p.scale_beta,
                          .scale_positions = p.scale_positions,
                          .scale_offset = p.scale_offset},
                         stream_),
        "rope_table", p.cos_sin.shape());
}

void CudaBackend::qk_norm_rope_store_kv(const RopeStoreParams& p) {
    activate();
    if (p.qkv.numel() == 0) return;
    run(cuda::qk_norm_rope_store_kv(rope_store_args(p), stream_), "qk_norm_rope_store_kv", p.qkv.shape());
}

AttentionWorkArgs CudaBackend::attention_work(const AttentionParams& p) const {
    // Values, where there are any beside the keys, lie behind them.
    auto* const wide = p.wide_cache.as<std::byte>();
    const int64_t values_begin = p.v_cache ? p.k_cache.numel() : p.q.shape(2) - p.out.shape(2);
    return {.array = p.work.as<const int4>(),
            .decode_begin = count(p.known.decode_begin),
            .num_decode = count(p.known.num_decode),
            .prefill_begin = count(p.known.prefill_begin),
            .num_prefill = count(p.known.num_prefill),
            .row_floats = p.known.row_floats,
            .workspace = p.workspace.data(),
            .wide_k = wide,
            .wide_v = wide ? wide + values_begin * cuda::size_bytes(type_) : nullptr};
}

void CudaBackend::store_kv_and_attend(const RopeStoreParams& rope, const AttentionParams& p) {
    const QkNormRopeStoreArgs store = rope_store_args(rope);
    const AttentionArgs args = attention_args(p);
    const AttentionWorkArgs work = attention_work(p);
    if (type_ == Element::f32 || p.q.numel() == 0 || !attention_stores_kv(store, args, work)) {
        qk_norm_rope_store_kv(rope);
        return paged_attention(p);
    }
    activate();
    run(cuda::store_kv_and_attend(store, args, work, stream_), "store_kv_and_attend", p.q.shape());
}

void CudaBackend::paged_attention(const AttentionParams& p) {
    activate();
    if (p.q.numel() == 0) return;
    const AttentionArgs args = attention_args(p);
    if (type_ == Element::f32) return run(attention_f32(args, stream_), "paged_attention", p.q.shape());
    const AttentionWorkArgs work = attention_work(p);
#if INFINILM_SM90
    if (is_hopper_) return run(attention_sm90(args, work, stream_), "paged_attention", p.q.shape());
#endif
    run(attention(args, work, stream_), "paged_attention", p.q.shape());
}

void CudaBackend::act_mul(const ActMulParams& p) {
    activate();
    if (p.out.numel() > 0) run(cuda::act_mul(act_mul_args(p), stream_), "act_mul", p.out.shape());
}

void CudaBackend::clip(const ClipParams& p) {
    activate();
    if (p.x.numel() > 0) run(cuda::clip(clip_args(p), stream_), "clip", p.x.shape());
}

void CudaBackend::soft_cap(const SoftCapParams& p) {
    activate();
    run(cuda::soft_cap(soft_cap_args(p), stream_), "soft_cap", p.x.shape());
}

void CudaBackend::gather_rows(const GatherRowsParams& p) {
    activate();
    if (p.out.numel() == 0) return;
    run(cuda::gather_rows({.x = p.x.data(),
                           .rows = p.rows.as<const int>(),
                           .out = p.out.data(),
                           .x_stride = p.x.stride(0),
                           .out_stride = p.out.stride(0),
                           .num_rows = count(p.rows.shape(0)),
                           .hidden_size = count(p.x.shape(1)),
                           .type = type_},
                          stream_),
        "gather_rows", p.out.shape());
}

void CudaBackend::update_step(const UpdateStepParams& p) {
    activate();
    const int num_tokens = p.rows ? count(p.ids.shape(0)) : 0, num_entries = p.entries ? count(p.entries.shape(0)) : 0;
    const UpdateStepArgs args{p.previous_ids.as<const int>(),
                              p.rows.as<const int>(),
                              p.ids.as<int>(),
                              num_tokens,
                              p.table.as<int>(),
                              p.entries.as<const int2>(),
                              num_entries};
    run(cuda::update_step(args, stream_), "update_step", std::array<int64_t, 2>{num_tokens, num_entries});
}

void CudaBackend::sum_parts(const SumPartsParams& p) {
    activate();
    run(cuda::sum_parts({.parts = p.parts.data(),
                         .out = p.out.data(),
                         .num_parts = count(p.parts.shape(0)),
                         .size = p.out.numel(),
                         .type = element(p.out.dtype())},
                        stream_),
        "sum_parts", p.parts.shape());
}

std::unique_ptr<Backend> make_backend(const CudaOptions& options) { return std::make_unique<CudaBackend>(options); }

}  // namespace infinilm::cuda
