// ModelSpec, and what is known of a model without an engine.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind/bind.h"
#include "core/enum_names.h"
#include "cpu/packed_linear.h"
#include "engine/workspace.h"
#include "model/kv_cache.h"
#include "model/params.h"

namespace infinilm {

nb::dict param_shapes(const std::vector<ParamRow>& rows) {
    nb::dict out;
    for (const ParamRow& row : rows) {
        nb::list shape;
        for (int64_t size : row.shape) shape.append(size);
        out[row.name.c_str()] = nb::tuple(shape);
    }
    return out;
}

namespace {

cpu::Format format_from_string(const std::string& text) {
    using cpu::Format;
    for (const auto& [name, format] : {std::pair("float32", Format::f32),
                                       {"bfloat16", Format::bf16},
                                       {"float16", Format::f16},
                                       {"int8", Format::int8},
                                       {"int4", Format::int4}})
        if (text == name) return format;
    throw ConfigError("unknown format '" + text + "' of weights; expected float32, bfloat16, float16, int8 or int4");
}

nb::dict packed_shapes(const Params& params, const std::string& format) {
    nb::dict out;
    for (const LinearEntry& linear : params.linears()) {
        int64_t out_features = 0, in_features = 0;
        for (const size_t index : linear.rows) {
            const ParamRow& row = params.rows()[index];
            if (row.shape.size() != 2) continue;
            if (linear.kind != LinearKind::act_mul || row.part == 0) out_features += row.shape[0];
            in_features = row.shape[1];
        }
        const cpu::PackedShapes shapes =
            cpu::packed_shapes(format_from_string(format), linear.kind, out_features, in_features, linear.head_dim);
        const auto add = [&](const char* suffix, const cpu::PackedShape& tensor) {
            nb::list shape;
            for (const int64_t size : tensor.shape) shape.append(size);
            if (!tensor.shape.empty())
                out[(linear.name + suffix).c_str()] = nb::make_tuple(std::string(name(tensor.dtype)), nb::tuple(shape));
        };
        add(".panels", shapes.panels);
        add(".scales", shapes.scales);
    }
    return out;
}

// What a field may be besides a number, text or a spec.
template <class Value>
constexpr bool is_optional = false;
template <class Value>
constexpr bool is_optional<std::optional<Value>> = true;

// An enum of a spec is text in Python.
template <class Value>
nb::object to_python(const Value& value) {
    if constexpr (std::is_enum_v<Value>)
        return nb::cast(std::string(name(value)));
    else
        return nb::cast(value);
}

template <class Value>
Value from_python(const char* field, nb::handle object) {
    if constexpr (std::is_enum_v<Value>)
        return from_string<Value>(field, nb::cast<std::string>(object));
    else
        return nb::cast<Value>(object);
}

template <class Value>
struct TypeInPython;
template <class Value>
std::string type_in_python() {
    return TypeInPython<Value>::text();
}

template <class Value>
struct TypeInPython {
    static std::string text() {
        if constexpr (std::is_same_v<Value, bool>) return "bool";
        if constexpr (std::is_integral_v<Value>) return "int";
        if constexpr (std::is_floating_point_v<Value>) return "float";
        if constexpr (std::is_enum_v<Value>) return "str";
        if constexpr (std::is_class_v<Value>) return nb::cast<std::string>(nb::type<Value>().attr("__name__"));
    }
};
template <class Value>
struct TypeInPython<std::vector<Value>> {
    static std::string text() { return concat("Sequence[", type_in_python<Value>(), "]"); }
};
template <class Value>
struct TypeInPython<std::optional<Value>> {
    static std::string text() { return type_in_python<Value>() + " | None"; }
};
template <class First, class... Others>
struct TypeInPython<std::variant<First, Others...>> {
    static std::string text() { return (type_in_python<First>() + ... + (" | " + type_in_python<Others>())); }
};

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    throw nb::type_error(concat(parts...).c_str());
}

// What constructors and reprs do with a field: compiled once for each type of value, whatever struct has it.
struct FieldType {
    std::string (*text)();
    nb::object (*get)(const void* value);
    void (*set)(void* value, const char* field, nb::handle object);
};
template <class Value>
constexpr FieldType field_type = {type_in_python<Value>,
                                  [](const void* value) { return to_python(*static_cast<const Value*>(value)); },
                                  [](void* value, const char* field, nb::handle object) {
                                      *static_cast<Value*>(value) = from_python<Value>(field, object);
                                  }};

struct Field {
    const char* name;
    ptrdiff_t offset;  // in the struct
    const FieldType* type;

