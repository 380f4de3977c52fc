// Batch and the engine.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <future>

#include "bind/bind.h"
#include "engine/infer_engine.h"

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

// An array of `ndim` axes, or one of each group of layers: with one axis more, in front.
template <class T, int ndim>
using Groups = std::variant<nb::ndarray<const T, nb::ndim<ndim>, nb::c_contig, nb::device::cpu>,
                            nb::ndarray<const T, nb::ndim<ndim + 1>, nb::c_contig, nb::device::cpu>>;
template <class T, int ndim>
Tensor view(const Groups<T, ndim>& array) {
    const Tensor tensor = std::visit([](const auto& given) { return view(given); }, array);
    if (array.index() == 1) return tensor;
    std::vector<int64_t> shape{1};
    shape.insert(shape.end(), tensor.shape().begin(), tensor.shape().end());
    return {TensorView(tensor.data(), tensor.dtype(), shape, tensor.device()), tensor.owner};
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
            batch_.release();  // no rank to wait for in a fork, and the step may be running yet
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
        if (lacks_masks() && !abort_->requested() && !is_done())
            throw Error("result: the step would wait for its masks for ever; call give_masks or abort first");
        wait();
        if (!future_.valid()) throw Error("result: it was taken already; a step has one");
        return future_.get();
    }

private:
    // Stages of a pipeline that do not sample wait for no masks.
    bool is_done() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
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

std::optional<Tensor> sampled_part(const StepOutput& output, Tensor Sampled::* part) {
    Tensor found = output.sampled ? Sampled(output.sampled).*part : Tensor();
    return found ? std::optional(std::move(found)) : std::nullopt;
}

