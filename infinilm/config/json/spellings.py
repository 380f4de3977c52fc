"""Brings the spellings of config.json to one: 4.x and 5.x of transformers, and habits of some families.

Called by `ModelConfig` with the keys it was given, which these functions change in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.config.families import Family
from infinilm.config.fields import COMMON_DEFAULTS
from infinilm.config.json.step import layers_of_laguna, layers_of_step
from infinilm.config.sublayers.delta import STATE_LAYER
from infinilm.config.sublayers.shared_block import HYBRID_LAYER
from infinilm.config.sublayers.short_conv import CONV_LAYER
from infinilm.errors import ConfigError
from infinilm.logs import logger

__all__ = ["DUAL_CHUNK", "limit_context", "plain_floats", "rename", "unify_names", "unify_rope", "unify_rope_type"]

DUAL_CHUNK = "dual_chunk_attention_config"

_OF_EACH_LAYER = frozenset({"moe_topk"})  # keys that may be a list, of which all entries must be one number


def rename(values: dict[str, Any], old: str, new: str) -> None:
    """Move `old` to `new`; null is nothing, and both may be there only if they agree."""
    value = values.pop(old, None)
    if value is None:
        return
    if values.get(new) is not None and values[new] != value:
        raise ConfigError(f"{old} is {value!r} and {new} is {values[new]!r}; they mean the same, keep one")
    values[new] = value


def unify_names(values: dict[str, Any], family: Family) -> None:
    """Bring the names that a family has for fields to those of `ModelConfig`."""
    _check_fixed_keys(values, family)
    for key in family.ignored_keys:
        values.pop(key, None)
    _rename_fields(values, family)
    for unify in _SPELLINGS:
        unify(values)
    for key, unify_key in _KEYS_OF_FAMILIES:
        if key in family.keys:
            unify_key(values, family)


def _check_fixed_keys(values: dict[str, Any], family: Family) -> None:
    """Drop the keys of which the family computes one value alone; an error where they have another."""
    for key, expected in family.fixed_keys.items():
        allowed = expected if isinstance(expected, tuple) else (expected,)
        if key in values and values.pop(key) not in allowed:
            one_of = " or ".join(map(repr, allowed))
            raise ConfigError(f"{key} must be {one_of} in {family.architecture}; others are not supported")


def _rename_fields(values: dict[str, Any], family: Family) -> None:
    for old, fields in family.other_keys.items():
        value = values.pop(old, None)
        if old in _OF_EACH_LAYER and isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]
        for name in fields:
            values[old] = value
            rename(values, old, name)


def _no_window(values: dict[str, Any]) -> None:
    """Qwen2-MoE's configurations are saved with a window of 0 where there is none."""
    if values.get("use_sliding_window") is False and values.get("sliding_window") == 0:
        values["sliding_window"] = None