    nb::object get(const void* spec) const { return type->get(static_cast<const char*>(spec) + offset); }
    void set(void* spec, nb::handle object) const { type->set(static_cast<char*>(spec) + offset, name, object); }
};

template <class Spec>
std::vector<Field> fields_of() {
    std::vector<Field> fields;
    const Spec spec;
    Spec::fields([&]<class Value>(const char* field, Value Spec::* member, const char*) {
        const auto address = reinterpret_cast<const char*>(&(spec.*member));
        fields.push_back({field, address - reinterpret_cast<const char*>(&spec), &field_type<Value>});
    });
    return fields;
}

// Sets the fields of a struct that are given by their places or by their names.
void set_fields(const char* name, const std::vector<Field>& fields, void* spec, const nb::args& args,
                const nb::kwargs& kwargs) {
    size_t position = 0, num_named = 0;
    for (const Field& field : fields) {
        const bool is_named = kwargs.contains(field.name), is_placed = position < args.size();
        if (is_named && is_placed) refuse(name, ": ", field.name, " is given twice");
        if (is_named || is_placed) {
            const nb::object value = is_placed ? nb::object(args[position]) : nb::object(kwargs[field.name]);
            try {
                field.set(spec, value);
            } catch (const nb::cast_error&) {
                refuse(name, ": ", field.name, ": expected ", field.type->text(), ", got ", nb::repr(value).c_str());
            }
        }
        num_named += is_named;
        ++position;
    }
    if (args.size() > position) refuse(name, ": expected up to ", position, " fields, got ", args.size());
    if (num_named == kwargs.size()) return;
    std::string names;
    for (const Field& field : fields) names += concat(names.empty() ? "" : ", ", field.name);
    for (const auto& [key, value] : kwargs) {
        const auto is_key = [text = nb::cast<std::string>(key)](const Field& field) { return text == field.name; };
        if (std::none_of(fields.begin(), fields.end(), is_key))
            refuse(name, " has no field ", nb::repr(key).c_str(), "; it has ", names);
    }
}

std::string repr_of(const char* name, const std::vector<Field>& fields, const void* spec) {
    std::string text = concat(name, "(");
    for (const Field& field : fields)
        text += concat(text.back() == '(' ? "" : ", ", field.name, "=", nb::repr(field.get(spec)).c_str());
    return text + ")";
}

// A struct whose fields, constructor and repr in Python follow from its list of fields. The constructor takes them in
// the order of the list, or by name.
template <class Spec>
nb::class_<Spec> bind_fields(nb::module_& m, const char* name, const char* doc) {
    nb::class_<Spec> bound(m, name, doc);
    static std::string signature;  // nanobind keeps the address
    signature = "def __init__(self";
    Spec::fields([&]<class Value>(const char* field, Value Spec::* member, const char* meaning) {
        std::string value = "...";  // as stubs write what is no literal
        if constexpr (std::is_arithmetic_v<Value> || std::is_enum_v<Value> || is_optional<Value>)
            value = nb::repr(to_python(Spec().*member)).c_str();
        signature += concat(", ", field, ": ", type_in_python<Value>(), " = ", value);
        const bool has_meaning = *meaning != 0;
        if constexpr (std::is_enum_v<Value>) {
            const auto get = [member](const Spec& spec) { return std::string(infinilm::name(spec.*member)); };
            const auto set = [member, field](Spec& spec, const std::string& text) {
                spec.*member = from_string<Value>(field, text);
            };
            has_meaning ? bound.def_prop_rw(field, get, set, meaning) : bound.def_prop_rw(field, get, set);
        } else if constexpr (is_optional<Value>) {
            bound.def_rw(field, member, nb::for_setter(nb::arg("value").none()), meaning);
        } else {
            has_meaning ? bound.def_rw(field, member, meaning) : bound.def_rw(field, member);
        }
    });
    signature += ") -> None";
    static const std::vector<Field> fields = fields_of<Spec>();
    const auto make = [name](Spec* self, const nb::args& args, const nb::kwargs& kwargs) {
        Spec made;
        set_fields(name, fields, &made, args, kwargs);
        new (self) Spec(std::move(made));
    };
    bound.def("__init__", make, nb::sig(signature.c_str()));
    bound.def("__repr__", [name](const Spec& spec) { return repr_of(name, fields, &spec); });
    return bound;
}

}  // namespace

