// ModelSpec, Batch and the engine.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <future>

#include "bind/bind.h"
#include "cpu/packed_linear.h"
#include "engine/infer_engine.h"
#include "engine/workspace.h"

namespace infinilm {

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class Array>
Tensor view(const Array& array) {
    return tensor_from_array(nb::ndarray<nb::ro>(array));
}
template <class Array>
Tensor view(const std::optional<Array>& array) {
    return array ? view(*array) : Tensor();
}

nb::dict param_shapes(const std::vector<ParamRow>& rows) {
    nb::dict out;
    for (const ParamRow& row : rows) {
        nb::list shape;
        for (int64_t size : row.shape) shape.append(size);
        out[row.name.c_str()] = nb::tuple(shape);
    }
    return out;
}

cpu::Format format_from_string(const std::string& text) {
    using cpu::Format;
    for (const auto& [name, format] : {std::pair("float32", Format::f32),
                                       {"bfloat16", Format::bf16},
                                       {"float16", Format::f16},
                                       {"int8", Format::int8},
                                       {"int4", Format::int4},
                                       {"q8_0", Format::q8_0},
                                       {"q4_0", Format::q4_0}})
        if (text == name) return format;
    throw ConfigError("unknown format '" + text +
                      "' of weights; expected float32, bfloat16, float16, int8, int4, q8_0 or q4_0");
}

nb::dict packed_shapes(const Params& params, const std::string& format) {
    nb::dict out;
    for (const LinearWeights* linear : params.linears()) {
        int64_t out_features = 0, in_features = 0;
        for (const size_t index : linear->rows) {
            const ParamRow& row = params.rows()[index];
            if (row.shape.size() != 2) continue;
            if (linear->kind != LinearKind::act_mul || row.part == 0) out_features += row.shape[0];
            in_features = row.shape[1];
        }
        const cpu::PackedShapes shapes =
            cpu::packed_shapes(format_from_string(format), linear->kind, out_features, in_features);
        const auto add = [&](const char* suffix, const cpu::PackedShape& tensor) {
            nb::list shape;
            for (const int64_t size : tensor.shape) shape.append(size);
            if (!tensor.shape.empty())
                out[(linear->name + suffix).c_str()] =
                    nb::make_tuple(std::string(name(tensor.dtype)), nb::tuple(shape));
        };
        add(".panels", shapes.panels);
        add(".scales", shapes.scales);
    }
    return out;
}

QkNorm qk_norm_from_string(const std::string& text) {
    for (const QkNorm norm : {QkNorm::none, QkNorm::head, QkNorm::all})
        if (text == name(norm)) return norm;
    throw ConfigError(concat("qk_norm '", text, "' is not one of none, head, all"));
}

void bind_spec(nb::module_& m) {
    nb::class_<AttentionSpec>(m, "AttentionSpec")
        .def_rw("num_heads", &AttentionSpec::num_heads)
        .def_rw("num_kv_heads", &AttentionSpec::num_kv_heads)
        .def_rw("head_dim", &AttentionSpec::head_dim)
        .def_rw("softmax_scale", &AttentionSpec::softmax_scale)
        .def_rw("score_cap", &AttentionSpec::score_cap)
        .def_rw("qkv_bias", &AttentionSpec::qkv_bias)
        .def_rw("out_bias", &AttentionSpec::out_bias)
        .def_prop_rw(
            "qk_norm", [](const AttentionSpec& s) { return std::string(name(s.qk_norm)); },
            [](AttentionSpec& s, const std::string& text) { s.qk_norm = qk_norm_from_string(text); });
    nb::class_<MlpSpec>(m, "MlpSpec")
        .def_rw("intermediate_size", &MlpSpec::intermediate_size)
        .def_rw("bias", &MlpSpec::bias)
        .def_prop_rw(
            "activation", [](const MlpSpec& s) { return std::string(name(s.activation)); },
            [](MlpSpec& s, const std::string& text) { s.activation = activation_from_string(text); });
    nb::class_<ExpertsSpec>(m, "ExpertsSpec", "What layers with experts have in place of the MLP.")
        .def_rw("count", &ExpertsSpec::count, "0: no layer has any.")
        .def_rw("top_k", &ExpertsSpec::top_k)
        .def_rw("intermediate_size", &ExpertsSpec::intermediate_size, "Of each expert.")
        .def_rw("shared_intermediate_size", &ExpertsSpec::shared_intermediate_size,
                "Of one that all tokens go to; 0: there is none.")
        .def_rw("norm_topk_prob", &ExpertsSpec::norm_topk_prob);
    nb::class_<RopeSpec>(m, "RopeSpec")
        .def(
            "__init__",
            [](RopeSpec* self, std::vector<float> inv_freq, float attention_factor) {
                new (self) RopeSpec{std::move(inv_freq), attention_factor};
            },
            nb::arg("inv_freq"), nb::arg("attention_factor") = 1.0f)
        .def_rw("inv_freq", &RopeSpec::inv_freq, "[rotary_dim / 2]")
        .def_rw("attention_factor", &RopeSpec::attention_factor);
    nb::class_<LayerSpec>(m, "LayerSpec", "What differs from layer to layer.")
        .def(
            "__init__",
            [](LayerSpec* self, int sliding_window, int rope, bool experts) {
                new (self) LayerSpec{sliding_window, rope, experts};
            },
            nb::arg("sliding_window") = 0, nb::arg("rope") = 0, nb::arg("experts") = false)
        .def_rw("sliding_window", &LayerSpec::sliding_window, "0: the layer sees everything.")
        .def_rw("rope", &LayerSpec::rope, "Which of `ropes` turns its q and k; -1: none.")
        .def_rw("experts", &LayerSpec::experts, "It has experts in place of the MLP.");
    nb::class_<ModelSpec>(m, "ModelSpec", "Everything the engine needs to know of a model, as plain numbers.")
        .def(nb::init<>())
        .def_prop_rw(
            "dtype", [](const ModelSpec& s) { return std::string(name(s.dtype)); },
            [](ModelSpec& s, const std::string& text) { s.dtype = dtype_from_string(text); })
        .def_prop_rw(
            "quantization", [](const ModelSpec& s) { return std::string(name(s.quantization)); },
            [](ModelSpec& s, const std::string& text) { s.quantization = quantization_from_string(text); })
        .def_rw("vocab_size", &ModelSpec::vocab_size)
        .def_rw("hidden_size", &ModelSpec::hidden_size)
        .def_rw("num_layers", &ModelSpec::num_layers)
        .def_rw("max_model_len", &ModelSpec::max_model_len)
        .def_rw("rms_norm_eps", &ModelSpec::rms_norm_eps)
        .def_rw("pre_norms", &ModelSpec::pre_norms)
        .def_rw("post_norms", &ModelSpec::post_norms)
        .def_rw("norm_offset", &ModelSpec::norm_offset)
        .def_rw("embedding_multiplier", &ModelSpec::embedding_multiplier)
        .def_rw("residual_multiplier", &ModelSpec::residual_multiplier)
        .def_rw("logit_multiplier", &ModelSpec::logit_multiplier)
        .def_rw("logit_cap", &ModelSpec::logit_cap)
        .def_rw("tie_word_embeddings", &ModelSpec::tie_word_embeddings)
        .def_rw("attention", &ModelSpec::attention)
        .def_rw("mlp", &ModelSpec::mlp)
        .def_rw("experts", &ModelSpec::experts)
        .def_rw("ropes", &ModelSpec::ropes)
        .def_rw("layers", &ModelSpec::layers, "[num_layers]")
        .def(
            "kv_bytes_per_token",
            [](const ModelSpec& s, const std::string& dtype) {
                return KvCache::bytes_per_token(s, dtype_from_string(dtype));
            },
            nb::arg("dtype"), "Of a KV cache in this dtype: all layers, keys and values.");
    m.def(
        "param_shapes", [](const ModelSpec& spec) { return param_shapes(Params(spec).rows()); }, nb::arg("spec"),
        nb::sig("def param_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]"),
        "What a checkpoint of this model holds, without an engine.");
    m.def(
        "packed_shapes",
        [](const ModelSpec& spec, const std::string& format) { return packed_shapes(Params(spec), format); },
        nb::arg("spec"), nb::arg("format"),
        nb::sig("def packed_shapes(spec: ModelSpec, format: str) -> dict[str, tuple[str, tuple[int, ...]]]"),
        "Names, dtypes and shapes of the tensors that linears become when all are packed for CPUs in a format: "
        "float32, bfloat16, float16, int8, int4, q8_0 or q4_0.");
    m.def(
        "linears",
        [](const ModelSpec& spec) {
            const Params params(spec);
            nb::dict out;
            for (const LinearWeights* linear : params.linears()) {
                nb::list names;
                for (const size_t index : linear->rows)
                    if (params.rows()[index].shape.size() == 2) names.append(params.rows()[index].name);
                const bool pairs = linear->kind == LinearKind::act_mul;
                out[linear->name.c_str()] = nb::make_tuple(names, pairs);
            }
            return out;
        },
        nb::arg("spec"), nb::sig("def linears(spec: ModelSpec) -> dict[str, tuple[list[str], bool]]"),
        "By their names in packed checkpoints: the weights that each linear joins, and whether these are gate and up.");
    m.attr("PACKED_LAYOUT_VERSION") = cpu::packed_layout_version;
    m.def(
        "weight_bytes",
        [](const ModelSpec& spec, const std::string& dtype, int num_ranks) {
            return weight_bytes(spec, dtype_from_string(dtype), num_ranks);
        },
        nb::arg("spec"), nb::arg("dtype"), nb::arg("num_ranks") = 1,
        "Bytes of the parameters as tensors of a dtype: of the rank that has most.");
    m.def(
        "param_bytes",
        [](const ModelSpec& spec, const std::string& dtype) {
            const Params params(spec);
            nb::dict out;
            for (const ParamRow& row : params.rows())
                out[nb::str(row.name.c_str())] = params.prepared_bytes(row, dtype_from_string(dtype));
            return out;
        },
        nb::arg("spec"), nb::arg("dtype"), nb::sig("def param_bytes(spec: ModelSpec, dtype: str) -> dict[str, int]"),
        "Bytes of each parameter once it is prepared, where tensors are stored as dtype; weight_bytes is their sum.");
    m.def(
        "workspace_bytes",
        [](const ModelSpec& spec, const std::string& device, int num_ranks, int num_threads, int64_t num_tokens,
           int64_t num_rows, int64_t num_returned_rows, int64_t num_adapters, int64_t most_rank) {
            return workspace_bytes(
                spec,
                {.num_tokens = num_tokens,
                 .num_rows = num_rows,
                 .num_returned_rows = num_returned_rows,
                 .num_adapters = num_adapters,
                 .most_rank = most_rank},
                {.num_ranks = num_ranks, .device = device_from_string(device).kind, .num_threads = num_threads});
        },
        nb::arg("spec"), nb::kw_only(), nb::arg("device"), nb::arg("num_ranks"), nb::arg("num_threads"),
        nb::arg("num_tokens"), nb::arg("num_rows"), nb::arg("num_returned_rows"), nb::arg("num_adapters") = 0,
        nb::arg("most_rank") = 0,
        "Bytes that steps take at most besides weights and cache: on a CPU of all ranks, else of one GPU. spec: of the "
        "whole model. num_threads: of all ranks together; 0: one per core. A step has up to num_tokens tokens, draws "
        "tokens from up to num_rows rows of logits, and returns up to num_returned_rows rows besides. num_adapters, "
        "most_rank: of a step, and of them.");
    m.def(
        "local_spec",
        [](const ModelSpec& spec, int tp_rank, int tp_size) { return local_spec(spec, {tp_rank, tp_size}); },
        nb::arg("spec"), nb::arg("tp_rank"), nb::arg("tp_size"),
        "The part of the model that a rank of tensor parallelism has: its heads and intermediate_size. ConfigError: a "
        "tp_size that does not fit the model.");
}

// A step that was submitted. It keeps its batch, whose arrays belong to Python: the rank's thread never lets go of
// them.
class PendingStep {
public:
    PendingStep(nb::object batch, std::future<StepOutput> future, std::shared_ptr<StepAbort> abort,
                std::shared_ptr<LateMasks> masks)
        : batch_(std::move(batch)), future_(std::move(future)), abort_(std::move(abort)), masks_(std::move(masks)) {}
    ~PendingStep() {
        if (is_finalizing() || !process_.is_current()) {
            batch_.release();  // nobody to wait for, and the step may be running yet
        } else {
            if (lacks_masks()) abort_->request();
            wait();
        }
    }
    PendingStep(PendingStep&&) = default;

