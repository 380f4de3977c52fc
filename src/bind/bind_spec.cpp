// ModelSpec, and what is known of a model without an engine.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
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

// An enum of a spec is text in Python.
void parse(const std::string& text, DType& out) { out = dtype_from_string(text); }
void parse(const std::string& text, Quantization& out) { out = quantization_from_string(text); }
void parse(const std::string& text, Activation& out) { out = activation_from_string(text); }
void parse(const std::string& text, Scoring& out) { out = scoring_from_string(text); }
template <class Enum>
void parse_one_of(const char* what, const std::string& text, std::initializer_list<Enum> values, Enum& out) {
    std::string list;
    for (const Enum value : values) {
        if (text == name(value)) {
            out = value;
            return;
        }
        list += concat(list.empty() ? "" : ", ", name(value));
    }
    throw ConfigError(concat(what, " '", text, "' is not one of ", list));
}
void parse(const std::string& text, QkNorm& out) {
    using enum QkNorm;
    parse_one_of("qk_norm", text, {none, head, all, head_behind_rope, turned_heads}, out);
}
void parse(const std::string& text, NormKind& out) {
    using enum NormKind;
    parse_one_of("norm", text, {rms, layer, layer_bias}, out);
}
void parse(const std::string& text, CacheKind& out) {
    using enum CacheKind;
    parse_one_of("cache kind", text, {paged, shared, latent, state}, out);
}

template <class Value>
nb::object to_python(const Value& value) {
    if constexpr (std::is_enum_v<Value>)
        return nb::cast(std::string(name(value)));
    else
        return nb::cast(value);
}

template <class Value>
void from_python(nb::handle object, Value& out) {
    if constexpr (std::is_enum_v<Value>)
        parse(nb::cast<std::string>(object), out);
    else
        out = nb::cast<Value>(object);
}

template <class Value>
std::string type_in_python() {
    if constexpr (std::is_same_v<Value, bool>) return "bool";
    if constexpr (std::is_integral_v<Value>) return "int";
    if constexpr (std::is_floating_point_v<Value>) return "float";
    if constexpr (std::is_enum_v<Value>) return "str";
    if constexpr (std::is_class_v<Value>) return nb::cast<std::string>(nb::type<Value>().attr("__name__"));
}
template <class Value>
    requires requires { typename Value::value_type; }
std::string type_in_python() {
    return concat("Sequence[", type_in_python<typename Value::value_type>(), "]");
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    throw nb::type_error(concat(parts...).c_str());
}

template <class Spec>
bool has_field(const std::string& name) {
    bool found = false;
    Spec::fields([&](const char* field, auto, const char*) { found = found || name == field; });
    return found;
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
        if constexpr (std::is_arithmetic_v<Value> || std::is_enum_v<Value>)
            value = nb::repr(to_python(Spec().*member)).c_str();
        signature += concat(", ", field, ": ", type_in_python<Value>(), " = ", value);
        const bool has_meaning = *meaning != 0;
        if constexpr (std::is_enum_v<Value>) {
            const auto get = [member](const Spec& spec) { return std::string(infinilm::name(spec.*member)); };
            const auto set = [member](Spec& spec, const std::string& text) { parse(text, spec.*member); };
            has_meaning ? bound.def_prop_rw(field, get, set, meaning) : bound.def_prop_rw(field, get, set);
        } else {
            has_meaning ? bound.def_rw(field, member, meaning) : bound.def_rw(field, member);
        }
    });
    signature += ") -> None";
    const auto make = [name](Spec* self, const nb::args& args, const nb::kwargs& kwargs) {
        Spec made;
        size_t position = 0;
        std::string fields;
        Spec::fields([&]<class Value>(const char* field, Value Spec::* member, const char*) {
            fields += concat(position == 0 ? "" : ", ", field);
            const bool is_named = kwargs.contains(field), is_placed = position < args.size();
            if (is_named && is_placed) refuse(name, ": ", field, " is given twice");
            if (is_named || is_placed) {
                const nb::object value = is_placed ? nb::object(args[position]) : nb::object(kwargs[field]);
                try {
                    from_python(value, made.*member);
                } catch (const nb::cast_error&) {
                    refuse(name, ": ", field, ": expected ", type_in_python<Value>(), ", got ",
                           nb::repr(value).c_str());
                }
            }
            ++position;
        });
        if (args.size() > position) refuse(name, ": expected up to ", position, " fields, got ", args.size());
        for (const auto& [key, value] : kwargs)
            if (!has_field<Spec>(nb::cast<std::string>(key)))
                refuse(name, " has no field ", nb::repr(key).c_str(), "; it has ", fields);
        new (self) Spec(std::move(made));
    };
    bound.def("__init__", make, nb::sig(signature.c_str()));
    bound.def("__repr__", [name](const Spec& spec) {
        std::string text = concat(name, "(");
        Spec::fields([&](const char* field, auto member, const char*) {
            text += concat(text.back() == '(' ? "" : ", ", field, "=", nb::repr(to_python(spec.*member)).c_str());
        });
        return text + ")";
    });
    return bound;
}

}  // namespace

