// The ops, one by one: what the property tests hold against the numpy reference on every instruction set.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <mutex>

#include "bind/bind.h"
#include "core/check.h"
#include "core/enum_names.h"
#include "core/random.h"
#include "core/topology.h"
#include "cpu/cpu_backend.h"
#include "cpu/isa.h"
#include "cpu/machine_limits.h"
#include "ops/cuda_library.h"
#include "ops/ops.h"
#include "ops/values.h"

namespace infinilm {

namespace {

using OptionalTensor = std::optional<Tensor>;

TensorView optional_view(const OptionalTensor& t) { return t ? t->view() : TensorView(); }

TensorView output(const char* op, const char* argument, const Tensor& t) {
    if (t.read_only) throw Error(concat(op, ": ", argument, ": the tensor is read-only; pass a writable one"));
    return t;
}

LinearKind linear_kind(const std::string& text) {
    if (text == "plain") return LinearKind::plain;
    if (text == "act_mul") return LinearKind::act_mul;
    if (text == "qkv") return LinearKind::qkv;
    if (text == "by_head") return LinearKind::by_head;
    throw ConfigError("unknown kind of linear '" + text + "'; expected plain, act_mul, qkv or by_head");
}

// A backend serves one thread at a time, as that of a rank does; but several threads of Python may have this one.
struct SharedBackend {
    std::unique_ptr<Backend> backend;
    std::mutex in_use;
};

class InUse {
public:
    explicit InUse(SharedBackend& shared) : backend_(*shared.backend), lock_(shared.in_use, std::try_to_lock) {
        if (!lock_) throw Error("this Backend is in use by another thread; give each thread its own");
    }
    operator Backend&() const { return backend_; }

private:
    Backend& backend_;
    std::unique_lock<std::mutex> lock_;
};

std::shared_ptr<SharedBackend> make_backend(const std::string& device, const std::string& isa, int num_threads,
                                            const std::string& compute_dtype) {
    if (device_from_string(device).kind != DeviceKind::cpu)
        throw DeviceError("Backend: expected 'cpu', got '" + device + "'; other devices are used through InferEngine");
    auto shared = std::make_shared<SharedBackend>();
    shared->backend = cpu::make_cpu_backend(
        {.num_threads = num_threads, .isa = isa, .compute_dtype = dtype_from_string(compute_dtype)});
    return shared;
}

}  // namespace

void bind_ops(nb::module_& m) {
    using namespace nb::literals;
    using Release = nb::call_guard<ReleaseGil>;

    m.def(
        "cpu_isas",
        [] {
            std::vector<std::string> names;
            for (const cpu::Kernels* kernels : cpu::available_kernels()) names.emplace_back(kernels->name);
            return names;
        },
        "Builds of the CPU kernels that this machine can run, slowest first.");
    m.def(
        "selected_cpu_isa", [] { return std::string(cpu::select_kernels().name); },
        "The one used unless told otherwise.");
    m.def(
        "cpu_multiplies_bf16", [] { return cpu::select_kernels().multiplies_bf16(); },
        "Whether it multiplies bfloat16 by bfloat16, so that compute_dtype bfloat16 rounds the inputs of linears.");
    m.def(
        "parse_device",
        [](const std::string& text) {
            const Device device = device_from_string(text);
            return std::pair(std::string(device.kind == DeviceKind::cpu ? "cpu" : "cuda"), device.index);
        },
        "device"_a, "Kind and index of a device such as 'cuda:1'. ConfigError: it is none.");
    m.def(
        "cuda_devices",
        [] {
            nb::list out;
            for (const CudaDevice& device : cuda_devices()) {
                nb::dict entry;
                entry["name"] = device.name;
                entry["compute_capability"] = concat(device.major, ".", device.minor);
                entry["total_bytes"] = device.total_bytes;
                entry["num_sms"] = device.num_sms;
                out.append(entry);
            }
            return out;
        },
        nb::sig("def cuda_devices() -> list[dict[str, typing.Any]]"),
        "The usable GPUs, at least one. DeviceError: why there is none.");
    m.def("cuda_free_bytes", &cuda_free_bytes, "device"_a,
          "Bytes of memory that are free on a GPU. Takes some of them, if this process does not use that GPU yet.");
    m.def("default_num_threads", &default_num_threads, "Cores this process may use, no more than its cgroups' quota.");
    m.def("uniform", &uniform, "seed"_a, "position"_a, "The uniform draw in [0, 1) of a request's seed at a position.");
    using Seeds = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Draws = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    m.def(
        "fill_uniform",
        [](Seeds seeds, Seeds positions, Draws out) {
            if (seeds.size() != out.size() || positions.size() != out.size())
                throw Error(concat("fill_uniform: expected as many seeds and positions as draws, got ", seeds.size(),
                                   ", ", positions.size(), " and ", out.size()));
            for (size_t i = 0; i < out.size(); ++i) out.data()[i] = uniform(seeds.data()[i], positions.data()[i]);
        },
        "seeds"_a.noconvert(), "positions"_a.noconvert(), "out"_a.noconvert(), "uniform() for many requests at once.");
    using Changed = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Penalties = nb::ndarray<const float, nb::shape<3>, nb::c_contig, nb::device::cpu>;
    using ChangeTokens = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
    m.def(
        "change_logits",
        [](Changed logits, Penalties penalties, ChangeTokens tokens) {
            const auto n = static_cast<int64_t>(logits.size()), num_changes = static_cast<int64_t>(tokens.shape(0));
            std::array<int32_t, 2> row{0, static_cast<int32_t>(num_changes)};
            std::vector<int32_t> listed(tokens.data(), tokens.data() + tokens.size());
            const LogitChanges changes{
                .change_rows = TensorView(row.data(), DType::int32, {1, 2}),
                .penalties = TensorView(const_cast<float*>(penalties.data()), DType::float32, {1, 3}),
                .change_tokens = TensorView(listed.data(), DType::int32, {num_changes, 3})};
            const Check check("change_logits");
            check_changes(check, changes, n);
            check.require(num_changes == 0 || listed[listed.size() - 3] >= 0,
                          "tokens: the last one is -1, which is the token that a step computes, and here is none");
            change_logits({.logits = TensorView(logits.data(), DType::float32, {1, n}),
                           .changes = changes,
                           .input_ids = {},
                           .logits_rows = {}});
        },
        "logits"_a.noconvert(), "penalties"_a.noconvert(), "tokens"_a.noconvert(),
        "What penalties [3] and tokens [num_changes, 3], as Batch has them for each row, change in logits "
        "[vocab_size], in place.");
    m.def(
        "measure_cpu_limits",
        [](int num_threads, const std::string& compute_dtype, int64_t buffer_bytes) {
            const auto limits = cpu::measure_limits(
                {.num_threads = num_threads, .isa = "", .compute_dtype = dtype_from_string(compute_dtype)},
                buffer_bytes);
            return std::pair(limits.read_bytes_per_second, limits.dot_flops_per_second);
        },
        "num_threads"_a = 0, "compute_dtype"_a = "float32", "buffer_bytes"_a = int64_t{1} << 30, Release(),
        "Measured read bandwidth in bytes/s and arithmetic peak in flop/s. buffer_bytes: what is read, 64 MiB to 1 "
        "GiB.");

    nb::class_<PreparedLinear>(m, "PreparedLinear", "Weights of a linear in a backend's own form.")
        .def_ro("in_features", &PreparedLinear::in_features)
        .def_ro("out_features", &PreparedLinear::out_features)
        .def_prop_ro(
            "tensors",
            [](const PreparedLinear& linear) {
                const auto [panels, scales] = linear.tensors();
                return std::pair(panels ? std::optional(panels) : std::nullopt,
                                 scales ? std::optional(scales) : std::nullopt);
            },
            "Panels and scales, as adopt_linear takes them; None where there are none.");

    nb::class_<SharedBackend>(m, "Backend", "The ops of one device, for tests and experiments; one thread at a time.")
        .def(nb::new_(&make_backend), "device"_a, "isa"_a = "", "num_threads"_a = 0, "compute_dtype"_a = "float32")
        .def(
            "prepare_linear",
            [](SharedBackend& shared, const std::vector<std::pair<Tensor, OptionalTensor>>& parts,
               const std::string& kind, int head_dim, const std::string& quantization,
               const std::vector<std::string>& types) {
                const InUse b(shared);
                std::vector<LinearPart> joined;
                for (const auto& [weight, bias] : parts) joined.push_back({weight, bias.value_or(Tensor())});
                for (size_t i = 0; i < std::min(types.size(), joined.size()); ++i)
                    joined[i].blocks = blocks_from_string(types[i]);
                return std::shared_ptr<PreparedLinear>(ops::prepare_linear(
                    b, std::move(joined), linear_kind(kind), head_dim, quantization_from_string(quantization)));
            },
            "parts"_a, "kind"_a = "plain", "head_dim"_a = 0, "quantization"_a = "none",
            "types"_a = std::vector<std::string>(),
            "parts: weight and bias of each. types: of parts that are blocks, as load_param takes them.")
        .def(
            "adopt_linear",
            [](SharedBackend& shared, const Tensor& panels, const OptionalTensor& scales,
               const std::vector<int64_t>& out_features, int64_t in_features, const std::string& kind, int head_dim) {
                const InUse b(shared);
                PackedSource source{.tensors = {panels, scales.value_or(Tensor())},
                                    .kind = linear_kind(kind),
                                    .head_dim = head_dim,
                                    .in_features = in_features,
                                    .columns = {0, in_features}};
                for (const int64_t rows : out_features)
                    source.parts.push_back({.out_features = rows, .rows = {{0, rows}}, .bias = {}});
                return std::shared_ptr<PreparedLinear>(static_cast<Backend&>(b).adopt_linear(source));
            },
            "panels"_a, "scales"_a, "out_features"_a, "in_features"_a, "kind"_a = "plain", "head_dim"_a = 0,
            "A linear of the tensors of another one; out_features: of each part.")
        .def(
            "unpack_linear",
            [](SharedBackend& shared, const PreparedLinear& linear, size_t part) {
                const InUse b(shared);
                return static_cast<Backend&>(b).unpack_linear(linear, part);
            },
            "linear"_a, "part"_a = 0, Release())
        .def(
            "embedding",
            [](SharedBackend& shared, const Tensor& ids, const Tensor& table, const Tensor& out,
               std::optional<int> first_id, const std::string& quantization, float multiplier) {
                const InUse b(shared);
                Check check("embedding");
                check.tensor("table", table, {"vocab_size", "hidden_size"});
                const auto prepared = ops::prepare_linear(b, {{.weight = table, .bias = {}}}, LinearKind::plain, 0,
                                                          quantization_from_string(quantization));
                ops::embedding(b, {.ids = ids,
                                   .table = *prepared,
                                   .out = output("embedding", "out", out),
                                   .first_id = first_id,
                                   .multiplier = multiplier});
            },
            "ids"_a, "table"_a, "out"_a, "first_id"_a = nb::none(), "quantization"_a = "none", "multiplier"_a = 1.0f,
            Release(), "table: [vocab_size, hidden_size], prepared for this call, or the rows of it from first_id on.")
        .def(
            "rms_norm",
            [](SharedBackend& shared, const Tensor& x, const Tensor& weight, const Tensor& out, float eps,
               const OptionalTensor& mean_square) {
                const InUse b(shared);
                ops::rms_norm(b, {.x = x,
                                  .weight = weight,
                                  .out = output("rms_norm", "out", out),
                                  .eps = eps,
                                  .mean_square = optional_view(mean_square)});
            },
            "x"_a, "weight"_a, "out"_a, "eps"_a, "mean_square"_a = nb::none(), Release())
        .def(
            "mean_square",
            [](SharedBackend& shared, const Tensor& x, const Tensor& out, float multiplier) {
                const InUse b(shared);
                ops::mean_square(b, {.x = x, .out = output("mean_square", "out", out), .multiplier = multiplier});
            },
            "x"_a, "out"_a, "multiplier"_a = 1.0f, Release())
        .def(
            "add_rms_norm",
            [](SharedBackend& shared, const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
               const Tensor& out, float eps, float multiplier, float scale) {
                const InUse b(shared);
                ops::add_rms_norm(b, {.x = x,
                                      .residual = output("add_rms_norm", "residual", residual),
                                      .weight = optional_view(weight),
                                      .out = output("add_rms_norm", "out", out),
                                      .eps = eps,
                                      .multiplier = multiplier,
                                      .scale = scale});
            },
            "x"_a, "residual"_a, "weight"_a.none(), "out"_a, "eps"_a, "multiplier"_a = 1.0f, "scale"_a = 1.0f,
            Release())
        .def(
            "linear",
            [](SharedBackend& shared, const Tensor& x, const PreparedLinear& weight, const Tensor& out,
               const OptionalTensor& residual, const OptionalTensor& norm, const OptionalTensor& scratch, float eps,
               const std::string& activation) {
                const InUse b(shared);
                ops::linear(b, {.x = x,
                                .weight = weight,
                                .norm = {.weight = optional_view(norm), .scratch = optional_view(scratch), .eps = eps},
                                .residual = optional_view(residual),
                                .out = output("linear", "out", out),
                                .activation = from_string<Activation>("activation", activation)});
            },
            "x"_a, "weight"_a, "out"_a, "residual"_a = nb::none(), "norm"_a = nb::none(), "scratch"_a = nb::none(),
            "eps"_a = 0.0f, "activation"_a = "silu", Release(),
            "With norm ([in_features]): of rms_norm(x); scratch is as large as x.")
        .def(
            "head_linear",
            [](SharedBackend& shared, const Tensor& x, const PreparedLinear& weight, const Tensor& out) {
                const InUse b(shared);
                ops::head_linear(b, {.x = x, .weight = weight, .out = output("head_linear", "out", out)});
            },
            "x"_a, "weight"_a, "out"_a, Release(), "x: [num_tokens, num_heads, in_features]; weight: by_head.")
        .def(
            "rope_table",
            [](SharedBackend& shared, const Tensor& positions, const Tensor& inv_freq, float attention_factor,
               const Tensor& cos_sin, float scale_beta, int scale_positions) {
                const InUse b(shared);
                ops::rope_table(b, {.positions = positions,
                                    .inv_freq = inv_freq,
                                    .attention_factor = attention_factor,
                                    .scale_beta = scale_beta,
                                    .scale_positions = scale_positions,
                                    .cos_sin = output("rope_table", "cos_sin", cos_sin)});
            },
            "positions"_a, "inv_freq"_a, "attention_factor"_a, "cos_sin"_a, "scale_beta"_a = 0.0f,
            "scale_positions"_a = 1, Release())
        .def(
            "qk_norm_rope_store_kv",
            [](SharedBackend& shared, const Tensor& qkv, const OptionalTensor& cos_sin, const OptionalTensor& q_norm,
               const OptionalTensor& k_norm, const OptionalTensor& slot_mapping, const Tensor& k_cache,
               const OptionalTensor& v_cache, int num_heads, int num_kv_heads, int head_dim, float eps,
               const OptionalTensor& k_scales, const OptionalTensor& v_scales, const OptionalTensor& v_norm,
               const OptionalTensor& q_turned) {
                const InUse b(shared);
                const char* op = "qk_norm_rope_store_kv";
                ops::qk_norm_rope_store_kv(b, {.qkv = output(op, "qkv", qkv),
                                               .cos_sin = optional_view(cos_sin),
                                               .q_cos_sin = {},
                                               .q_turned = optional_view(q_turned),
                                               .q_norm = optional_view(q_norm),
                                               .k_norm = optional_view(k_norm),
                                               .v_norm = optional_view(v_norm),
                                               .slot_mapping = optional_view(slot_mapping),
                                               .k_cache = output(op, "k_cache", k_cache),
                                               .v_cache = v_cache ? output(op, "v_cache", *v_cache) : TensorView(),
                                               .k_scales = k_scales ? output(op, "k_scales", *k_scales) : TensorView(),
                                               .v_scales = v_scales ? output(op, "v_scales", *v_scales) : TensorView(),
                                               .num_heads = num_heads,
                                               .num_kv_heads = num_kv_heads,
                                               .head_dim = head_dim,
                                               .eps = eps});
            },
            "qkv"_a, "cos_sin"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), "slot_mapping"_a.none(), "k_cache"_a,
            "v_cache"_a.none(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "eps"_a, "k_scales"_a = nb::none(),
            "v_scales"_a = nb::none(), "v_norm"_a = nb::none(), "q_turned"_a = nb::none(), Release())
        .def(
            "paged_attention",
            [](SharedBackend& shared, const Tensor& q, const Tensor& k_cache, const OptionalTensor& v_cache,
               const Tensor& block_table, const Tensor& cu_seqlens_q, const Tensor& context_lens, const Tensor& out,
               float softmax_scale, int sliding_window, const OptionalTensor& k_scales, const OptionalTensor& v_scales,
               float score_cap, const OptionalTensor& sinks) {
                const InUse b(shared);
                ops::paged_attention(b, {.q = q,
                                         .k_cache = k_cache,
                                         .v_cache = optional_view(v_cache),
                                         .k_scales = optional_view(k_scales),
                                         .v_scales = optional_view(v_scales),
                                         .block_table = block_table,
                                         .cu_seqlens_q = cu_seqlens_q,
                                         .context_lens = context_lens,
                                         .out = output("paged_attention", "out", out),
                                         .sinks = optional_view(sinks),
                                         .softmax_scale = softmax_scale,
                                         .score_cap = score_cap,
                                         .sliding_window = sliding_window});
            },
            "q"_a, "k_cache"_a, "v_cache"_a.none(), "block_table"_a, "cu_seqlens_q"_a, "context_lens"_a, "out"_a,
            "softmax_scale"_a, "sliding_window"_a = 0, "k_scales"_a = nb::none(), "v_scales"_a = nb::none(),
            "score_cap"_a = 0.0f, "sinks"_a = nb::none(), Release())
        .def(
            "act_mul",
            [](SharedBackend& shared, const Tensor& gate_up, const Tensor& out, const std::string& activation,
               const OptionalTensor& up) {
                const InUse b(shared);
                ops::act_mul(b, {.gate_up = gate_up,
                                 .out = output("act_mul", "out", out),
                                 .activation = from_string<Activation>("activation", activation),
                                 .up = optional_view(up)});
            },
            "gate_up"_a, "out"_a, "activation"_a = "silu", "up"_a = nb::none(), Release())
        .def(
            "soft_cap",
            [](SharedBackend& shared, const Tensor& x, float cap) {
                const InUse b(shared);
                ops::soft_cap(b, {.x = output("soft_cap", "x", x), .cap = cap});
            },
            "x"_a, "cap"_a, Release(), "x = cap * tanh(x / cap), in place.")
        .def(
            "gather_rows",
            [](SharedBackend& shared, const Tensor& x, const Tensor& rows, const Tensor& out) {
                const InUse b(shared);
                ops::gather_rows(b, {.x = x, .rows = rows, .out = output("gather_rows", "out", out)});
            },
            "x"_a, "rows"_a, "out"_a, Release())
        .def(
            "route",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& ids, const Tensor& weights,
               const std::string& scoring, bool normalize, float scale, const OptionalTensor& correction_bias,
               int num_groups, int top_groups, const OptionalTensor& expert_scales, int group_best) {
                const InUse b(shared);
                ops::route(b, {.logits = logits,
                               .correction_bias = optional_view(correction_bias),
                               .expert_scales = optional_view(expert_scales),
                               .ids = output("route", "ids", ids),
                               .weights = output("route", "weights", weights),
                               .scoring = from_string<Scoring>("scoring", scoring),
                               .normalize = normalize,
                               .scale = scale,
                               .num_groups = num_groups,
                               .top_groups = top_groups,
                               .group_best = group_best});
            },
            "logits"_a, "ids"_a, "weights"_a, "scoring"_a = "softmax", "normalize"_a = false, "scale"_a = 1.0f,
            "correction_bias"_a = nb::none(), "num_groups"_a = 1, "top_groups"_a = 1, "expert_scales"_a = nb::none(),
            "group_best"_a = 2, Release())
        .def(
            "experts",
            [](SharedBackend& shared, const Tensor& x, const Tensor& ids, const Tensor& weights,
               const std::vector<std::shared_ptr<PreparedLinear>>& gate_up,
               const std::vector<std::shared_ptr<PreparedLinear>>& down, const Tensor& out, const Tensor& inner,
               const Tensor& parts, const OptionalTensor& shared_expert, const OptionalTensor& shared_gate,
               const OptionalTensor& residual) {
                const InUse b(shared);
                const auto experts =
                    ops::prepare_experts(b, {gate_up.begin(), gate_up.end()}, {down.begin(), down.end()});
                ops::experts(b, {.x = x,
                                 .ids = ids,
                                 .weights = weights,
                                 .experts = *experts,
                                 .shared = optional_view(shared_expert),
                                 .shared_gate = optional_view(shared_gate),
                                 .residual = optional_view(residual),
                                 .out = output("experts", "out", out),
                                 .inner = output("experts", "inner", inner),
                                 .parts = output("experts", "parts", parts)});
            },
            "x"_a, "ids"_a, "weights"_a, "gate_up"_a, "down"_a, "out"_a, "inner"_a, "parts"_a, "shared"_a = nb::none(),
            "shared_gate"_a = nb::none(), "residual"_a = nb::none(), Release(),
            "gate_up, down: [num_experts], put together for this call.")
        .def(
            "lora",
            [](SharedBackend& shared, const Tensor& x,
               const std::vector<
                   std::tuple<std::shared_ptr<PreparedLinear>, std::shared_ptr<PreparedLinear>, float, Tensor>>& parts,
               const Tensor& out, const Tensor& inner, const Tensor& delta) {
                const InUse own(shared);
                std::vector<LoraPart> listed;
                for (const auto& [a, b, scale, rows] : parts)
                    listed.push_back({.a = a.get(), .b = b.get(), .scale = scale, .rows = rows});
                ops::lora(own, {.x = x,
                                .parts = listed,
                                .out = output("lora", "out", out),
                                .inner = output("lora", "inner", inner),
                                .delta = output("lora", "delta", delta)});
            },
            "x"_a, "parts"_a, "out"_a, "inner"_a, "delta"_a, Release(),
            "parts: (a, b, scale, rows) of each adapter; out is changed in place.")
        .def(
            "causal_conv",
            [](SharedBackend& shared, const Tensor& x, const Tensor& weight, const Tensor& state,
               const Tensor& cu_seqlens_q, const Tensor& state_in, const Tensor& state_out, const Tensor& out) {
                const InUse b(shared);
                ops::causal_conv(
                    b, {.x = x,
                        .weight = weight,
                        .state = output("causal_conv", "state", state),
                        .sequences = {.cu_seqlens_q = cu_seqlens_q, .state_in = state_in, .state_out = state_out},
                        .out = output("causal_conv", "out", out)});
            },
            "x"_a, "weight"_a, "state"_a, "cu_seqlens_q"_a, "state_in"_a, "state_out"_a, "out"_a, Release())
        .def(
            "delta_rule",
            [](SharedBackend& shared, const Tensor& qkv, const Tensor& z, const Tensor& a, const Tensor& b,
               const Tensor& decay_rate, const Tensor& dt_bias, const Tensor& norm, const Tensor& state,
               const Tensor& cu_seqlens_q, const Tensor& state_in, const Tensor& state_out, const Tensor& gates,
               const Tensor& out, int num_k_heads, float eps) {
                const InUse own(shared);
                ops::delta_rule(
                    own, {.qkv = qkv,
                          .z = z,
                          .a = a,
                          .b = b,
                          .decay_rate = decay_rate,
                          .dt_bias = dt_bias,
                          .norm = norm,
                          .state = output("delta_rule", "state", state),
                          .sequences = {.cu_seqlens_q = cu_seqlens_q, .state_in = state_in, .state_out = state_out},
                          .gates = output("delta_rule", "gates", gates),
                          .out = output("delta_rule", "out", out),
                          .num_k_heads = num_k_heads,
                          .eps = eps});
            },
            "qkv"_a, "z"_a, "a"_a, "b"_a, "decay_rate"_a, "dt_bias"_a, "norm"_a, "state"_a, "cu_seqlens_q"_a,
            "state_in"_a, "state_out"_a, "gates"_a, "out"_a, "num_k_heads"_a, "eps"_a, Release())
        .def(
            "sum_parts",
            [](SharedBackend& shared, const Tensor& parts, const Tensor& out) {
                const InUse b(shared);
                ops::sum_parts(b, {.parts = parts, .out = output("sum_parts", "out", out)});
            },
            "parts"_a, "out"_a, Release())
        .def(
            "find_best",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& best, const Tensor& ids, int32_t first_id,
               const OptionalTensor& allowed, const OptionalTensor& allowed_row) {
                const InUse b(shared);
                ops::find_best(b, {.logits = logits,
                                   .first_id = first_id,
                                   .best = output("find_best", "best", best),
                                   .ids = output("find_best", "ids", ids),
                                   .mask = {optional_view(allowed), optional_view(allowed_row)}});
            },
            "logits"_a, "best"_a, "ids"_a, "first_id"_a = 0, "allowed"_a = nb::none(), "allowed_row"_a = nb::none(),
            Release())
        .def(
            "log_probs",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& drawn, const Tensor& num_logprobs,
               const Tensor& ids, const Tensor& logprobs) {
                const InUse b(shared);
                ops::log_probs(b, {.logits = logits,
                                   .drawn = drawn,
                                   .num_logprobs = num_logprobs,
                                   .ids = output("log_probs", "ids", ids),
                                   .logprobs = output("log_probs", "logprobs", logprobs)});
            },
            "logits"_a, "drawn"_a, "num_logprobs"_a, "ids"_a, "logprobs"_a, Release())
        .def(
            "sample",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
               const Tensor& top_p, const Tensor& min_p, const Tensor& random_val, const Tensor& ids,
               const OptionalTensor& token_ids, const OptionalTensor& allowed, const OptionalTensor& allowed_row) {
                const InUse b(shared);
                ops::sample(b, {.logits = logits,
                                .temperature = temperature,
                                .top_k = top_k,
                                .top_p = top_p,
                                .min_p = min_p,
                                .random_val = random_val,
                                .ids = output("sample", "ids", ids),
                                .token_ids = optional_view(token_ids),
                                .mask = {optional_view(allowed), optional_view(allowed_row)}});
                if (readable(ids)) check_sampled(ids);
            },
            "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "random_val"_a, "ids"_a,
            "token_ids"_a = nb::none(), "allowed"_a = nb::none(), "allowed_row"_a = nb::none(), Release());
}

}  // namespace infinilm