    void abort() { abort_->request(); }
    void give_masks() {
        if (masks_) masks_->give();
    }
    bool wait_for(double seconds) {
        process_.check();
        const ReleaseGil release;
        return !future_.valid() ||
               future_.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
    }
    StepOutput result() {
        process_.check();
        if (lacks_masks() && !abort_->requested())
            throw Error("result: the step would wait for its masks for ever; call give_masks or abort first");
        wait();
        if (!future_.valid()) throw Error("result: it was taken already; a step has one");
        return future_.get();
    }

private:
    bool lacks_masks() const { return masks_ && future_.valid() && !masks_->given(); }
    void wait() {
        const ReleaseGil release;
        if (future_.valid()) future_.wait();
    }

    OwnerProcess process_;
    nb::object batch_;
    std::future<StepOutput> future_;
    std::shared_ptr<StepAbort> abort_;
    std::shared_ptr<LateMasks> masks_;  // null: the batch has none, or had them from the start
};

void bind_batch(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Batch>(m, "Batch",
                      "One step of work; the arrays are used in place and must not change until the step is done.")
        .def(
            "__init__",
            [](Batch* self, Vector<int32_t> input_ids, Vector<int32_t> positions, Vector<int64_t> slot_mapping,
               Matrix<int32_t> block_table, Vector<int32_t> cu_seqlens_q, Vector<int32_t> context_lens,
               Vector<int32_t> logits_rows, std::optional<Vector<float>> temperature,
               std::optional<Vector<int32_t>> top_k, std::optional<Vector<float>> top_p,
               std::optional<Vector<float>> min_p, std::optional<Vector<float>> random_val,
               std::optional<Matrix<int32_t>> allowed, std::optional<Vector<int32_t>> allowed_row,
               std::optional<Vector<int32_t>> previous_rows, std::optional<Vector<int32_t>> adapter_ids,
               bool return_logits) {
                new (self) Batch{view(input_ids),   view(previous_rows), view(positions),    view(slot_mapping),
                                 view(block_table), view(cu_seqlens_q),  view(context_lens), view(adapter_ids),
                                 view(logits_rows), view(temperature),   view(top_k),        view(top_p),
                                 view(min_p),       view(random_val),    view(allowed),      view(allowed_row),
                                 return_logits};
            },
            nb::kw_only(), "input_ids"_a.noconvert(), "positions"_a.noconvert(), "slot_mapping"_a.noconvert(),
            "block_table"_a.noconvert(), "cu_seqlens_q"_a.noconvert(), "context_lens"_a.noconvert(),
            "logits_rows"_a.noconvert(), "temperature"_a.noconvert().none() = nb::none(),
            "top_k"_a.noconvert().none() = nb::none(), "top_p"_a.noconvert().none() = nb::none(),
            "min_p"_a.noconvert().none() = nb::none(), "random_val"_a.noconvert().none() = nb::none(),
            "allowed"_a.noconvert().none() = nb::none(), "allowed_row"_a.noconvert().none() = nb::none(),
            "previous_rows"_a.noconvert().none() = nb::none(), "adapter_ids"_a.noconvert().none() = nb::none(),
            "return_logits"_a = false);
    nb::class_<StepOutput>(m, "StepOutput")
        .def_prop_ro(
            "ids", [](const StepOutput& o) { return o.ids ? std::optional(o.ids) : std::nullopt; },
            "[num_rows] int32; of a step that was submitted, negative where the row cannot be sampled: see "
            "sample_fault")
        .def_prop_ro(
            "logits", [](const StepOutput& o) { return o.logits ? std::optional(o.logits) : std::nullopt; },
            "[num_rows, vocab_size] float32")
        .def_ro("aborted", &StepOutput::aborted,
                "PendingStep.abort ended the step early: there is nothing else, and what the cache holds of its tokens "
                "is not defined.");
    m.def(
        "sample_fault", [](int32_t id) { return describe(static_cast<SampleFault>(id)); }, "id"_a,
        "Why a row has a negative id: what its logits are.");
    nb::class_<PendingStep>(m, "PendingStep", "A step on its way.")
        .def("abort", &PendingStep::abort,
             "Ends the step before its next half of a layer, or before it begins; those behind it run. A step that is "
             "nearly done is done.")
        .def("give_masks", &PendingStep::give_masks,
             "Batch.allowed is complete now: a step that was submitted with late_masks may sample.")
        .def("wait", &PendingStep::wait_for, "seconds"_a, "Waits so long at most; returns whether the step is done.")
        .def("result", &PendingStep::result, "Waits for the step and gives its output, once; raises what it raised.");
}

// Element-wise, from any floating dtype and strides to any. Shapes are equal.
void copy_values(const TensorView& src, const TensorView& dst) {
    if (src.ndim() > 1) {
        for (int64_t i = 0; i < src.shape(0); ++i) copy_values(src.select(0, i), dst.select(0, i));
        return;
    }
    visit_floating(src.dtype(), [&]<class S>(S) {
        visit_floating(dst.dtype(), [&]<class D>(D) {
            for (int64_t i = 0; i < src.numel(); ++i)
                dst.as<D>()[i * dst.stride(0)] = from_float<D>(to_float(src.as<const S>()[i * src.stride(0)]));
        });
    });
}

// Whether two views of host memory, neither of them empty, have bytes between their ends in common.
bool overlap(const TensorView& a, const TensorView& b) {
    const auto ends = [](const TensorView& t) {
        int64_t first = 0, last = 0;  // elements from data()
        for (int dim = 0; dim < t.ndim(); ++dim)
            (t.stride(dim) < 0 ? first : last) += (t.shape(dim) - 1) * t.stride(dim);
        const auto at = reinterpret_cast<uintptr_t>(t.data());
        return std::pair(at + static_cast<uintptr_t>(first * size_bytes(t.dtype())),
                         at + static_cast<uintptr_t>((last + 1) * size_bytes(t.dtype())));
    };
    const auto [a_begin, a_end] = ends(a);
    const auto [b_begin, b_end] = ends(b);
    return a_begin < b_end && b_begin < a_end;
}

// A Python callback as a hook: called with the GIL, on the rank's thread, while the caller of forward waits without it.
Hook make_hook(const nb::callable& callback) {
    const std::shared_ptr<nb::callable> shared(new nb::callable(callback), delete_with_gil<nb::callable>);
    return [shared](Site site, int layer, const Tensor& value, int rank) {
        const AcquireGil gil;
        const std::string name = hook_name(site, layer);
        nb::object tensor = nb::cast(value), result = (*shared)(nb::str(name.c_str()), layer, tensor, rank);
        if (!result.is_none() && !result.is(tensor)) {
            Tensor replacement;
            if (!nb::try_cast(result, replacement))
                throw Error(concat("hook '", name, "' returned a ", nb::type_name(result.type()).c_str(),
                                   "; expected an infinilm.Tensor or None"));
            if (!is_floating(replacement.dtype()) || !std::ranges::equal(replacement.shape(), value.shape()))
                throw Error(concat("hook '", name, "': expected a replacement of shape ", shape_string(value.shape()),
                                   " and a floating dtype, got ", shape_string(replacement.shape()), " ",
                                   infinilm::name(replacement.dtype())));
            if (replacement.device().kind != DeviceKind::cpu)
                throw DeviceError(concat("hook '", name, "': expected a replacement in host memory"));
            if (overlap(replacement, value)) {  // a view of the tensor itself, in another order perhaps
                const Tensor apart = allocate_host(replacement.dtype(), replacement.shape());
                copy_values(replacement, apart);
                replacement = apart;
            }
            copy_values(replacement, value);
        }
        result.reset();
        // The memory serves the next op as soon as this returns. One reference is ours.
        if (Py_REFCNT(tensor.ptr()) > 1)
            throw Error(concat("hook '", name,
                               "' kept its tensor, or a view of it, which is valid only during the call; "
                               "keep a copy, such as tensor.numpy().copy()"));
    };
}

// Whoever lets go of the last reference holds the GIL, which a rank's thread may need before it can end.
struct Engine : InferEngine {
    using InferEngine::InferEngine;
    ~Engine() {
        if (is_finalizing()) {
            abandon();
        } else {
            const ReleaseGil release;
            close();
        }
    }
};

using Devices = std::variant<std::string, std::vector<std::string>>;

std::vector<Device> parse_devices(const Devices& devices) {
    if (const auto* one = std::get_if<std::string>(&devices)) return {device_from_string(*one)};
    std::vector<Device> out;
    for (const std::string& device : std::get<std::vector<std::string>>(devices))
        out.push_back(device_from_string(device));
    return out;
}

}  // namespace