def _kinds_of_layers(values: dict[str, Any]) -> None:
    """Hybrid models write "attention" where others write "full_attention", and "mamba" for a layer with a state."""
    kinds = values.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        names = {"attention": "full_attention", "mamba": STATE_LAYER}
        values["layer_types"] = [names.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def _pattern_of_windows(values: dict[str, Any]) -> None:
    """A pattern such as "LLLG" has an L for each layer with a window, then a G for one without.

    EXAONE's configurations are saved with a pattern of 0 where there is no window.
    """
    pattern = values.get("sliding_window_pattern")
    if pattern == 0 and values.get("sliding_window", 0) is None:
        values["sliding_window_pattern"] = None
    if isinstance(pattern, str):
        if not pattern or pattern != "L" * (len(pattern) - 1) + "G":
            raise ConfigError(f"sliding_window_pattern must be a number, or like 'LLLG'; got {short_repr(pattern)}")
        values["sliding_window_pattern"] = len(pattern)


def _part_of_head(values: dict[str, Any], family: Family) -> None:
    """Bring `rotary_dim`, the elements of a head that RoPE turns, to `partial_rotary_factor`."""
    size = values.pop("rotary_dim", None)
    if size is None:
        return
    head_dim = values.get("head_dim") or family.defaults.get("head_dim")
    if head_dim is None:
        sizes = {**COMMON_DEFAULTS, **family.defaults}
        hidden_size, heads = (
            as_integer(key, values.get(key) or sizes[key]) for key in ("hidden_size", "num_attention_heads")
        )
        head_dim = hidden_size // heads
    size, head_dim = as_integer("rotary_dim", size), as_integer("head_dim", head_dim)
    values["rotary_dim"] = size / head_dim
    rename(values, "rotary_dim", "partial_rotary_factor")


def _sizes_of_llama4(values: dict[str, Any], family: Family) -> None:
    """Bring sizes of MLPs, `intermediate_size` being that of experts, and `moe_layers`, a list, to those of others."""
    if values.get("no_rope_layers") == []:
        del values["no_rope_layers"]
    if values.get("moe_intermediate_size") is None:
        defaults = family.defaults
        size = values.pop("intermediate_size", None) or defaults["moe_intermediate_size"]
        values["moe_intermediate_size"] = values["shared_expert_intermediate_size"] = size
        values["intermediate_size"] = values.pop("intermediate_size_mlp", None) or defaults["intermediate_size"]
    given = values.pop("moe_layers", None)
    if given is None:
        return
    number = values.get("num_hidden_layers") or values.get("num_layers") or family.defaults["num_hidden_layers"]
    layers = range(as_integer("num_hidden_layers", number))
    if not isinstance(given, (list, tuple)) or any(type(layer) is not int or layer not in layers for layer in given):
        raise ConfigError(f"moe_layers must be a list of numbers of layers; got {short_repr(given)}")
    values["decoder_sparse_step"] = 1  # whatever interleave_moe_layer_step says
    values["mlp_only_layers"] = [layer for layer in layers if layer not in given]


def _refuse_alibi(values: dict[str, Any], family: Family) -> None:
    """Tell Baichuan's 13B models, which have no `max_position_embeddings`, from 7B, of which one attention is here."""
    length = values.pop("model_max_length", None)
    if (length is not None and values.get("max_position_embeddings") is None) or values.get("hidden_size") == 5120:
        raise ConfigError(
            f"{family.architecture} without max_position_embeddings, or with hidden_size 5120, is a 13B model, whose "
            "positions come from ALiBi, which is not supported; 7B models, which have RoPE, are"
        )


def _multipliers_of_sizes(values: dict[str, Any], family: Family) -> None:
    """Bring MiniCPM's `scale_emb`, `scale_depth` and `dim_model_base` to multipliers."""
    layers = values.get("num_hidden_layers") or values.get("num_layers")
    sizes = {"num_hidden_layers": layers, "hidden_size": values.get("hidden_size")}
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    layers, hidden = (as_integer(key, defaults[key] if size is None else size) for key, size in sizes.items())
    if "kv_lora_rank" in family.keys and values.get("v_head_dim") is None:
        heads = values.get("num_attention_heads") or defaults["num_attention_heads"]
        values["v_head_dim"] = hidden // as_integer("num_attention_heads", heads)
    for key, name, factor in (
        ("scale_emb", "embedding_multiplier", 1.0),
        ("scale_depth", "residual_multiplier", layers**-0.5),
        ("dim_model_base", "logits_scaling", 0.0),
    ):
        value = values.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1e-6 < value < 1e9:
            raise ConfigError(f"{key} must be a finite number > 0; got {short_repr(value)}")
        values[key] = value * factor if factor else hidden / value
        rename(values, key, name)


def _dense_at_the_end(values: dict[str, Any], family: Family) -> None:
    """Bring `moe_layer_end_index`, the last layer that has experts, to `mlp_only_layers`; -1 or null: the very last."""
    end = values.pop("moe_layer_end_index", None)
    if end in (None, -1):
        return
    num_layers = values.get("num_hidden_layers") or values.get("num_layers") or family.defaults["num_hidden_layers"]
    first_dense = as_integer("moe_layer_end_index", end, least=0) + 1
    values["moe_layer_end_index"] = list(range(first_dense, as_integer("num_hidden_layers", num_layers))) or None
    rename(values, "moe_layer_end_index", "mlp_only_layers")


def _global_layers(values: dict[str, Any], family: Family) -> None:
    """Bring `per_layer_config`, what differs in layers by their numbers, to the keys of layers without a window."""
    if "hidden_size_per_layer_input" in values and values["hidden_size_per_layer_input"] is None:
        values["hidden_size_per_layer_input"] = 0  # in files null says that there are none
    given = values.pop("per_layer_config", None)
    if given is None:
        return
    kinds = values.get("layer_types")
    own = list(given.values()) if isinstance(given, Mapping) else []
    own = [part for part in own if isinstance(part, Mapping)]
    if not isinstance(given, Mapping) or len(own) < len(given) or not isinstance(kinds, (list, tuple)):
        raise ConfigError(
            f"per_layer_config must be an object of objects by the number of a layer, beside layer_types; got "
            f"{short_repr(given)}"
        )
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    layers = [int(key) if str(key).isdecimal() else -1 for key in given]  # transformers pads them: "02", "11"
    keys = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if own and (sorted(layers) != full or any(part != own[0] for part in own) or not own[0].keys() <= keys.keys()):
        raise ConfigError(
            "per_layer_config: only head_dim and num_key_value_heads can differ, and those of all 'full_attention' "
            f"layers, {', '.join(map(str, full))}, must be the same; got {short_repr(given)}"
        )
    for old, new in keys.items():
        values["per_layer_config"] = own[0].get(old) if own else None
        rename(values, "per_layer_config", new)
        values.setdefault(new, None)
    if own and "num_key_value_heads" in own[0] and not values.get("attention_k_eq_v"):
        raise ConfigError("per_layer_config: num_key_value_heads differs only where attention_k_eq_v is true")


def _sizes_of_gemma3n(values: dict[str, Any], family: Family) -> None:
    """Bring `intermediate_size`, which may be a list of all layers, to one number."""
    sizes = values.get("intermediate_size")
    if not isinstance(sizes, (list, tuple)):
        return
    if not sizes or any(size != sizes[0] for size in sizes):
        raise ConfigError(
            f"intermediate_size must be the same in all layers of {family.architecture}; got {short_repr(sizes)}"
        )
    values["intermediate_size"] = sizes[0]


def _layers_of_mimo(values: dict[str, Any], family: Family) -> None:
    """Bring MiMo V2's patterns, with a number for each layer, and what it says of layers with a window to others' keys.

    A token sees `sliding_window_size` tokens before itself, and these layers have twice as many heads of keys.
    """
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    number = values.get("num_hidden_layers") or values.get("num_layers") or defaults["num_hidden_layers"]
    for key, name, kinds in (
        ("hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention")),
        ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
    ):
        pattern = values.pop(key, None)
        if pattern is None:
            continue
        if not isinstance(pattern, (list, tuple)) or len(pattern) != number or set(pattern) - {0, 1}:
            raise ConfigError(f"{key} must have 0 or 1 for each of the {number} layers; got {short_repr(pattern)}")
        values[key] = [kinds[kind] for kind in pattern]
        rename(values, key, name)
    before = values.pop("sliding_window_size", None)
    if before is not None:
        values["sliding_window"] = as_integer("sliding_window_size", before) + 1
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        own, others = values.pop(f"swa_{key}", None), values.get(key) or defaults[key]
        if own not in (None, others):
            raise ConfigError(f"swa_{key} must be {key}, {others!r}; got {own!r}")
    if values.get("swa_num_key_value_heads") is None:
        heads = values.get("num_key_value_heads") or defaults["num_key_value_heads"]
        values["swa_num_key_value_heads"] = 2 * as_integer("num_key_value_heads", heads)