void bind_batch(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Batch>(m, "Batch",
                      "One step of work; the arrays are used in place and must not change until the step is done.")
        .def(
            "__init__",
            [](Batch* self, Vector<int32_t> input_ids, Vector<int32_t> positions,
               const Groups<int64_t, 1>& slot_mapping, const Groups<int32_t, 2>& block_table,
               Vector<int32_t> cu_seqlens_q, Vector<int32_t> context_lens, Vector<int32_t> logits_rows,
               std::optional<Vector<float>> temperature, std::optional<Vector<int32_t>> top_k,
               std::optional<Vector<float>> top_p, std::optional<Vector<float>> min_p,
               std::optional<Vector<float>> random_val, std::optional<Matrix<int32_t>> allowed,
               std::optional<Vector<int32_t>> allowed_row, std::optional<Vector<int32_t>> previous_rows,
               std::optional<Vector<int32_t>> adapter_ids, std::optional<Vector<int32_t>> state_in,
               std::optional<Vector<int32_t>> state_out, std::optional<Vector<int32_t>> state_tokens,
               std::optional<Vector<int32_t>> num_replayed, std::optional<Matrix<int32_t>> change_rows,
               std::optional<Matrix<float>> penalties, std::optional<Matrix<int32_t>> change_tokens,
               std::optional<Vector<int32_t>> num_logprobs, std::optional<Vector<int32_t>> hidden_rows,
               std::optional<Vector<int32_t>> token_types, std::optional<Matrix<int32_t>> rope_positions,
               std::optional<Matrix<float>> given, std::optional<Vector<int32_t>> given_rows,
               std::optional<Matrix<float>> patches, std::optional<Matrix<int32_t>> position_rows,
               std::optional<Matrix<float>> position_weights, std::optional<Vector<int32_t>> two_way_seqs,
               std::optional<Vector<int32_t>> window_lens, bool return_logits, int mtp_module) {
                if (mtp_module != 0 && !hidden_rows)
                    throw RequestError(concat("mtp_module is ", mtp_module,
                                              ", but this is no step of an MTP head: pass hidden_rows, too"));
                new (self) Batch{view(input_ids),
                                 view(previous_rows),
                                 view(positions),
                                 view<int64_t, 1>(slot_mapping),
                                 view<int32_t, 2>(block_table),
                                 view(cu_seqlens_q),
                                 view(context_lens),
                                 view(window_lens),
                                 view(two_way_seqs),
                                 view(adapter_ids),
                                 view(state_in),
                                 view(state_out),
                                 view(state_tokens),
                                 view(num_replayed),
                                 view(hidden_rows),
                                 view(token_types),
                                 view(rope_positions),
                                 view(given),
                                 view(given_rows),
                                 view(patches),
                                 view(position_rows),
                                 view(position_weights),
                                 view(logits_rows),
                                 view(temperature),
                                 view(top_k),
                                 view(top_p),
                                 view(min_p),
                                 view(random_val),
                                 view(allowed),
                                 view(allowed_row),
                                 view(change_rows),
                                 view(penalties),
                                 view(change_tokens),
                                 view(num_logprobs),
                                 return_logits,
                                 mtp_module};
            },
            nb::kw_only(), "input_ids"_a.noconvert(), "positions"_a.noconvert(), "slot_mapping"_a.noconvert(),
            "block_table"_a.noconvert(), "cu_seqlens_q"_a.noconvert(), "context_lens"_a.noconvert(),
            "logits_rows"_a.noconvert(), "temperature"_a.noconvert().none() = nb::none(),
            "top_k"_a.noconvert().none() = nb::none(), "top_p"_a.noconvert().none() = nb::none(),
            "min_p"_a.noconvert().none() = nb::none(), "random_val"_a.noconvert().none() = nb::none(),
            "allowed"_a.noconvert().none() = nb::none(), "allowed_row"_a.noconvert().none() = nb::none(),
            "previous_rows"_a.noconvert().none() = nb::none(), "adapter_ids"_a.noconvert().none() = nb::none(),
            "state_in"_a.noconvert().none() = nb::none(), "state_out"_a.noconvert().none() = nb::none(),
            "state_tokens"_a.noconvert().none() = nb::none(), "num_replayed"_a.noconvert().none() = nb::none(),
            "change_rows"_a.noconvert().none() = nb::none(), "penalties"_a.noconvert().none() = nb::none(),
            "change_tokens"_a.noconvert().none() = nb::none(), "num_logprobs"_a.noconvert().none() = nb::none(),
            "hidden_rows"_a.noconvert().none() = nb::none(), "token_types"_a.noconvert().none() = nb::none(),
            "rope_positions"_a.noconvert().none() = nb::none(), "given"_a.noconvert().none() = nb::none(),
            "given_rows"_a.noconvert().none() = nb::none(), "patches"_a.noconvert().none() = nb::none(),
            "position_rows"_a.noconvert().none() = nb::none(), "position_weights"_a.noconvert().none() = nb::none(),
            "two_way_seqs"_a.noconvert().none() = nb::none(), "window_lens"_a.noconvert().none() = nb::none(),
            "return_logits"_a = false, "mtp_module"_a = 0)
        .def(
            "arrays",
            [](const Batch& b) {
                nb::dict out;
                for (const auto& [name, array] : {std::pair("input_ids", &b.input_ids),
                                                  {"positions", &b.positions},
                                                  {"slot_mapping", &b.slot_mapping},
                                                  {"block_table", &b.block_table},
                                                  {"cu_seqlens_q", &b.cu_seqlens_q},
                                                  {"context_lens", &b.context_lens},
                                                  {"logits_rows", &b.logits_rows},
                                                  {"temperature", &b.temperature},
                                                  {"top_k", &b.top_k},
                                                  {"top_p", &b.top_p},
                                                  {"min_p", &b.min_p},
                                                  {"random_val", &b.random_val},
                                                  {"allowed", &b.allowed},
                                                  {"allowed_row", &b.allowed_row},
                                                  {"previous_rows", &b.previous_rows},
                                                  {"window_lens", &b.window_lens},
                                                  {"two_way_seqs", &b.two_way_seqs},
                                                  {"adapter_ids", &b.adapter_ids},
                                                  {"state_in", &b.state_in},
                                                  {"state_out", &b.state_out},
                                                  {"state_tokens", &b.state_tokens},
                                                  {"num_replayed", &b.num_replayed},
                                                  {"change_rows", &b.change_rows},
                                                  {"penalties", &b.penalties},
                                                  {"change_tokens", &b.change_tokens},
                                                  {"num_logprobs", &b.num_logprobs},
                                                  {"hidden_rows", &b.hidden_rows},
                                                  {"token_types", &b.token_types},
                                                  {"rope_positions", &b.rope_positions},
                                                  {"given", &b.given},
                                                  {"given_rows", &b.given_rows},
                                                  {"patches", &b.patches},
                                                  {"position_rows", &b.position_rows},
                                                  {"position_weights", &b.position_weights}})
                    if (*array) out[name] = nb::cast(*array);
                return out;
            },
            nb::sig("def arrays(self) -> dict[str, Tensor]"), "Those that are there, in place, by name.")
        .def_ro("return_logits", &Batch::return_logits)
        .def_ro("mtp_module", &Batch::mtp_module, "With hidden_rows: the module of the MTP head that computes it.");
    nb::class_<StepOutput>(m, "StepOutput")
        .def_prop_ro(
            "ids", [](const StepOutput& o) { return sampled_part(o, &Sampled::ids); },
            "[num_rows] int32; of a step that was submitted, negative where the row cannot be sampled: see "
            "sample_fault")
        .def_prop_ro(
            "logprob_ids", [](const StepOutput& o) { return sampled_part(o, &Sampled::logprob_ids); },
            "[num_rows, width] int32: the token that was sampled, then the best of the model's logits, as many as "
            "Batch.num_logprobs asks for; what is behind is not defined. -1: logits that are no distribution")
        .def_prop_ro(
            "logprobs", [](const StepOutput& o) { return sampled_part(o, &Sampled::logprobs); },
            "[num_rows, width] float32: their log-probabilities")
        .def_prop_ro(
            "logits", [](const StepOutput& o) { return o.logits ? std::optional(o.logits) : std::nullopt; },
            "[num_rows, vocab_size] float32, of a draft [num_rows, MtpSpec.lm_head_size] where the head has an lm_head "
            "of its own; of a model without an lm_head [num_rows, hidden_size], the states after the last norm; of a "
            "tower [num_rows, levels * out_size], where a row stands for neighbouring patches")
        .def_ro("aborted", &StepOutput::aborted,
                "PendingStep.abort ended the step early: there is nothing else, and what the cache holds of its tokens "
                "is not defined.");
    m.attr("MAX_LOGPROBS") = max_candidates;  // of Batch.num_logprobs
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

// The thread that drops the last reference holds the GIL, which a rank's thread may need before it can end.
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

std::vector<DType> parse_dtypes(const std::vector<std::string>& names) {
    std::vector<DType> out;
    for (const std::string& name : names) out.push_back(dtype_from_string(name));
    return out;
}

}  // namespace

