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

QkNorm qk_norm_from_string(const std::string& text) {
    for (const QkNorm norm : qk_norms)
        if (text == name(norm)) return norm;
    throw ConfigError(concat("qk_norm '", text, "' is not one of none, head, all, head_behind_rope, turned_heads"));
}

NormKind norm_kind_from_string(const std::string& text) {
    for (const NormKind kind : {NormKind::rms, NormKind::layer, NormKind::layer_bias})
        if (text == name(kind)) return kind;
    throw ConfigError(concat("norm '", text, "' is not one of rms, layer, layer_bias"));
}

CacheKind cache_kind_from_string(const std::string& text) {
    for (const CacheKind kind : {CacheKind::paged, CacheKind::shared, CacheKind::latent, CacheKind::state})
        if (text == name(kind)) return kind;
    throw ConfigError(concat("cache kind '", text, "' is not one of paged, shared, latent, state"));
}

}  // namespace

void bind_spec(nb::module_& m) {
    nb::class_<AttentionSpec>(m, "AttentionSpec")
        .def_rw("num_heads", &AttentionSpec::num_heads)
        .def_rw("num_kv_heads", &AttentionSpec::num_kv_heads)
        .def_rw("head_dim", &AttentionSpec::head_dim)
        .def_rw("softmax_scale", &AttentionSpec::softmax_scale)
        .def_rw("score_cap", &AttentionSpec::score_cap)
        .def_rw("qkv_bias", &AttentionSpec::qkv_bias)
        .def_rw("out_bias", &AttentionSpec::out_bias)
        .def_rw("sinks", &AttentionSpec::sinks)
        .def_rw("output_gate", &AttentionSpec::output_gate)
        .def_rw("v_norm", &AttentionSpec::v_norm, "RMSNorm of each head of v, without weight.")
        .def_prop_rw(
            "qk_norm", [](const AttentionSpec& s) { return std::string(name(s.qk_norm)); },
            [](AttentionSpec& s, const std::string& text) { s.qk_norm = qk_norm_from_string(text); });
    nb::class_<MlpSpec>(m, "MlpSpec")
        .def_rw("intermediate_size", &MlpSpec::intermediate_size)
        .def_rw("bias", &MlpSpec::bias)
        .def_rw("gated", &MlpSpec::gated)
        .def_prop_rw(
            "activation", [](const MlpSpec& s) { return std::string(name(s.activation)); },
            [](MlpSpec& s, const std::string& text) { s.activation = activation_from_string(text); });
    nb::class_<ExpertsSpec>(m, "ExpertsSpec", "What layers with experts have in place of the MLP.")
        .def_rw("count", &ExpertsSpec::count, "0: no layer has any.")
        .def_rw("top_k", &ExpertsSpec::top_k)
        .def_rw("intermediate_size", &ExpertsSpec::intermediate_size, "Of each expert.")
        .def_rw("shared_intermediate_size", &ExpertsSpec::shared_intermediate_size,
                "Of one that all tokens go to; 0: there is none.")
        .def_rw("shared_gate", &ExpertsSpec::shared_gate, "Its result is weighed by the sigmoid of a logit.")
        .def_rw("bias", &ExpertsSpec::bias, "Of the router and of each expert.")
        .def_prop_rw(
            "scoring", [](const ExpertsSpec& s) { return std::string(name(s.scoring)); },
            [](ExpertsSpec& s, const std::string& text) { s.scoring = scoring_from_string(text); })
        .def_rw("correction_bias", &ExpertsSpec::correction_bias, "Added to scores for the choice alone.")
        .def_rw("norm_topk_prob", &ExpertsSpec::norm_topk_prob)
        .def_rw("scale", &ExpertsSpec::scale, "Of a token's weights.")
        .def_rw("num_groups", &ExpertsSpec::num_groups)
        .def_rw("top_groups", &ExpertsSpec::top_groups, "A token's experts are those of its best groups.")
        .def_rw("group_best", &ExpertsSpec::group_best, "Experts of a group that say how good it is.")
        .def_rw("beside_mlp", &ExpertsSpec::beside_mlp, "The layer has its MLP, too; each of the two has its norms.")
        .def_rw("weigh_inputs", &ExpertsSpec::weigh_inputs, "An expert reads the token times its weight.");
    nb::class_<DeltaSpec>(m, "DeltaSpec", "What layers with a state have in place of attention.")
        .def_rw("num_k_heads", &DeltaSpec::num_k_heads)
        .def_rw("num_v_heads", &DeltaSpec::num_v_heads)
        .def_rw("k_dim", &DeltaSpec::k_dim)
        .def_rw("v_dim", &DeltaSpec::v_dim)
        .def_rw("conv_size", &DeltaSpec::conv_size, "Tokens that the convolution sees.");
    nb::class_<LatentSpec>(m, "LatentSpec", "What layers with a latent cache have in place of q, k and v.")
        .def_rw("q_rank", &LatentSpec::q_rank, "0: queries are made of the hidden state.")
        .def_rw("kv_rank", &LatentSpec::kv_rank)
        .def_rw("rope_dim", &LatentSpec::rope_dim)
        .def_rw("nope_dim", &LatentSpec::nope_dim)
        .def_rw("v_dim", &LatentSpec::v_dim, "Of a head.")
        .def_rw("norm_eps", &LatentSpec::norm_eps, "Of the norms of latents.");
    nb::class_<RopeSpec>(m, "RopeSpec")
        .def(
            "__init__",
            [](RopeSpec* self, std::vector<float> inv_freq, float attention_factor, float scale_beta,
               int scale_positions, int scale_offset) {
                new (self) RopeSpec{std::move(inv_freq), attention_factor, scale_beta, scale_positions, scale_offset};
            },
            nb::arg("inv_freq"), nb::arg("attention_factor") = 1.0f, nb::arg("scale_beta") = 0.0f,
            nb::arg("scale_positions") = 1, nb::arg("scale_offset") = 0)
        .def_rw("scale_beta", &RopeSpec::scale_beta)
        .def_rw("scale_positions", &RopeSpec::scale_positions)
        .def_rw("scale_offset", &RopeSpec::scale_offset)
        .def_rw("inv_freq", &RopeSpec::inv_freq, "[rotary_dim / 2]")
        .def_rw("attention_factor", &RopeSpec::attention_factor);
    nb::class_<CacheSpec>(m, "CacheSpec", "What a layer keeps of the tokens before.")
        .def(
            "__init__",
            [](CacheSpec* self, const std::string& kind, int num_kv_heads, int head_dim, int owner) {
                new (self) CacheSpec{cache_kind_from_string(kind), num_kv_heads, head_dim, owner};
            },
            nb::arg("kind") = "paged", nb::arg("num_kv_heads") = 0, nb::arg("head_dim") = 0, nb::arg("owner") = -1)
        .def_prop_ro("kind", [](const CacheSpec& s) { return std::string(name(s.kind)); })
        .def_ro("num_kv_heads", &CacheSpec::num_kv_heads, "0: as the model has them.")
        .def_ro("head_dim", &CacheSpec::head_dim, "0: as the model has it.")
        .def_ro("owner", &CacheSpec::owner, "Of a shared one: the earlier layer whose keys and values these are.");
    nb::class_<LayerSpec>(m, "LayerSpec", "What differs from layer to layer.")
        .def(
            "__init__",
            [](LayerSpec* self, int sliding_window, int rope, int q_rope, bool experts, const CacheSpec& cache,
               int intermediate_size, bool chunked) {
                new (self) LayerSpec{sliding_window, chunked, rope, q_rope, experts, cache, intermediate_size};
            },
            nb::arg("sliding_window") = 0, nb::arg("rope") = 0, nb::arg("q_rope") = -1, nb::arg("experts") = false,
            nb::arg("cache") = CacheSpec(), nb::arg("intermediate_size") = 0, nb::arg("chunked") = false)
        .def_rw("chunked", &LayerSpec::chunked, "The window begins at multiples of its size, and does not slide.")
        .def_rw("cache", &LayerSpec::cache)
        .def_rw("intermediate_size", &LayerSpec::intermediate_size, "Of the MLP; 0: as the model has it.")
        .def_rw("q_rope", &LayerSpec::q_rope, "Which turns q, where that is another; else -1.")
        .def_rw("sliding_window", &LayerSpec::sliding_window, "0: the layer sees everything.")
        .def_rw("rope", &LayerSpec::rope, "Which of `ropes` turns its q and k; -1: none.")
        .def_rw("experts", &LayerSpec::experts, "It has experts in place of the MLP, or beside it.");
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
        .def_prop_rw(
            "norm", [](const ModelSpec& s) { return std::string(name(s.norm)); },
            [](ModelSpec& s, const std::string& text) { s.norm = norm_kind_from_string(text); })
        .def_rw("pre_norms", &ModelSpec::pre_norms)
        .def_rw("post_norms", &ModelSpec::post_norms)
        .def_rw("parallel_blocks", &ModelSpec::parallel_blocks)
        .def_rw("norm_offset", &ModelSpec::norm_offset)
        .def_rw("embedding_multiplier", &ModelSpec::embedding_multiplier)
        .def_rw("residual_multiplier", &ModelSpec::residual_multiplier)
        .def_rw("logit_multiplier", &ModelSpec::logit_multiplier)
        .def_rw("logit_cap", &ModelSpec::logit_cap)
        .def_rw("tie_word_embeddings", &ModelSpec::tie_word_embeddings)
        .def_rw("layer_scalars", &ModelSpec::layer_scalars, "Each layer multiplies the residual stream it leaves.")
        .def_rw("per_layer_size", &ModelSpec::per_layer_size, "Of a token's vector for each layer; 0: it has none.")
        .def_rw("per_layer_vocab_size", &ModelSpec::per_layer_vocab_size)
        .def_rw("attention", &ModelSpec::attention)
        .def_rw("mlp", &ModelSpec::mlp)
        .def_rw("experts", &ModelSpec::experts)
        .def_rw("delta", &ModelSpec::delta)
        .def_rw("latent", &ModelSpec::latent)
        .def_rw("ropes", &ModelSpec::ropes)
        .def_rw("layers", &ModelSpec::layers, "[num_layers]")
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