_SPARSE_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def _layers_of_minimax_m3(values: dict[str, Any], family: Family) -> None:
    """Bring MiniMax M3's sizes and layers to the keys of others: `intermediate_size` is that of experts."""
    own = values.pop("sparse_attention_config", None) or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"sparse_attention_config must be an object; got {short_repr(own)}")
    for key, old in _SPARSE_KEYS.items():
        if own.get(old) is not None:
            values[key] = own[old]
    for key, supported in {"sparse_init_block": 0, "sparse_score_type": "max"}.items():
        if own.get(key) not in (None, supported):
            raise ConfigError(f"{key} of sparse_attention_config must be {supported!r}; got {short_repr(own[key])}")
    kinds, chooses = values.pop("layer_types", None), own.get("sparse_attention_freq")
    known = {"full_attention": "none", "minimax_m3_sparse": "full"}
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - set(known)):
        raise ConfigError(
            f"layer_types must be a list of 'full_attention' and 'minimax_m3_sparse'; got {short_repr(kinds)}"
        )
    if chooses is not None and not isinstance(chooses, list):
        raise ConfigError(
            f"sparse_attention_freq must be a list with a number of each layer; got {short_repr(chooses)}"
        )
    if kinds is not None:
        values["indexer_types"] = [known[kind] for kind in kinds]
    elif chooses is not None:
        values["indexer_types"] = ["full" if chosen else "none" for chosen in chooses]
    frequency = values.pop("moe_layer_freq", None)
    if isinstance(frequency, list) and values.get("mlp_layer_types") is None:
        values["mlp_layer_types"] = ["sparse" if has_experts else "dense" for has_experts in frequency]
    if values.get("hidden_act") == "swigluoai":
        del values["hidden_act"]
    dense_size, shared_size = values.pop("dense_intermediate_size", None), values.pop("shared_intermediate_size", None)
    if values.get("moe_intermediate_size") is None:
        defaults = family.defaults
        values["moe_intermediate_size"] = values.get("intermediate_size") or defaults["moe_intermediate_size"]
        values["intermediate_size"] = dense_size or defaults["intermediate_size"]
        values["shared_expert_intermediate_size"] = shared_size or defaults["shared_expert_intermediate_size"]


def _root_of_hidden(values: dict[str, Any], family: Family) -> None:
    """Bring `mup_enabled`, which multiplies the embedding by the root of hidden_size, to `embedding_multiplier`."""
    scaled = values.pop("mup_enabled", None)
    if scaled is None:
        return
    size = values.get("hidden_size") or family.defaults["hidden_size"]
    if as_boolean("mup_enabled", scaled, error=ConfigError):
        values["mup_enabled"] = as_integer("hidden_size", size) ** 0.5
        rename(values, "mup_enabled", "embedding_multiplier")


def _groups_by_method(values: dict[str, Any], family: Family) -> None:
    """Drop the groups of experts where `topk_method` is one without groups."""
    method = values.pop("topk_method", None) or "greedy"
    if method in ("greedy", "gready"):
        values["n_group"] = values["topk_group"] = 1
    elif method != "group_limited_greedy":
        raise ConfigError(
            f"topk_method must be 'greedy' or 'group_limited_greedy' in {family.architecture}; got {short_repr(method)}"
        )


def _layers_of_cohere(values: dict[str, Any], family: Family) -> None:
    """Bring sizes, norms and layers of Cohere 2 with experts to the keys of others.

    `intermediate_size` is that of experts; with `rms_norm_eps` norms are RMSNorm. The first layers have no experts, and
    a pattern of windows of their own: where that is 1, none of them has a window and all turn, in which they differ
    from others without a window.
    """
    defaults = {**COMMON_DEFAULTS, **family.defaults}

    def number(key: str, default: int) -> int:
        return as_integer(key, default if values.get(key) is None else values[key], least=0)

    dense_size = values.pop("prefix_dense_intermediate_size", None)
    if values.get("moe_intermediate_size") is None:
        size = number("intermediate_size", defaults["intermediate_size"])
        values["moe_intermediate_size"], values["intermediate_size"] = size, dense_size or size
    eps = values.pop("layer_norm_eps", None)
    if values.get("use_rms_norm") is None:
        values["use_rms_norm"] = values.get("rms_norm_eps") is not None
    if not values["use_rms_norm"]:
        values["layer_norm_eps"] = eps
        rename(values, "layer_norm_eps", "rms_norm_eps")
    layers = number("num_hidden_layers", values.get("num_layers") or defaults["num_hidden_layers"])
    first, kinds = number("first_k_dense_replace", 0), values.get("mlp_layer_types")
    own_pattern = number("prefix_dense_sliding_window_pattern", 1) or 1
    values.pop("prefix_dense_sliding_window_pattern", None)
    pattern = number("sliding_window_pattern", defaults["sliding_window_pattern"]) or 1
    if values.get("layer_types") is None:
        ends = [
            (layer + 1) % own_pattern if layer < first else (layer - first + 1) % pattern for layer in range(layers)
        ]
        values["layer_types"] = ["sliding_attention" if end else "full_attention" for end in ends]
    if values.get("no_rope_layers") is None:
        is_dense = [layer < first for layer in range(layers)]
        if isinstance(kinds, (list, tuple)) and len(kinds) == layers:  # a wrong list is refused by its own check
            is_dense = [kind == "dense" for kind in kinds]
        turns = zip(values["layer_types"], is_dense, strict=False)
        values["no_rope_layers"] = [
            int(kind == "sliding_attention" or (own and own_pattern == 1)) for kind, own in turns
        ]


