"""Which layers of a model have a sliding window: the rules of families, and what `layer_types` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from infinilm.config.sublayers.attention import AttentionConfig
from infinilm.errors import ConfigError

__all__ = ["CHUNKED_LAYER", "WindowRule", "sliding_windows"]

CHUNKED_LAYER = "chunked_attention"
"""In `layer_types`: tokens see those of their own chunk."""

WindowRule = Literal[
    "none", "all", "layer_types", "of_qwen2_moe", "of_qwen3_moe", "last_full", "first_full", "edges_full", "chunks"
]
"""The layers of a family that have a sliding window.

- "none": no layer has one.
- "all": every layer has one if `sliding_window` is set.
- "layer_types": the layers that this key names, with `use_sliding_window`. Without the key, all but every
  `sliding_window_pattern`-th layer, or the layers from `max_window_layers` on.
- "of_qwen2_moe": the same; without the key, every other layer before `max_window_layers`.
- "of_qwen3_moe": all layers, with `use_sliding_window`.
- "last_full": as "layer_types", but the last layer never has one.
- "first_full": the layers that `layer_types` names. Without it, all but each `sliding_window_pattern`-th from the first
  layer on, which has none.
- "edges_full": the layers that `layer_types` names. Without it, all but the first and each
  `sliding_window_pattern`-th.
- "chunks": tokens see those of their own chunk of `attention_chunk_size`, in layers that have RoPE, or in those that
  `layer_types` names.
"""


def sliding_windows(
    config: AttentionConfig, rule: WindowRule, turned: Sequence[bool], used: bool | None, architecture: str
) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none.

    `turned`: which layers have RoPE. `used`: the family's default of `use_sliding_window`. ConfigError where keys
    contradict each other.
    """
    if rule == "chunks":
        kinds = config.layer_types or [CHUNKED_LAYER if own else "" for own in turned]
        return tuple((kind == CHUNKED_LAYER and config.attention_chunk_size) or 0 for kind in kinds)
    use = used if config.use_sliding_window is None else config.use_sliding_window
    if rule in ("none", "all"):
        _check_switch(config, rule, use, architecture)
        window = config.sliding_window
    else:
        window = config.sliding_window if use else None
    windowed = [window is not None and _RULES[rule](config, layer) for layer in range(config.num_hidden_layers)]
    if config.layer_types is not None:
        windowed = _by_layer_types(config, config.layer_types, rule, windowed, window, use, architecture)
    if rule == "last_full":
        windowed[-1] = False
    return tuple(window if on and window is not None else 0 for on in windowed)


def _by_pattern(config: AttentionConfig, layer: int) -> bool:
    """Every layer but each `sliding_window_pattern`-th; without that, the layers from `max_window_layers` on."""
    pattern = config.sliding_window_pattern
    return (layer + 1) % pattern != 0 if pattern else layer >= config.max_window_layers


def _all_but_last(config: AttentionConfig, layer: int) -> bool:
    """Every layer but each `sliding_window_pattern`-th; without that, all but the last."""
    return (layer + 1) % (config.sliding_window_pattern or config.num_hidden_layers) != 0


# These tell if a layer has a window, in a model with one whose `layer_types` says nothing.
_RULES: Mapping[str, Callable[[AttentionConfig, int], bool]] = {
    "none": lambda _, __: False,
    "all": lambda _, __: True,
    "layer_types": _by_pattern,
    "of_qwen2_moe": lambda config, layer: layer % 2 == 0 and layer < config.max_window_layers,
    "of_qwen3_moe": lambda _, __: True,
    "last_full": _all_but_last,
    "first_full": lambda config, layer: layer % (config.sliding_window_pattern or config.num_hidden_layers) != 0,
    "edges_full": lambda config, layer: layer > 0 and _all_but_last(config, layer),
}

# Rules that `layer_types` overrides; with the others it must agree.
_OVERRIDDEN = ("layer_types", "of_qwen2_moe", "last_full", "first_full", "edges_full")


def _check_switch(config: AttentionConfig, rule: WindowRule, use: bool | None, architecture: str) -> None:
    """Refuse a `use_sliding_window` that contradicts what the family does with `sliding_window`."""
    window = config.sliding_window
    given = f"sliding_window is {window} and use_sliding_window is {use}, but {architecture}"
    if rule == "none" and (use or (window is not None and use is None)):
        raise ConfigError(
            f"{given} has no sliding window; set sliding_window to null, or choose the architecture that the weights "
            "have"
        )
    if rule == "all" and use is not None and use != (window is not None):
        raise ConfigError(
            f"{given} uses its window in every layer whenever sliding_window is set; set sliding_window to null for "
            "none"
        )


def _by_layer_types(
    config: AttentionConfig,
    kinds: Sequence[str],
    rule: WindowRule,
    windowed: list[bool],
    window: int | None,
    use: bool | None,
    architecture: str,
) -> list[bool]:
    """Return which layers have a window by `layer_types`; `windowed`: those that have one by the family's rule."""
    asked = [kind == "sliding_attention" for kind in kinds]
    if rule not in _OVERRIDDEN and asked != windowed:
        kind = "sliding_attention" if windowed[0] else "full_attention"
        raise ConfigError(
            f"layer_types is {kinds}, but with sliding_window {window} every layer of {architecture} is '{kind}'"
        )
    if any(asked) and window is None:
        raise ConfigError(
            f"layer_types asks for 'sliding_attention', but sliding_window is {config.sliding_window} and "
            f"use_sliding_window is {use}; set both or make all layers 'full_attention'"
        )
    return asked