void bind_engine(nb::module_& m) {
    using namespace nb::literals;
    using Release = nb::call_guard<ReleaseGil>;
    bind_batch(m);
    nb::class_<GraphCounts>(m, "GraphCounts")
        .def_ro("recorded", &GraphCounts::recorded)
        .def_ro("launched", &GraphCounts::launched)
        .def_ro("launched_ahead", &GraphCounts::launched_ahead,
                "Launched steps that began while the device worked on the one before; steps with masks do not count.")
        .def_ro("kept", &GraphCounts::kept)
        .def_ro("failure", &GraphCounts::failure,
                "Why steps could not be recorded, so that all run kernel by kernel; empty: nothing failed.");
    nb::class_<Engine>(m, "InferEngine", "Loads weights, keeps the KV cache, runs steps.")
        .def(
            "__init__",
            [](Engine* self, const ModelSpec& spec, const Devices& devices, int num_threads, const std::string& isa,
               const std::string& nccl_library, bool graphs, int num_stages,
               const std::optional<std::tuple<int, int, int>>& stage, const std::vector<int>& stage_layers,
               const std::vector<std::string>& stage_dtypes) {
                PipelineOptions pipeline{
                    .num_stages = num_stages, .num_layers = stage_layers, .dtypes = parse_dtypes(stage_dtypes)};
                if (stage) std::tie(pipeline.stage, pipeline.from_stage_before, pipeline.to_stage_behind) = *stage;
                const ReleaseGil release;
                new (self) Engine(spec, {.devices = parse_devices(devices),
                                         .num_threads = num_threads,
                                         .isa = isa,
                                         .graphs = graphs,
                                         .nccl_library = nccl_library,
                                         .pipeline = pipeline});
            },
            "spec"_a, "devices"_a = "cpu", "num_threads"_a = 0, "isa"_a = "", "nccl_library"_a = "", "graphs"_a = true,
            "num_stages"_a = 1, "stage"_a = nb::none(), "stage_layers"_a = std::vector<int>(),
            "stage_dtypes"_a = std::vector<std::string>(),
            "devices: of each rank, stage by stage of those that are here, such as ['cuda:0', 'cuda:1'] or "
            "['cpu', 'cpu']; or of the only one. num_threads: of all ranks together; 0: one per core. graphs: GPUs "
            "launch decode steps of a shape that came before as one. num_stages: of a pipeline; stage: of several the "
            "one that is here, the socket from the stage before and that to the stage behind, of which copies are made "
            "and which the first and the last one have not; None: all are. stage_layers: of each stage; empty: equally "
            "many. stage_dtypes: what each stage computes in, where stages are on unlike devices, such as ['cpu', "
            "'cuda:0']; then load_param names the stage.")
        .def_prop_ro("num_ranks", &InferEngine::ranks_per_stage, "Ranks of each stage.")
        .def_prop_ro("spec", &InferEngine::spec, nb::rv_policy::reference_internal)
        .def(
            "param_shapes", [](const Engine& engine) { return param_shapes(engine.param_rows()); },
            nb::sig("def param_shapes(self) -> dict[str, tuple[int, ...]]"),
            "Checkpoint names and shapes of the parameters the model needs.")
        .def(
            "load_param",
            [](Engine& engine, const std::string& name, const Tensor& tensor, const std::string& type, int stage) {
                return engine.load_param(name, tensor, blocks_from_string(type), stage);
            },
            "name"_a, "tensor"_a, "type"_a = "", "stage"_a = -1, Release(),
            "Takes one full parameter. Read-only ones are kept for state_dict. A linear is prepared with its last "
            "tensor: returns the names of those that were, whose memory is not read again. type: the tensor is uint8, "
            "rows of blocks of a GGUF file; see gguf_type, gguf_dequantise. stage: with stage_dtypes, the one that "
            "takes it.")
        .def("loaded_params", &InferEngine::loaded_params, Release(), "Names of the parameters that are loaded.")
        .def("own_params", &InferEngine::own_params, "stage"_a = -1,
             "Names that load_param takes and that are needed here, or by one stage: of parameters, and of the packed "
             "tensors of linears. Those of stages elsewhere count as loaded.")
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
        .def(
            "update_params",
            [](Engine& engine, const std::vector<std::pair<std::string, Tensor>>& tensors, int stage) {
                const ReleaseGil release;
                engine.update_params(tensors, stage);
            },
            "tensors"_a, "stage"_a = -1,
            "Other values of parameters, as load_param takes them, behind the steps submitted before. The cache stays "
            "as it is. stage: as for load_param. WeightError: one does not fit; nothing has changed then.")
        .def_prop_ro("weights_version", &InferEngine::weights_version, "How often parameters were loaded or changed.")
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
            [](Engine& engine, int64_t num_blocks, int64_t block_size, const std::string& dtype, int64_t num_states,
               int64_t num_window_blocks, int64_t num_log_rows, const std::vector<std::string>& stage_dtypes) {
                engine.reset_cache({.num_blocks = num_blocks,
                                    .block_size = block_size,
                                    .dtype = dtype.empty() ? engine.spec().dtype : dtype_from_string(dtype),
                                    .num_states = num_states,
                                    .num_window_blocks = num_window_blocks,
                                    .num_log_rows = num_log_rows},
                                   parse_dtypes(stage_dtypes));
            },
            "num_blocks"_a, "block_size"_a, "dtype"_a = "", "num_states"_a = 0, "num_window_blocks"_a = 0,
            "num_log_rows"_a = 0, "stage_dtypes"_a = std::vector<std::string>(), Release(),
            "Allocates the KV cache anew, empty. dtype: of keys and values; empty: the spec's. num_states: of "
            "sequences, in models with layers that have a state. num_window_blocks: of layers with a window, if they "
            "have blocks of their own; then slot_mapping and block_table of a Batch have one more axis in front, first "
            "the slots and blocks of all other layers, then theirs. num_log_rows: of each state, which keep what it "
            "reads "
            "of drafts, so that those that were right can be replayed (num_replayed of a Batch). stage_dtypes: in "
            "place of dtype, of each stage.")
        .def("read_blocks", &InferEngine::read_blocks, "group"_a, "blocks"_a, Release(),
             "Blocks of a group of layers as bytes, after the steps submitted before: of each rank that is here "
             "[num_blocks, bytes_per_block] uint8. RequestError: there is no such block.")
        .def("write_blocks", &InferEngine::write_blocks, "group"_a, "blocks"_a, "data"_a, Release(),
             "Fills blocks with what read_blocks gave of a cache of the same shape. RequestError: it does not fit.")
        .def("read_state", &InferEngine::read_state, "state"_a, Release(),
             "A state of all layers as bytes: of each rank [1, bytes_per_state] uint8.")
        .def("write_state", &InferEngine::write_state, "state"_a, "num_tokens"_a, "data"_a, Release(),
             "Fills a state, which has seen num_tokens, with what read_state gave.")
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
        .def(
            "host_expert_bytes", &InferEngine::host_expert_bytes, Release(),
            "Bytes of the host's memory that arrays of experts have taken so far whose weights are there, beside a GPU "
            "(ExpertsSpec.on_host).")
        .def("graph_counts", &InferEngine::graph_counts, "stage"_a = -1, Release(),
             "What has become of graphs so far, in a stage that is in this process; -1: in the first one. ConfigError: "
             "there is no such stage.")
        .def("close", &InferEngine::close, Release(), "Frees weights, cache and threads; idempotent.");
}

}  // namespace infinilm