def _dense_by_type(values: dict[str, Any], family: Family) -> None:
    """Bring `mlp_layer_types`, "dense" or "sparse" of each layer, to `mlp_only_layers`."""
    kinds = values.pop("mlp_layer_types", None)
    if kinds is None:
        return
    num_layers = values.get("num_hidden_layers") or values.get("num_layers")
    if (
        not isinstance(kinds, (list, tuple))
        or any(kind not in ("dense", "sparse") for kind in kinds)
        or num_layers not in (None, len(kinds))
    ):
        raise ConfigError(
            f"mlp_layer_types must be a list of 'dense' and 'sparse', one for each of the {num_layers} layers; got "
            f"{short_repr(kinds)}"
        )
    first = values.pop("first_k_dense_replace", None) or 0
    if isinstance(first, int) and "sparse" in kinds[:first]:
        raise ConfigError(
            f"first_k_dense_replace is {first}, but mlp_layer_types has experts in layer {kinds.index('sparse')}; keep "
            "one of them"
        )
    values["first_k_dense_replace"] = 0
    values["mlp_layer_types"] = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    rename(values, "mlp_layer_types", "mlp_only_layers")


def _sizes_of_lfm2(values: dict[str, Any], family: Family) -> None:
    """Bring the sizes of LFM2: `full_attn_idxs`, the layers with attention, and an adjusted size of the MLPs.

    With `block_auto_adjust_ff_dim` an MLP has two thirds of the said size, times a factor, in whole multiples.
    """
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    number = values.get("num_hidden_layers") or values.get("num_layers") or defaults["num_hidden_layers"]
    layers = range(as_integer("num_hidden_layers", number))
    attention = values.pop("full_attn_idxs", None)
    if values.get("layer_types") is None:
        own = layers if attention is None else attention
        if not isinstance(own, (list, tuple, range)) or any(type(i) is not int or i not in layers for i in own):
            raise ConfigError(f"full_attn_idxs must be a list of numbers of layers; got {short_repr(attention)}")
        values["layer_types"] = ["full_attention" if layer in own else CONV_LAYER for layer in layers]
    adjusts, factor = values.pop("block_auto_adjust_ff_dim", None), values.pop("block_ffn_dim_multiplier", None)
    multiple = as_integer("block_multiple_of", values.pop("block_multiple_of", None) or 256)
    values["block_auto_adjust_ff_dim"] = False
    if adjusts is False or "num_experts" in family.keys:
        return
    if factor is not None and (not isinstance(factor, (int, float)) or not 0 < factor < 1e6):
        raise ConfigError(f"block_ffn_dim_multiplier must be a finite number > 0; got {short_repr(factor)}")
    size = as_integer("intermediate_size", values.get("intermediate_size") or defaults["intermediate_size"])
    size = int((1.0 if factor is None else factor) * int(2 * size / 3))
    values["intermediate_size"] = -(-size // multiple) * multiple


def _layers_of_kimi(values: dict[str, Any], family: Family) -> None:
    """Bring Kimi Linear's `linear_attn_config`, which counts layers from 1, to the keys of others."""
    own = values.pop("linear_attn_config", None) or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"linear_attn_config must be an object; got {short_repr(own)}")
    for key, names in (
        ("num_heads", ("linear_num_key_heads", "linear_num_value_heads")),
        ("head_dim", ("linear_key_head_dim", "linear_value_head_dim")),
        ("short_conv_kernel_size", ("linear_conv_kernel_dim",)),
    ):
        for name in names:
            values[f"linear_attn_config: {key}"] = own.get(key)
            rename(values, f"linear_attn_config: {key}", name)
    if values.get("layer_types") is not None:
        return
    number = values.get("num_hidden_layers") or values.get("num_layers") or family.defaults["num_hidden_layers"]
    layers = range(1, as_integer("num_hidden_layers", number) + 1)
    attention = own.get("full_attn_layers")
    if attention is None:
        attention = [layer for layer in layers if layer > 1 and layer % 4 == 1]
    if not isinstance(attention, (list, tuple)) or any(type(i) is not int or i not in layers for i in attention):
        raise ConfigError(
            f"linear_attn_config: full_attn_layers must be a list of numbers of layers, from 1 on; got "
            f"{short_repr(attention)}"
        )
    values["layer_types"] = ["full_attention" if layer in attention else STATE_LAYER for layer in layers]


