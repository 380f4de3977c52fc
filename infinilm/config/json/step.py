"""Step 3.5 and 3.7, and Laguna, in config.json: lists of all layers, and what layers with a window have otherwise.

Called by `spellings.unify_names`. Source: the configuration files of transformers, and conversion/step3.py of llama.cpp
for the keys of the hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infinilm.checks import as_integer, short_repr
from infinilm.config.families import Family
from infinilm.config.fields import COMMON_DEFAULTS
from infinilm.errors import ConfigError

__all__ = ["layers_of_laguna", "layers_of_step"]

# With an entry for each layer, and then for each layer that guesses at later tokens.
_LISTS = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)


def layers_of_step(values: dict[str, Any], family: Family) -> None:
    """Bring the lists to one number for each kind of layers, and those of experts to `mlp_only_layers`."""
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    number = values.get("num_hidden_layers") or values.get("num_layers") or defaults["num_hidden_layers"]
    layers = as_integer("num_hidden_layers", number)
    later = as_integer("num_nextn_predict_layers", values.get("num_nextn_predict_layers") or 0, least=0)
    for key in _LISTS:
        if isinstance(values.get(key), (list, tuple)) and len(values[key]) == layers + later:
            values[key] = list(values[key][:layers])
    if values.get("layer_types") is None:
        values["layer_types"] = ["full_attention"] * layers
    kinds = values["layer_types"]
    if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
        return  # refused by the check of layer_types
    _dense_layers(values, layers)
    _heads_of_windows(values, kinds, {key: values.get(key) or defaults[key] for key in ("head_dim",)})
    for key, of_others, of_windows in (
        ("rope_theta", "rope_theta", "rope_local_base_freq"),
        ("partial_rotary_factors", "partial_rotary_factor", "swa_partial_rotary_factor"),
    ):
        numbers = values.get(key)
        if not isinstance(numbers, (list, tuple)):
            continue
        del values[key]
        own = _by_kind(key, numbers, kinds)
        full, window = own.get("full_attention"), own.get("sliding_attention")
        values[of_others] = window if full is None else full
        if window is not None:
            values[of_windows] = window


def layers_of_laguna(values: dict[str, Any], family: Family) -> None:
    """Bring `num_attention_heads_per_layer` to the heads of layers with a window and of others."""
    heads, kinds = values.pop("num_attention_heads_per_layer", None), values.get("layer_types")
    number = values.get("num_hidden_layers") or family.defaults["num_hidden_layers"]
    if kinds is None:
        kinds = values["layer_types"] = ["full_attention"] * as_integer("num_hidden_layers", number)
    if heads is None or not isinstance(kinds, (list, tuple)):
        return
    own = _by_kind("num_attention_heads_per_layer", heads, kinds) if isinstance(heads, (list, tuple)) else {}
    full, window = own.get("full_attention"), own.get("sliding_attention")
    values["num_attention_heads"] = window if full is None else full
    if window is not None:
        values["swa_num_attention_heads"] = window


def _by_kind(key: str, numbers: Sequence[Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The number of each kind of layers. ConfigError: there is no number for each layer, or layers of a kind differ."""
    if len(numbers) == len(kinds):
        own = dict(zip(kinds, numbers, strict=True))
        if all(own[kind] == number for kind, number in zip(kinds, numbers, strict=True)):
            return own
    raise ConfigError(
        f"{key} must have a number for each of the {len(kinds)} layers, the same for all layers of one kind in "
        f"layer_types; got {short_repr(numbers)}"
    )


def _dense_layers(values: dict[str, Any], layers: int) -> None:
    """Bring `moe_layers_enum`, the layers with experts, to `mlp_only_layers`; without it these begin at layer 3."""
    listed = values.pop("moe_layers_enum", None)
    if values.get("mlp_layer_types") is not None or values.get("mlp_only_layers") is not None:
        return
    given = listed.split(",") if isinstance(listed, str) else range(3, layers) if listed is None else listed
    try:
        sparse = {int(layer) for layer in given if str(layer).strip()}
    except (TypeError, ValueError):
        raise ConfigError(
            f"moe_layers_enum must be a list of numbers of layers, or these with commas; got {short_repr(listed)}"
        ) from None
    values["mlp_only_layers"] = [layer for layer in range(layers) if layer not in sparse]


def _heads_of_windows(values: dict[str, Any], kinds: Sequence[str], others: Mapping[str, Any]) -> None:
    """Bring what two keys say of layers with a window to `swa_num_attention_heads` and `swa_num_key_value_heads`.

    `attention_other_setting` is an object for these layers, and `per_layer_config` has one by the number of each.
    """
    setting = values.pop("attention_other_setting", None)
    if isinstance(setting, Mapping):
        for key, expected in others.items():
            if setting.get(key) not in (None, expected):
                raise ConfigError(f"attention_other_setting: {key} must be {expected}; got {setting[key]!r}")
        for key, name in (("num_attention_heads",) * 2, ("num_attention_groups", "num_key_value_heads")):
            if setting.get(key) not in (None, values.get(name)) and values.get(f"swa_{name}") is None:
                values[f"swa_{name}"] = setting[key]
    given = values.pop("per_layer_config", None)
    if not given:
        return
    windows = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    own: list[Any] = list(given.values()) if isinstance(given, Mapping) else [None]
    layers = sorted(int(key) if str(key).isdecimal() else -1 for key in given)  # transformers pads them: "02", "11"
    is_one = isinstance(own[0], Mapping) and all(part == own[0] for part in own)
    if layers != windows or not is_one or set(own[0]) != {"num_attention_heads"}:
        raise ConfigError(
            "per_layer_config: only num_attention_heads can differ, and that of all 'sliding_attention' layers, "
            f"{', '.join(map(str, windows))}, must be the same; got {short_repr(given)}"
        )
    values["swa_num_attention_heads"] = own[0]["num_attention_heads"]