void bind_spec(nb::module_& m) {
    bind_fields<IndexerSpec>(m, "IndexerSpec", "An indexer, by which a token chooses the keys that it reads.");
    bind_fields<AttentionSpec>(m, "AttentionSpec", "Attention over the keys and values of each head.");
    bind_fields<LatentSpec>(m, "LatentSpec", "Attention whose keys and values are made of a latent of each token.")
        .def_prop_ro("query_dim", &LatentSpec::query_dim, "A head of a query.")
        .def_prop_ro("row_dim", &LatentSpec::row_dim, "What the cache has of a token.");
    bind_fields<DeltaSpec>(m, "DeltaSpec", "A causal convolution and the gated delta rule.")
        .def_prop_ro("k_size", &DeltaSpec::k_size, "All heads of q, or of k.")
        .def_prop_ro("v_size", &DeltaSpec::v_size, "All heads of v.");
    bind_fields<ShortConvSpec>(m, "ShortConvSpec", "A convolution over the last tokens, between two gates.");
    bind_fields<MambaSpec>(m, "MambaSpec", "A causal convolution and the state space of Mamba-2.")
        .def_prop_ro("size", &MambaSpec::size, "All heads of x.")
        .def_prop_ro("group_size", &MambaSpec::group_size, "All groups of B, or of C.");
    bind_fields<MlpSpec>(m, "MlpSpec", "down(activation(gate) * up), or down(activation(up)).");
    bind_fields<ExpertsSpec>(m, "ExpertsSpec", "Experts, of which each token goes to some.");
    bind_fields<LaurelSpec>(m, "LaurelSpec", "A learned residual layer beside a mixer.");
    bind_fields<AltUpSpec>(m, "AltUpSpec", "Alternating updates of several residual streams.");
    bind_fields<SharedBlockSpec>(m, "SharedBlockSpec", "A block of attention and an MLP that several layers share.");
    bind_fields<OwnVectorsSpec>(m, "OwnVectorsSpec", "Vectors that a token has for each layer.");
    bind_fields<EmbeddingSumSpec>(m, "EmbeddingSumSpec", "What is added to the embedding of a token.");
    bind_fields<PositionBiasSpec>(m, "PositionBiasSpec",
                                  "What is added to scores of attention by the distance of a key.");
    bind_fields<MergerLinear>(m, "MergerLinear", "One of the linears that make a row of the result of a tower.");
    bind_fields<TowerSpec>(m, "TowerSpec", "What an encoder of images has besides its layers.");
    bind_fields<RopeSpec>(m, "RopeSpec", "A table of rotations.");
    bind_fields<CacheSpec>(m, "CacheSpec", "What a layer keeps of the tokens before, and how its heads read it.");
    bind_fields<CostSpec>(m, "CostSpec", "The work of a sublayer that mixes tokens, besides its linears.");
    bind_fields<LayerSpec>(m, "LayerSpec",
                           "The sublayers of a layer: a mixer or two side by side, then an MLP, experts, or both.")
        .def_prop_ro("cache", &LayerSpec::cache, "What its mixers keep of the tokens before.")
        .def_prop_ro("cost", &LayerSpec::cost, "The work of its mixers.");
    bind_fields<MtpSpec>(m, "MtpSpec", "An MTP head, which drafts, and how it keeps its weights.");
    bind_fields<ModelSpec>(m, "ModelSpec", "Everything the engine needs to know of a model, as plain numbers.")
        .def_prop_ro(
            "own_layers",
            [](const ModelSpec& spec) { return std::pair(spec.own_layers().begin, spec.own_layers().end); },
            "The first layer of a stage of a pipeline and the one behind its last; without stages, of all layers.")
        .def(
            "kv_bytes_per_token",
            [](const ModelSpec& s, const std::string& dtype, bool windows_only, const std::string& device) {
                const DeviceKind kind = device_from_string(device).kind;
                return KvCache::bytes_per_token(s, dtype_from_string(dtype), kind, windows_only);
            },
            nb::arg("dtype"), nb::arg("windows_only") = false, nb::arg("device") = "cpu",
            "Bytes of a token of a KV cache in this dtype: keys and values of all layers, or of those with a window. "
            "Those of all layers on a GPU have what prompts need to read 8 bits, too.")
        .def(
            "state_bytes",
            [](const ModelSpec& s, const std::string& device, int64_t num_log_rows) {
                const bool on_cpu = device_from_string(device).kind == DeviceKind::cpu;
                return KvCache::state_bytes(s, on_cpu ? cpu::activation_dtype : s.dtype, num_log_rows);
            },
            nb::arg("device") = "cpu", nb::arg("num_log_rows") = 0,
            "Bytes of the states that all layers keep of one sequence, with so many rows of their logs; 0: no layer "
            "has "
            "one.");
    m.def(
        "param_shapes", [](const ModelSpec& spec) { return param_shapes(Params(spec).rows()); }, nb::arg("spec"),
        nb::sig("def param_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]"),
        "What a checkpoint of this model holds, without an engine.");
    m.def(
        "adapter_params",
        [](const ModelSpec& spec) {
            nb::dict out;
            const Params params(spec);
            for (const ParamRow& row : params.rows())
                if (takes_adapter(row))
                    out[row.name.c_str()] = row.cut.is_whole() ? "whole" : row.cut.is_columns() ? "columns" : "rows";
            return out;
        },
        nb::arg("spec"), nb::sig("def adapter_params(spec: ModelSpec) -> dict[str, str]"),
        "The weights that adapters of requests may change, and what of them ranks divide: \"rows\", \"columns\", or "
        "none, \"whole\".");
    m.def(
        "sites",
        [](const ModelSpec& spec) {
            std::vector<std::pair<std::string, int>> out;
            for (const auto& [site, layer] : Model(spec).sites()) out.emplace_back(site.name, layer);
            return out;
        },
        nb::arg("spec"), "Where hooks may look: the names of sites, and the layer of each; -1: outside layers.");
    m.def(
        "packed_shapes",
        [](const ModelSpec& spec, const std::string& format) { return packed_shapes(Params(spec), format); },
        nb::arg("spec"), nb::arg("format"),
        nb::sig("def packed_shapes(spec: ModelSpec, format: str) -> dict[str, tuple[str, tuple[int, ...]]]"),
        "Names, dtypes and shapes of the tensors that linears become when all are packed for CPUs in a format: "
        "float32, bfloat16, float16, int8 or int4.");
    m.def(
        "linears",
        [](const ModelSpec& spec, int num_ranks) {
            const Params params(spec, {0, num_ranks});
            nb::dict out;
            for (const LinearEntry& linear : params.linears()) {
                // Never of blocks.
                if (linear.kind == LinearKind::by_head || linear.quantization != Quantization::none) continue;
                std::vector<std::string> weights;
                for (const size_t index : linear.rows) {
                    const ParamRow& row = params.rows()[index];
                    if (row.shape.size() == 2) weights.push_back(row.name);
                }
                const bool pairs = linear.kind == LinearKind::act_mul;
                out[linear.name.c_str()] = nb::make_tuple(nb::cast(weights), pairs, params.column_unit(linear));
            }
            return out;
        },
        nb::arg("spec"), nb::arg("num_ranks") = 1,
        nb::sig("def linears(spec: ModelSpec, num_ranks: int = 1) -> dict[str, tuple[list[str], bool, int]]"),
        "By their names in packed checkpoints: the weights that each linear joins, whether these are gate and up, and "
        "what divides all places where ranks cut its inputs (0: they do not). Linears by head are left out, and those "
        "that the engine quantises.");
    m.attr("DELTA_MOST_TAPS") = most_taps;
    m.attr("DELTA_MOST_K_DIM") = most_k_dim;
    m.attr("PACKED_LAYOUT_VERSION") = cpu::packed_layout_version;
    m.def(
        "weight_bytes",
        [](const ModelSpec& spec, const std::string& dtype, int num_ranks) {
            return weight_bytes(spec, dtype_from_string(dtype), num_ranks);
        },
        nb::arg("spec"), nb::arg("dtype"), nb::arg("num_ranks") = 1,
        "Bytes of the parameters as tensors of a dtype: of the rank that has most. spec: of the model, or of a stage.");
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
        "Bytes of each parameter once it is prepared, where tensors are stored as dtype; weight_bytes is their sum. "
        "spec: of the model, or of a stage, where those of others have 0.");
    m.def(
        "param_ops",
        [](const ModelSpec& spec) {
            const Params params(spec);
            const std::vector<ParamRow>& rows = params.rows();
            nb::dict out;
            std::string_view op = "lm_head";
            for (size_t i = rows.size(); i-- > 0;) {
                if (rows[i].linear) op = rows[i].linear->timed;
                out[nb::str(rows[i].name.c_str())] = nb::str(op.data(), op.size());
            }
            return out;
        },
        nb::arg("spec"), nb::sig("def param_ops(spec: ModelSpec) -> dict[str, str]"),
        "The op that reads each parameter, as times of a step name it. A vector counts with the linear that stands "
        "behind it in the model, since that one reads what the vector has scaled.");
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
        "whole model, or of a stage. num_threads: of all ranks together; 0: one per core. A step has up to num_tokens "
        "tokens, draws "
        "tokens from up to num_rows rows of logits, and returns up to num_returned_rows rows besides. num_adapters, "
        "most_rank: of a step, and of them.");
    m.def(
        "host_workspace_bytes",
        [](const ModelSpec& spec, int64_t num_tokens, int num_threads) {
            const HostWorkspace of = host_workspace(spec, num_tokens, num_threads);
            return std::pair(of.arrays, of.others);
        },
        nb::arg("spec"), nb::kw_only(), nb::arg("num_tokens"), nb::arg("num_threads"),
        "What steps of up to num_tokens tokens take at most of the host's memory where experts of the model stay there "
        "beside a GPU (ExpertsSpec.on_host), besides weights: bytes of arrays, which InferEngine.host_expert_bytes "
        "tells once such a step has run; and of scratch of the CPU's kernels and pinned memory. num_threads: 0: one "
        "per core.");
    m.def(
        "local_spec",
        [](const ModelSpec& spec, int tp_rank, int tp_size) { return local_spec(spec, {tp_rank, tp_size}); },
        nb::arg("spec"), nb::arg("tp_rank"), nb::arg("tp_size"),
        "The part of the model that a rank of tensor parallelism has: its heads and intermediate_size. ConfigError: a "
        "tp_size that does not fit the model.");
    m.def("stage_spec", &stage_spec, nb::arg("spec"), nb::arg("stage"), nb::arg("num_stages"),
          nb::arg("num_layers") = std::vector<int>(),
          "The part of the model that a stage of a pipeline has: a run of its layers, with the embedding before the "
          "first one, and the final norm and the lm_head behind the last one. num_layers: of each stage; empty: "
          "equally many. ConfigError: more stages than layers, "
          "or other numbers of layers.");
}

}  // namespace infinilm