void bind_spec(nb::module_& m) {
    bind_fields<AttentionSpec>(m, "AttentionSpec", "Attention over the keys and values of each head.");
    bind_fields<MlpSpec>(m, "MlpSpec", "down(activation(gate) * up), or down(activation(up)).");
    bind_fields<ExpertsSpec>(m, "ExpertsSpec", "What layers with experts have in place of the MLP.");
    bind_fields<DeltaSpec>(m, "DeltaSpec", "What layers with a state have in place of attention.");
    bind_fields<LatentSpec>(m, "LatentSpec", "What layers with a latent cache have in place of q, k and v.");
    bind_fields<RopeSpec>(m, "RopeSpec", "A table of rotations.");
    bind_fields<CacheSpec>(m, "CacheSpec", "What a layer keeps of the tokens before.");
    bind_fields<LayerSpec>(m, "LayerSpec", "What differs from layer to layer.");
    bind_fields<ModelSpec>(m, "ModelSpec", "Everything the engine needs to know of a model, as plain numbers.")
        .def_prop_ro(
            "own_layers",
            [](const ModelSpec& spec) { return std::pair(spec.own_layers().begin, spec.own_layers().end); },
            "Of a stage of a pipeline the first of its layers and the one behind its last; else of all.")
        .def(
            "kv_bytes_per_token",
            [](const ModelSpec& s, const std::string& dtype, bool windows_only) {
                return KvCache::bytes_per_token(s, dtype_from_string(dtype), windows_only);
            },
            nb::arg("dtype"), nb::arg("windows_only") = false,
            "Of a KV cache in this dtype: all layers, or those with a window, keys and values.")
        .def(
            "state_bytes", [](const ModelSpec& s) { return KvCache::state_bytes(s); },
            "Of the state of a sequence: all layers that have one; 0: there are none.");
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
                if (linear.kind == LinearKind::by_head) continue;  // never of blocks
                std::vector<std::vector<std::string>> groups(1);
                for (const size_t index : linear.rows) {
                    const ParamRow& row = params.rows()[index];
                    if (row.shape.size() != 2) continue;
                    if (row.apart) groups.emplace_back();
                    groups.back().push_back(row.name);
                }
                const bool pairs = linear.kind == LinearKind::act_mul;
                out[linear.name.c_str()] = nb::make_tuple(nb::cast(groups), pairs, params.column_unit(linear));
            }
            return out;
        },
        nb::arg("spec"), nb::arg("num_ranks") = 1,
        nb::sig("def linears(spec: ModelSpec, num_ranks: int = 1) -> dict[str, tuple[list[list[str]], bool, int]]"),
        "By their names in packed checkpoints: the weights that each linear joins, in groups of those that GPUs want "
        "to be of one type, whether these are gate and up, and what divides all places where ranks cut its inputs (0: "
        "they do not). Linears by head are left out.");
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
        "local_spec",
        [](const ModelSpec& spec, int tp_rank, int tp_size) { return local_spec(spec, {tp_rank, tp_size}); },
        nb::arg("spec"), nb::arg("tp_rank"), nb::arg("tp_size"),
        "The part of the model that a rank of tensor parallelism has: its heads and intermediate_size. ConfigError: a "
        "tp_size that does not fit the model.");
    m.def("stage_spec", &stage_spec, nb::arg("spec"), nb::arg("stage"), nb::arg("num_stages"),
          "The part of the model that a stage of a pipeline has: a run of its layers, with the embedding before the "
          "first one, and the final norm and the lm_head behind the last one. ConfigError: more stages than layers.");
}

}  // namespace infinilm