void bind_engine(nb::module_& m) {
    using namespace nb::literals;
    using Release = nb::call_guard<ReleaseGil>;
    bind_spec(m);
    bind_batch(m);
    nb::class_<GraphCounts>(m, "GraphCounts")
        .def_ro("recorded", &GraphCounts::recorded)
        .def_ro("launched", &GraphCounts::launched)
        .def_ro("kept", &GraphCounts::kept)
        .def_ro("failure", &GraphCounts::failure,
                "Why steps could not be recorded, so that all run kernel by kernel; empty: nothing failed.");
    nb::class_<Engine>(m, "InferEngine", "Loads weights, keeps the KV cache, runs steps.")
        .def(
            "__init__",
            [](Engine* self, const ModelSpec& spec, const Devices& devices, int num_threads, const std::string& isa,
               bool batch_invariant, const std::string& nccl_library, bool graphs) {
                const ReleaseGil release;
                new (self) Engine(spec, {.devices = parse_devices(devices),
                                         .num_threads = num_threads,
                                         .isa = isa,
                                         .batch_invariant = batch_invariant,
                                         .graphs = graphs,
                                         .nccl_library = nccl_library});
            },
            "spec"_a, "devices"_a = "cpu", "num_threads"_a = 0, "isa"_a = "", "batch_invariant"_a = true,
            "nccl_library"_a = "", "graphs"_a = true,
            "devices: of each rank of tensor parallelism, such as ['cuda:0', 'cuda:1'] or ['cpu', 'cpu']; or of the "
            "only one. num_threads: of all ranks together; 0: one per core. graphs: GPUs launch decode steps of a "
            "shape that came before as one.")
        .def_prop_ro("num_ranks", &InferEngine::num_ranks)
        .def_prop_ro("spec", &InferEngine::spec, nb::rv_policy::reference_internal)
        .def(
            "param_shapes", [](const Engine& engine) { return param_shapes(engine.param_rows()); },
            nb::sig("def param_shapes(self) -> dict[str, tuple[int, ...]]"),
            "Checkpoint names and shapes of the parameters the model needs.")
        .def("load_param", &InferEngine::load_param, "name"_a, "tensor"_a, Release(),
             "Takes one full parameter. Read-only ones are kept for state_dict. A linear is prepared with its last "
             "tensor: "
             "returns the names of those that were, whose memory is not read again.")
        .def("loaded_params", &InferEngine::loaded_params, Release(), "Names of the parameters that are loaded.")
        .def(
            "take_packed",
            [](Engine& engine) {
                std::vector<std::pair<std::string, Tensor>> taken;
                {
                    const ReleaseGil release;
                    taken = engine.take_packed();
                }
                nb::dict out;
                for (auto& [name, tensor] : taken) out[nb::str(name.c_str())] = nb::cast(std::move(tensor));
                return out;
            },
            nb::sig("def take_packed(self) -> dict[str, Tensor]"),
            "The linears that are prepared, as tensors for a file that load_param takes again; they count as not "
            "loaded "
            "then. Of one rank.")
        .def(
            "load_dummy",
            [](Engine& engine, const std::string& dtype, uint64_t seed) {
                engine.load_dummy(dtype_from_string(dtype), seed);
            },
            "dtype"_a, "seed"_a = 0, Release(), "Random weights, for benchmarks.")
        .def("finish_loading", &InferEngine::finish_loading, Release(), "All parameters are there: the engine can run.")
        .def(
            "state_dict",
            [](Engine& engine) {
                std::vector<InferEngine::StateDict> ranks;
                {
                    const ReleaseGil release;
                    ranks = engine.state_dict();
                }
                nb::list out;
                for (InferEngine::StateDict& tensors : ranks) {
                    nb::dict state;
                    for (auto& [name, tensor] : tensors) state[nb::str(name.c_str())] = nb::cast(std::move(tensor));
                    out.append(state);
                }
                return out;
            },
            nb::sig("def state_dict(self) -> list[dict[str, Tensor]]"),
            "The parameters as loaded, read-only: of each rank, the parts it has.")
        .def(
            "add_adapter",
            [](Engine& engine, int32_t id, const std::vector<std::tuple<std::string, Tensor, Tensor, float>>& tensors) {
                std::vector<LoraTensors> listed;
                for (const auto& [name, a, b, scale] : tensors)
                    listed.push_back({.name = name, .a = a, .b = b, .scale = scale});
                const ReleaseGil release;
                engine.add_adapter(id, listed);
            },
            "id"_a, "tensors"_a,
            "Takes an adapter, which steps name by its id (Batch.adapter_ids): for each weight its name, A [rank, "
            "in_features], B [out_features, rank] and the scale of B A. WeightError: one does not fit; then there is "
            "no such adapter.")
        .def("remove_adapter", &InferEngine::remove_adapter, "id"_a, Release(),
             "Lets go of an adapter after the steps submitted before.")
        .def(
            "set_hooks",
            [](Engine& engine, std::optional<nb::callable> callback, const std::vector<std::string>& names,
               const std::vector<std::string>& names_of_all_ranks) {
                const Hook hook = callback ? make_hook(*callback) : Hook();
                const ReleaseGil release;
                engine.set_hooks(hook, {.rank0 = names, .all_ranks = names_of_all_ranks});
            },
            "callback"_a.none(), "names"_a, "names_of_all_ranks"_a = std::vector<std::string>(),
            nb::sig("def set_hooks(self, callback: collections.abc.Callable[[str, int, Tensor, int], Tensor | None] | "
                    "None, names: collections.abc.Sequence[str], names_of_all_ranks: collections.abc.Sequence[str] = "
                    "()) -> None"),
            "Calls callback(name, layer, tensor, rank) inside forward at the named sites, on rank 0 or on every rank; "
            "a "
            "returned tensor replaces it.")
        .def(
            "reset_cache",
            [](Engine& engine, int64_t num_blocks, int64_t block_size, const std::string& dtype) {
                engine.reset_cache({.num_blocks = num_blocks,
                                    .block_size = block_size,
                                    .dtype = dtype.empty() ? engine.spec().dtype : dtype_from_string(dtype)});
            },
            "num_blocks"_a, "block_size"_a, "dtype"_a = "", Release(),
            "Allocates the KV cache anew, empty. dtype: of keys and values; empty: the spec's.")
        .def("time_ops", &InferEngine::time_ops, "on"_a, Release(),
             "Takes the time of every op of rank 0 from the next step on, beginning at zero; or no more. ConfigError: "
             "not on a CPU.")
        .def(
            "op_times",
            [](Engine& engine) {
                OpTimes times;
                {
                    const ReleaseGil release;
                    times = engine.op_times();
                }
                nb::dict out;
                for (const auto& [name, time] : times)
                    out[nb::str(name.c_str())] = nb::make_tuple(time.calls, time.seconds);
                return out;
            },
            nb::sig("def op_times(self) -> dict[str, tuple[int, float]]"),
            "By op, how often it was called and the seconds it took in all steps so far; none while time_ops is off.")
        .def("forward", &InferEngine::forward, "batch"_a, Release(), "Runs one step.")
        .def(
            "submit",
            [](Engine& engine, nb::object batch, bool late_masks) {
                auto& arrays = nb::cast<const Batch&>(batch);
                std::future<StepOutput> step;
                const auto abort = std::make_shared<StepAbort>();
                if (late_masks && !arrays.allowed)
                    throw Error("submit: late_masks of a batch without `allowed`: there is nothing to wait for");
                const auto masks = late_masks ? std::make_shared<LateMasks>() : nullptr;
                {
                    const ReleaseGil release;
                    step = engine.submit(arrays, abort, masks);
                }
                return PendingStep(std::move(batch), std::move(step), abort, masks);
            },
            "batch"_a, "late_masks"_a = false,
            nb::sig("def submit(self, batch: Batch, late_masks: bool = False) -> PendingStep"),
            "Queues one step behind those submitted before, and returns at once. late_masks: Batch.allowed may change "
            "until PendingStep.give_masks, for which the step waits before it samples.")
        .def_prop_ro("weight_bytes", &InferEngine::weight_bytes)
        .def("graph_counts", &InferEngine::graph_counts, Release(), "What has become of graphs so far.")
        .def("close", &InferEngine::close, Release(), "Frees weights, cache and threads; idempotent.");
}

}  // namespace infinilm