def _sizes_of_ling(values: dict[str, Any], family: Family) -> None:
    """Bring Ling 3's sizes of layers with a state, which are those of heads of attention, to the keys of others.

    In files that transformers saved again `head_dim` is the part of a head that RoPE turns. Limits of activations go on
    behind the last layer, or end before it.
    """
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    layers = as_integer("num_hidden_layers", values.get("num_hidden_layers") or defaults["num_hidden_layers"])
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        if isinstance(limits := values.get(key), (list, tuple)):
            values[key] = [*limits[:layers], *[0.0] * (layers - len(limits))]
    size, own = values.pop("head_dim", None), values.pop("linear_head_dim", None)
    if own is not None:
        size = own
    heads = values.pop("linear_num_heads", None) or values.get("num_attention_heads") or defaults["num_attention_heads"]
    for name in ("key", "value"):
        if values.get(f"linear_{name}_head_dim") is None and size is not None:
            values[f"linear_{name}_head_dim"] = size
        if values.get(f"linear_num_{name}_heads") is None:
            values[f"linear_num_{name}_heads"] = heads
    rename(values, "short_conv_kernel_size", "linear_conv_kernel_dim")
    safe = values.pop("kda_safe_gate", None)
    if safe is not None and not as_boolean("kda_safe_gate", safe, error=ConfigError):
        values["kda_lower_bound"] = 0.0


def _head_of_mamba(values: dict[str, Any], family: Family) -> None:
    """Bring `mamba_d_head` "auto", which the other sizes say, to null."""
    if values.get("mamba_d_head") == "auto":
        values["mamba_d_head"] = None


def _layers_of_granite(values: dict[str, Any], family: Family) -> None:
    """Bring Granite 4's sizes of MLPs, its positions, and layers that are not named to those of others.

    Beside experts an MLP is the expert of all tokens; `intermediate_size` is always that of experts.
    """
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    number = values.get("num_hidden_layers") or values.get("num_layers") or defaults["num_hidden_layers"]
    layers = as_integer("num_hidden_layers", number)
    if values.get("layer_types") is None:
        values["layer_types"] = [STATE_LAYER] * layers
    position = values.pop("position_embedding_type", None)
    if position not in (None, "rope", "nope"):
        raise ConfigError(f"position_embedding_type must be 'rope', 'nope' or null; got {short_repr(position)}")
    if values.get("no_rope_layers") is None:
        values["no_rope_layers"] = [int(position == "rope")] * layers
    shared = values.pop("shared_intermediate_size", None)
    if values.get("shared_expert_intermediate_size") is not None:
        return  # these are fields, and no config.json
    experts = values.get("num_experts")
    has_experts = (defaults["num_experts"] if experts is None else experts) != 0
    values["shared_expert_intermediate_size" if has_experts else "intermediate_size"] = (
        1024 if shared is None else shared
    )
    if not has_experts:
        values["shared_expert_intermediate_size"] = 0


def _thetas_of_layers(values: dict[str, Any], family: Family) -> None:
    """Bring `layer_rope_theta`, the base of each layer's RoPE, or 0, to one for each kind of layers.

    A layer in four has no window where `layer_types` says nothing.
    """
    number = values.get("num_hidden_layers") or {**COMMON_DEFAULTS, **family.defaults}["num_hidden_layers"]
    layers = as_integer("num_hidden_layers", number)
    if values.get("layer_types") is None:
        values["layer_types"] = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)]
    thetas, kinds = values.pop("layer_rope_theta", None), values["layer_types"]
    if thetas is None or not isinstance(kinds, list) or len(kinds) != layers:
        return  # a wrong list is refused by the check of layer_types
    is_list = isinstance(thetas, list) and len(thetas) == layers
    if not is_list or any(isinstance(t, bool) or not isinstance(t, (int, float)) or t < 0 for t in thetas):
        raise ConfigError(
            f"layer_rope_theta must be null or a list of num_hidden_layers = {layers} numbers >= 0, 0 for a layer "
            f"without RoPE; got {short_repr(thetas)}"
        )
    by_kind = {kind: {t for t, own in zip(thetas, kinds, strict=True) if own == kind and t} for kind in kinds}
    if any(len(own) > 1 for own in by_kind.values()):
        raise ConfigError(
            "layer_rope_theta: layers of one kind must have the same number, or 0; got "
            f"{', '.join(f'{sorted(own)} for {kind}' for kind, own in by_kind.items())}"
        )
    own = {kind: next(iter(found)) for kind, found in by_kind.items() if found}
    of_windows = own.get("sliding_attention")
    theta = own.get("full_attention", of_windows)
    values["no_rope_layers"] = [int(t > 0) for t in thetas]
    if theta is None:
        return
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(given := values.get(key), Mapping):
            if of_windows not in (None, theta) and given.get("rope_type", "default") != "default":
                raise ConfigError(
                    f"layer_rope_theta: layers with a window turn by {of_windows}, others by {theta}; that is "
                    f"supported with rope_type 'default' alone, and {key} has {given.get('rope_type')!r}"
                )
            values[key] = {name: value for name, value in given.items() if name != "rope_theta"}
    values["rope_theta"] = theta
    if of_windows not in (None, theta):
        values["rope_local_base_freq"] = of_windows


