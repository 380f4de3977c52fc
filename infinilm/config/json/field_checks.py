"""Checks of the fields of `ModelConfig` that only some families have, and of lists with an entry for each layer."""

from __future__ import annotations

import math
from typing import Any

from infinilm.checks import as_boolean, as_integer, short_repr
from infinilm.config.families import Family
from infinilm.config.fields import ModelFields
from infinilm.config.json.keys import UNSUPPORTED
from infinilm.config.spec import LONE_SUBLAYERS
from infinilm.config.sublayers.delta import STATE_LAYER
from infinilm.config.sublayers.mamba import MAMBA_KEYS
from infinilm.config.sublayers.shared_block import HYBRID_LAYER, SHARED_BLOCK_KEYS
from infinilm.config.sublayers.short_conv import CONV_LAYER, SHORT_CONV_KEYS
from infinilm.config.sublayers.windows import CHUNKED_LAYER
from infinilm.errors import ConfigError

__all__ = ["check_family_keys", "check_layer_types", "check_positive"]


def check_positive(key: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number > 0 that float32 can hold."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= 3.4e38 or not math.isfinite(value):
        raise ConfigError(f"{key} must be a finite number > 0; got {value!r}")


def check_layer_types(config: ModelFields, family: Family) -> None:
    """Raise ConfigError where `layer_types` is not a list of kinds that the family has, one for each layer."""
    kinds = ("full_attention", CHUNKED_LAYER if family.windows == "chunks" else "sliding_attention")
    if "linear_num_key_heads" in family.keys:
        kinds = ("full_attention", STATE_LAYER)
    if family.keys >= MAMBA_KEYS:
        kinds = ("full_attention", STATE_LAYER, *(LONE_SUBLAYERS if family.lone_sublayers else ()))
    if family.keys >= SHARED_BLOCK_KEYS:
        kinds = (STATE_LAYER, HYBRID_LAYER)
    if family.keys >= SHORT_CONV_KEYS:
        kinds = ("full_attention", CONV_LAYER)
    if config.layer_types is None:
        # A configuration that was read always has them, unless an interval says which layers have attention.
        if {STATE_LAYER, CONV_LAYER} & {*kinds} and "full_attention_interval" not in family.keys:
            raise ConfigError(
                f"layer_types is None, but layers of {family.architecture} are of several kinds: give a list with one "
                f"of {kinds} for each layer, or use {type(config).__name__}.from_dict, which reads them from other keys"
            )
        return
    if not isinstance(config.layer_types, (list, tuple)):
        raise ConfigError(f"layer_types must be null or a list of {kinds}; got {config.layer_types!r}")
    for layer, kind in enumerate(config.layer_types):
        if kind not in kinds:
            raise ConfigError(
                f"layer_types[{layer}] {kind!r} is not supported in {family.architecture}; "
                f"supported: {', '.join(kinds)}"
            )
    if len(config.layer_types) != config.num_hidden_layers:
        raise ConfigError(
            f"layer_types must have num_hidden_layers = {config.num_hidden_layers} entries; "
            f"got {len(config.layer_types)}"
        )


def check_family_keys(config: ModelFields, family: Family) -> None:
    """Raise ConfigError for a field that the family has not, or whose number is out of range."""
    for key, (neutral, reason) in UNSUPPORTED.items():
        value = getattr(config, key, None)
        allowed = (*neutral, family.defaults[key]) if key in family.defaults else neutral
        if key not in family.keys and value not in allowed:
            raise ConfigError(f"{key} is {short_repr(value)} in {family.architecture}: {reason}")
    for key in ("partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
        check_positive(key, getattr(config, key))
    for key in (
        "attention_multiplier",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "clip_qkv",
        "final_logit_softcapping",
        "rope_local_base_freq",
        "swa_partial_rotary_factor",
    ):
        if getattr(config, key) is not None:
            check_positive(key, getattr(config, key))
    if as_integer("num_ln_in_parallel_attn", config.num_ln_in_parallel_attn) > 2:
        raise ConfigError(f"num_ln_in_parallel_attn must be 1 or 2; got {config.num_ln_in_parallel_attn}")
    if config.attention_chunk_size is not None:
        as_integer("attention_chunk_size", config.attention_chunk_size)
    if type(config.attn_temperature_tuning) is not int:  # published configs say 4, which means True
        as_boolean("attn_temperature_tuning", config.attn_temperature_tuning, error=ConfigError)
    as_integer("floor_scale", config.floor_scale)
    check_positive("attn_scale", config.attn_scale)
    if config.sliding_window_pattern is not None:
        as_integer("sliding_window_pattern", config.sliding_window_pattern)
    for key in ("partial_rotary_factor", "swa_partial_rotary_factor"):
        part = getattr(config, key)
        if part is None:
            continue
        if part > 1:
            raise ConfigError(f"{key} must be at most 1; got {part}")
        turned = int(config.head_dim * part)
        if part < 1 and (turned < 2 or turned % 2):
            raise ConfigError(
                f"head_dim * {key} must be even and >= 2, because RoPE rotates pairs; got {config.head_dim} * {part}"
            )
    if config.no_rope_layer_interval is not None:
        as_integer("no_rope_layer_interval", config.no_rope_layer_interval, least=0)
    layers = config.no_rope_layers
    if layers is not None and (
        not isinstance(layers, (list, tuple))
        or len(layers) != config.num_hidden_layers
        or any(value not in (0, 1) for value in layers)
    ):
        raise ConfigError(
            f"no_rope_layers must be null or a list of num_hidden_layers = {config.num_hidden_layers} entries, 1 "
            f"for a layer with RoPE and 0 for one without; got {short_repr(layers)}"
        )
