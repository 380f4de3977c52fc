"""Layers with a gated short convolution in a configuration: which these are, and their sizes.

Called by `spec.decoder_spec`.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinilm._core import DELTA_MOST_TAPS, ShortConvSpec
from infinilm.checks import as_integer
from infinilm.config.sublayers.sizes import Sizes

__all__ = ["CONV_LAYER", "SHORT_CONV_KEYS", "ShortConvConfig", "conv_layers", "short_conv_spec"]


@dataclass(init=False, repr=False, eq=False)
class ShortConvConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    conv_L_cache: int = 0
    # False once a configuration is read: intermediate_size is what MLPs have, and is not adjusted a second time.
    block_auto_adjust_ff_dim: bool = False


SHORT_CONV_KEYS = frozenset({"conv_L_cache"})

CONV_LAYER = "conv"
"""In `layer_types`."""


def conv_layers(config: ShortConvConfig) -> tuple[bool, ...]:
    """Tell which layers have a short convolution; others have attention."""
    kinds = config.layer_types
    return tuple(kinds is not None and kinds[layer] == CONV_LAYER for layer in range(config.num_hidden_layers))


def short_conv_spec(config: ShortConvConfig) -> ShortConvSpec:
    """Return the convolution of the layers that have one; ConfigError for a field that is wrong."""
    return ShortConvSpec(
        channels=config.hidden_size,
        conv_size=as_integer("conv_L_cache", config.conv_L_cache, below=DELTA_MOST_TAPS + 1),
    )