def _sizes_of_olmo_hybrid(values: dict[str, Any], family: Family) -> None:
    """Bring OLMo Hybrid's layers and sizes that are not said, and RoPE without a base, which is none."""
    defaults = {**COMMON_DEFAULTS, **family.defaults}

    def size(key: str, default: int) -> int:
        return as_integer(key, default if values.get(key) is None else values[key])

    layers = size("num_hidden_layers", values.get("num_layers") or defaults["num_hidden_layers"])
    if values.get("layer_types") is None:
        full = {*range(3, layers, 4)} or {layers - 1}
        values["layer_types"] = ["full_attention" if layer in full else STATE_LAYER for layer in range(layers)]
    if values.get("no_rope_layers") is None and values.get("rope_theta", 0) is None:
        values["no_rope_layers"] = [0] * layers
    heads = size("num_attention_heads", defaults["num_attention_heads"])
    k_heads = values["linear_num_key_heads"] = size("linear_num_key_heads", heads)
    values["linear_num_value_heads"] = size("linear_num_value_heads", heads)
    k_dim = size("linear_key_head_dim", 3 * size("hidden_size", defaults["hidden_size"]) // (4 * k_heads))
    values["linear_key_head_dim"] = k_dim
    values["linear_value_head_dim"] = size("linear_value_head_dim", 2 * k_dim)


def _layers_of_bamba(values: dict[str, Any], family: Family) -> None:
    """Bring `attn_layer_indices`, the layers with attention, to `layer_types`."""
    attention = values.pop("attn_layer_indices", None)
    if values.get("layer_types") is not None:
        return
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    number = values.get("num_hidden_layers") or values.get("num_layers") or defaults["num_hidden_layers"]
    layers = range(as_integer("num_hidden_layers", number))
    own = attention or ()
    if not isinstance(own, (list, tuple)) or any(type(i) is not int or i not in layers for i in own):
        raise ConfigError(f"attn_layer_indices must be a list of numbers of layers; got {short_repr(attention)}")
    values["layer_types"] = ["full_attention" if layer in own else STATE_LAYER for layer in layers]


def _multiplier_of_logits(values: dict[str, Any], family: Family) -> None:
    """Bring `lm_head_multiplier`, which multiplies logits, to `logits_scaling`, which divides them; Falcon H1."""
    _divide_by(values, "lm_head_multiplier")
    number = values.get("num_hidden_layers") or values.get("num_layers") or COMMON_DEFAULTS["num_hidden_layers"]
    values["layer_types"] = [STATE_LAYER] * as_integer("num_hidden_layers", number)  # and attention beside


def _layers_of_nemotron(values: dict[str, Any], family: Family) -> None:
    """Bring Nemotron-H's pattern, with a character for each layer, to `layer_types`, and find those with experts."""
    pattern = values.pop("hybrid_override_pattern", None)
    kinds = values.get("layer_types")
    if kinds is None:
        names = {"M": STATE_LAYER, "*": "full_attention", "-": "mlp", "E": "moe"}
        if pattern is None:  # the default of transformers, for as many layers as are asked for
            number = values.get("num_hidden_layers") or values.get("num_layers") or family.defaults["num_hidden_layers"]
            number = as_integer("num_hidden_layers", number)
            pattern = ("ME*-" * number)[:number]
        if not isinstance(pattern, str) or not pattern or not set(pattern) <= names.keys():
            raise ConfigError(f"hybrid_override_pattern must consist of {', '.join(names)}; got {short_repr(pattern)}")
        kinds = values["layer_types"] = [names[character] for character in pattern]
    if not isinstance(kinds, (list, tuple)):
        return  # refused by the check of layer_types
    if not values.get("num_layers"):
        values["num_hidden_layers"] = values.get("num_hidden_layers") or len(kinds)
    values["mlp_only_layers"] = [layer for layer, kind in enumerate(kinds) if kind != "moe"]
    if "moe" not in kinds:
        values["num_experts"] = 0


def _sizes_of_zamba(values: dict[str, Any], family: Family) -> None:
    """Bring Zamba 2's heads, of rows of twice hidden_size, its RoPE and its least step to keys of others.

    Scores of attention are scaled as if a head were half as long. The layers that are not named are those of 2.7B.
    """
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    _four_times_hidden(values, family)
    layers = as_integer(
        "num_hidden_layers",
        values.get("num_hidden_layers") or values.get("num_layers") or defaults["num_hidden_layers"],
    )
    hidden, heads = (
        as_integer(key, values.get(key) or defaults[key]) for key in ("hidden_size", "num_attention_heads")
    )
    if values.get("layer_types") is None:
        state, hybrid = STATE_LAYER, HYBRID_LAYER
        first = [state] + ([state] * 5 + [hybrid]) * 7
        values["layer_types"] = [*first, *[state] * 4, hybrid, *[state] * 3, hybrid, *[state] * 2][:layers]
    if not values.get("head_dim"):
        values["head_dim"] = 2 * hidden // heads
    if values.get("query_pre_attn_scalar") is None:
        values["query_pre_attn_scalar"] = 2 * hidden // heads / 2
    turns = values.pop("use_mem_rope", None)
    if values.get("no_rope_layers") is None:
        turns = False if turns is None else as_boolean("use_mem_rope", turns, error=ConfigError)
        values["no_rope_layers"] = [int(turns)] * layers
    least = values.pop("time_step_min", None)
    if values.get("time_step_limit") is None:
        values["time_step_limit"] = [0.001 if least is None else least, float("inf")]


def _four_times_hidden(values: dict[str, Any], family: Family) -> None:
    """Set the size of MLPs such as GPT-2's, which is four times hidden_size where no key says another."""
    if values.get("intermediate_size") is None:
        hidden_size = values.get("hidden_size") or {**COMMON_DEFAULTS, **family.defaults}["hidden_size"]
        values["intermediate_size"] = 4 * as_integer("hidden_size", hidden_size)


def _width_of_embedding(values: dict[str, Any], family: Family) -> None:
    """Refuse OPT of 350 million weights, whose embedding is narrower than its layers."""
    width, hidden_size = values.pop("word_embed_proj_dim", None), values.get("hidden_size")
    if width not in (None, family.defaults["hidden_size"] if hidden_size is None else hidden_size):
        raise ConfigError(
            f"word_embed_proj_dim is {short_repr(width)} and hidden_size is {short_repr(hidden_size)}; only embeddings "
            f"as wide as the layers are supported in {family.architecture}"
        )


def _heads_of_falcon(values: dict[str, Any], family: Family) -> None:
    """Bring Falcon's keys for heads and norms to those of others.

    The new architecture says how many heads of keys there are and has attention and MLP side by side; the old one may
    have one head of keys. An absent key is as transformers reads it.
    """
    switches = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
    for key, default in switches.items():
        value = values.pop(key, None)
        switches[key] = default if value is None else as_boolean(key, value, error=ConfigError)
    is_new, num_kv_heads = switches["new_decoder_architecture"], values.pop("num_kv_heads", None)
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = 1 if switches["multi_query"] and not is_new else num_kv_heads
    if values.get("use_parallel_residual") is None:
        values["use_parallel_residual"] = is_new or switches["parallel_attn"]
    if values.get("num_ln_in_parallel_attn") is None:
        values["num_ln_in_parallel_attn"] = 2 if is_new else 1


def _attention_of_mpt(values: dict[str, Any], family: Family) -> None:
    """Bring MPT's `attn_config` to the keys of others. One kind of attention is here: all heads, with ALiBi."""
    own = values.pop("attn_config", None)
    if own is None:
        return
    if not isinstance(own, Mapping):
        raise ConfigError(f"attn_config must be an object; got {short_repr(own)}")
    expected: dict[str, tuple[Any, ...]] = {
        "attn_type": ("multihead_attention",),
        "alibi": (True,),
        "alibi_bias_max": (8,),
        "prefix_lm": (False,),
        "qk_ln": (False,),
        "softmax_scale": (None,),
    }
    for key, allowed in expected.items():
        if key in own and own[key] not in allowed:
            raise ConfigError(
                f"attn_config: {key} must be {allowed[0]!r} in {family.architecture}; got {short_repr(own[key])}"
            )
    values["attn_config: clip_qkv"] = own.get("clip_qkv") or None  # 0 clips nothing
    rename(values, "attn_config: clip_qkv", "clip_qkv")


def _logit_scale(values: dict[str, Any], family: Family) -> None:
    """Bring `logit_scale`, which multiplies logits, to `logits_scaling`, which divides them."""
    _divide_by(values, "logit_scale")


def _divide_by(values: dict[str, Any], key: str) -> None:
    scale = values.pop(key, None)
    if scale is None:
        return
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 1e-30 < scale < 1e30:
        raise ConfigError(f"{key} must be a finite number > 0; got {scale!r}")
    values[key] = 1 / scale
    rename(values, key, "logits_scaling")


# Spellings that occur in the config.json of any family.
_SPELLINGS = (_no_window, _kinds_of_layers, _pattern_of_windows)

# Keys that stand for other fields, in the families that have them.
_KEYS_OF_FAMILIES = (
    ("rotary_dim", _part_of_head),
    ("moe_layers", _sizes_of_llama4),
    ("model_max_length", _refuse_alibi),
    ("scale_depth", _multipliers_of_sizes),
    ("moe_layer_end_index", _dense_at_the_end),
    ("global_head_dim", _global_layers),
    ("laurel_rank", _sizes_of_gemma3n),
    ("mup_enabled", _root_of_hidden),
    ("topk_method", _groups_by_method),
    ("hybrid_layer_pattern", _layers_of_mimo),
    ("prefix_dense_sliding_window_pattern", _layers_of_cohere),
    ("moe_layers_enum", layers_of_step),
    ("num_attention_heads_per_layer", layers_of_laguna),
    ("sparse_attention_config", _layers_of_minimax_m3),
    ("mlp_layer_types", _dense_by_type),
    *((key, _four_times_hidden) for key in ("n_inner", "ffn_hidden_size", "expansion_ratio")),
    ("word_embed_proj_dim", _width_of_embedding),
    ("new_decoder_architecture", _heads_of_falcon),
    ("attn_config", _attention_of_mpt),
    ("logit_scale", _logit_scale),
    ("conv_L_cache", _sizes_of_lfm2),
    ("linear_attn_config", _layers_of_kimi),
    ("kda_lower_bound", _sizes_of_ling),
    ("mamba_n_heads", _head_of_mamba),
    ("position_embedding_type", _layers_of_granite),
    ("hybrid_override_pattern", _layers_of_nemotron),
    ("attn_layer_indices", _layers_of_bamba),
    ("linear_allow_neg_eigval", _sizes_of_olmo_hybrid),
    ("lm_head_multiplier", _multiplier_of_logits),
    ("num_mem_blocks", _sizes_of_zamba),
    ("layer_rope_theta", _thetas_of_layers),
)


def unify_rope(values: dict[str, Any], family: Family) -> None:
    """Bring both spellings to `rope_theta`, `partial_rotary_factor`, and `rope_scaling` without them, or None."""
    chosen: dict[str, Any] | None = None
    original = values.pop("original_max_position_embeddings", None)
    for key in ("rope_scaling", "rope_parameters"):
        given = values.pop(key, None)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ConfigError(f"{key} must be null or an object with 'rope_type'; got {given!r}")
        scaling = dict(given)
        if any(isinstance(value, Mapping) for value in given.values()):
            scaling = _of_full_attention(values, key, given, family)
        unify_rope_type(scaling, family.rope_types)
        for inert in family.rope_inert & scaling.keys():
            del scaling[inert]
        proportional = scaling.get("rope_type") == "proportional"  # the part is that type's own parameter
        for outer in ("rope_theta",) if proportional else ("rope_theta", "partial_rotary_factor"):
            if scaling.get(outer, 0) is None:  # for families where null is another thing than nothing
                values.setdefault(outer, None)
            value = scaling.pop(outer, None)
            if value is not None:
                if values.get(outer) is not None and values[outer] != value:
                    raise ConfigError(f"{outer} is {values[outer]!r}, but {key} says {value!r}; keep one of them")
                values[outer] = value
        if chosen is not None and scaling != chosen:
            raise ConfigError(
                f"rope_scaling {chosen} and rope_parameters {scaling} differ; they mean the same, keep one"
            )
        chosen = scaling
    if chosen is not None and chosen.get("rope_type") in ("llama3", "yarn", "longrope") and original is not None:
        # Phi-3's habit: the key stands beside the rope parameters instead of among them.
        inner = chosen.get("original_max_position_embeddings")
        if inner not in (None, original):
            raise ConfigError(
                f"original_max_position_embeddings is {original!r}, but among the rope parameters it is "
                f"{inner!r}; keep one of them"
            )
        chosen["original_max_position_embeddings"] = original
    if chosen is not None:
        values["rope_scaling"] = None if chosen in ({}, {"rope_type": "default"}) else chosen


def unify_rope_type(scaling: dict[str, Any], types: Mapping[str, str]) -> None:
    """Bring `type`, the key of 4.x, to `rope_type`, and names that only a family has to those of `types`."""
    for kind in ("type", "rope_type"):
        if isinstance(scaling.get(kind), str):
            scaling[kind] = types.get(scaling[kind], scaling[kind])
    rename(scaling, "type", "rope_type")


def _of_full_attention(values: dict[str, Any], key: str, given: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Parameters of each kind of layer, in the spelling of 5.x: those of layers with a window become one number."""
    full, sliding = given.get("full_attention"), given.get("sliding_attention")
    if isinstance(full, Mapping):  # what one set for all layers said is kept beside these when a file is saved again
        given = {name: value for name, value in given.items() if isinstance(value, Mapping) or full.get(name) != value}
    kinds = values.get("layer_types")
    is_only_kind = isinstance(kinds, (list, tuple)) and all(kind == "full_attention" for kind in kinds)
    if is_only_kind and isinstance(full, Mapping) and set(given) == {"full_attention"}:
        return dict(full)
    if (
        "rope_local_base_freq" not in family.keys
        or not isinstance(full, Mapping)
        or not isinstance(sliding, Mapping)
        or set(given) != {"full_attention", "sliding_attention"}
    ):
        raise ConfigError(
            f"{key} has parameters of {', '.join(map(repr, sorted(given)))}, which {family.architecture} does not "
            "take; give one set for all layers"
            + (", or 'full_attention' and 'sliding_attention'" if "rope_local_base_freq" in family.keys else "")
        )
    part, own_part = "partial_rotary_factor", "swa_partial_rotary_factor"
    same = {"rope_theta"} | ({part} if sliding.get(part) == full.get(part) or own_part in family.keys else set())
    if own_part in family.keys:
        values[f"{key}: sliding_attention: {part}"] = sliding.get(part, 1.0)
        rename(values, f"{key}: sliding_attention: {part}", own_part)
    others = {name: value for name, value in sliding.items() if name not in same and value is not None}
    if others not in ({}, {"rope_type": "default"}):
        raise ConfigError(f"{key}: sliding_attention: expected rope_theta alone, got {short_repr(dict(sliding))}")
    values[f"{key}: sliding_attention: rope_theta"] = sliding.get("rope_theta")
    rename(values, f"{key}: sliding_attention: rope_theta", "rope_local_base_freq")
    return dict(full)


def limit_context(values: dict[str, Any]) -> None:
    """Lower max_position_embeddings to where attention begins to differ from the one that is computed.

    In Qwen2.5-1M that is where dual chunk attention begins: up to a chunk, less what is seen of the one before, all
    keys are in the query's own chunk (vLLM's dual_chunk_flash_attn, `chunk_len`).
    """
    chunks = values.pop(DUAL_CHUNK, None)
    if chunks is not None:
        if not isinstance(chunks, Mapping):
            raise ConfigError(f"{DUAL_CHUNK} must be null or an object; got {short_repr(chunks)}")
        size = as_integer(f"{DUAL_CHUNK}: chunk_size", chunks.get("chunk_size"), least=2)
        local = as_integer(f"{DUAL_CHUNK}: local_size", chunks.get("local_size", 0), least=0, below=INT_LIMIT)
        if size <= local:
            raise ConfigError(f"{DUAL_CHUNK}: chunk_size must be more than local_size; got {short_repr(chunks)}")
        _limit_positions(values, size - local, "dual chunk attention")


def _limit_positions(values: dict[str, Any], limit: int, needed: str) -> None:
    positions = as_integer("max_position_embeddings", values.get("max_position_embeddings", limit))
    if positions > limit:
        logger.warning(
            "max_position_embeddings is taken as %d instead of %d: beyond that the model needs %s, "
            "which is not available in this version",
            limit,
            positions,
            needed,
        )
    values["max_position_embeddings"] = min(positions, limit)


def plain_floats(value: Any) -> Any:
    """A value of JSON, with the numbers that JSON does not have: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: plain_floats(item) for key, item in value.items()}
    return [plain_floats(item) for item in value] if isinstance(value, list) else value
