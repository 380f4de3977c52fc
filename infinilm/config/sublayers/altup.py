"""Alternating updates of several residual streams, and what else Gemma 3n has, in a configuration.

Called by `spec.decoder_spec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from infinilm._core import AltUpSpec, LaurelSpec
from infinilm.checks import as_integer, short_repr
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["ALTUP_KEYS", "AltUpConfig", "altup_spec", "gate_deviations", "laurel_spec"]


@dataclass(init=False, repr=False, eq=False)
class AltUpConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    altup_num_inputs: int = 1
    laurel_rank: int = 0
    activation_sparsity_pattern: list[float] | None = None  # None: 0 in all layers, or as transformers takes it


ALTUP_KEYS = frozenset(defaults_of(AltUpConfig))
"""The keys of Gemma 3n."""

_MOST_STREAMS = 8  # src/args/stream_limits.h

# Where a file of Gemma 3n says nothing: so many layers, of more than these, have sparse gates.
_SPARSE_LAYERS, _SPARSITY = 10, 0.95


def altup_spec(config: AltUpConfig, has_own_vectors: bool) -> AltUpSpec | None:
    """Return the residual streams of a model that has several; None: it has one.

    `has_own_vectors`: tokens have vectors for each layer, which join the streams that no sublayer adds to.
    """
    streams = as_integer("altup_num_inputs", config.altup_num_inputs)
    if streams > _MOST_STREAMS:
        raise ConfigError(f"altup_num_inputs must be 2 to {_MOST_STREAMS}, or 1 for one stream; got {streams}")
    if streams > 1 and not has_own_vectors:
        raise ConfigError(
            f"altup_num_inputs is {streams} and hidden_size_per_layer_input 0; several streams need vectors of "
            "each layer"
        )
    return AltUpSpec(streams) if streams > 1 else None


def laurel_spec(config: AltUpConfig) -> LaurelSpec | None:
    """Return the second way around attention; None: there is none."""
    rank = as_integer("laurel_rank", config.laurel_rank, least=0, below=2**16)
    return LaurelSpec(rank) if rank else None


def gate_deviations(config: AltUpConfig, is_sparse: bool) -> list[float | None]:
    """Return for each layer how many standard deviations above its mean the gate of an MLP begins to count.

    A sparsity says which part of numbers that are spread normally lies below. None: all of the gate counts.
    `is_sparse`: the family is one that has sparse gates.
    """
    layers = config.num_hidden_layers
    pattern: Any = config.activation_sparsity_pattern
    if pattern is None:
        sparse = _SPARSE_LAYERS if is_sparse and layers > _SPARSE_LAYERS else 0
        pattern = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    if isinstance(pattern, (int, float)) and not isinstance(pattern, bool):
        pattern = [float(pattern)] * layers
    is_list = isinstance(pattern, (list, tuple)) and len(pattern) == layers
    if not is_list or any(isinstance(s, bool) or not isinstance(s, (int, float)) or not 0 <= s < 1 for s in pattern):
        raise ConfigError(
            f"activation_sparsity_pattern must be null, or a number from 0 to below 1 for each of {layers} layers; got "
            f"{short_repr(pattern)}"
        )
    return [_deviations(s) if s else None for s in pattern]


def _deviations(sparsity: float) -> float:
    """Deviations below which this part of normally spread numbers lies, rounded where transformers rounds it."""
    part = float(np.float32(sparsity))
    return float(np.float32(NormalDist().inv_cdf(part) / 2**0.5) * np.float32(2**0.5))
