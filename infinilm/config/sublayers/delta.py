"""Layers with a state in a configuration: which these are, and the sizes of the gated delta rule in them.

Called by `spec.decoder_spec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infinilm._core import DELTA_MOST_K_DIM, DELTA_MOST_TAPS, DeltaSpec
from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.config.sublayers.shared_block import HYBRID_LAYER
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["DELTA_KEYS", "STATE_LAYER", "Decay", "DeltaConfig", "delta_spec", "state_layers"]


@dataclass(init=False, repr=False, eq=False)
class DeltaConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    linear_allow_neg_eigval: bool = False  # what a token changes of a state is twice as much
    kda_lower_bound: float = 0.0  # of the logarithms of decays, which come through a sigmoid then; 0: there is none
    full_attention_interval: int | None = None  # None: no layer has a state unless layer_types says so


DELTA_KEYS = frozenset(defaults_of(DeltaConfig)) - {"linear_allow_neg_eigval", "kda_lower_bound"}

Decay = Literal["of_head", "of_element"]
"""What decays at its own rate: a state, or each of its rows, of which the rates come through as many elements as a key
has."""

STATE_LAYER = "linear_attention"
"""In `layer_types`."""


def state_layers(config: DeltaConfig) -> tuple[bool, ...]:
    """Tell which layers have a state; others have attention."""
    interval = config.full_attention_interval
    if interval is not None:
        as_integer("full_attention_interval", interval)
    if config.layer_types is not None:
        return tuple(kind in (STATE_LAYER, HYBRID_LAYER) for kind in config.layer_types)
    return tuple(interval is not None and (layer + 1) % interval != 0 for layer in range(config.num_hidden_layers))


def delta_spec(config: DeltaConfig, decay: Decay = "of_head") -> DeltaSpec:
    """Return the gated delta rule of layers with a state; ConfigError for a field that is wrong."""
    limit = 2**16
    spec = DeltaSpec(
        num_k_heads=as_integer("linear_num_key_heads", config.linear_num_key_heads, below=limit),
        num_v_heads=as_integer("linear_num_value_heads", config.linear_num_value_heads, below=limit),
        k_dim=as_integer("linear_key_head_dim", config.linear_key_head_dim, below=DELTA_MOST_K_DIM + 1),
        v_dim=as_integer("linear_value_head_dim", config.linear_value_head_dim, below=limit),
        conv_size=as_integer("linear_conv_kernel_dim", config.linear_conv_kernel_dim, below=DELTA_MOST_TAPS + 1),
    )
    if spec.num_v_heads % spec.num_k_heads:
        raise ConfigError(
            f"linear_num_value_heads ({spec.num_v_heads}) must be a multiple of linear_num_key_heads "
            f"({spec.num_k_heads})"
        )
    spec.by_element = spec.apart = decay == "of_element"
    spec.doubled_beta = as_boolean("linear_allow_neg_eigval", config.linear_allow_neg_eigval, error=ConfigError)
    spec.gate_rank = spec.k_dim if spec.by_element else 0
    bound = config.kda_lower_bound
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not -1e6 < bound <= 0:
        raise ConfigError(f"kda_lower_bound must be a number <= 0; got {short_repr(bound)}")
    spec.lower_bound = float(bound)
    k_size, v_size = spec.num_k_heads * spec.k_dim, spec.num_v_heads * spec.v_dim
    if 2 * (k_size + v_size + spec.num_v_heads) >= INT_LIMIT:
        raise ConfigError("the heads of linear attention have more than 2**31 elements together")
    return spec
