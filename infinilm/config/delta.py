"""What a configuration says of layers with a state: which these are, and the sizes of the gated delta rule in them.

Called by `families.model_facts`; the numpy reference model and the engine read the same facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from infinilm.checks import INT_LIMIT, as_integer
from infinilm.errors import ConfigError

__all__ = ["DELTA_DEFAULTS", "DELTA_KEYS", "STATE_LAYER", "DeltaConfig", "DeltaFacts", "delta_facts"]

DELTA_DEFAULTS = {
    "linear_num_key_heads": 0,
    "linear_num_value_heads": 0,
    "linear_key_head_dim": 0,
    "linear_value_head_dim": 0,
    "linear_conv_kernel_dim": 0,
    "full_attention_interval": None,  # None: no layer has a state unless layer_types says so
}
"""Of families without states."""

DELTA_KEYS = frozenset(DELTA_DEFAULTS)

STATE_LAYER = "linear_attention"
"""In `layer_types`."""

_MOST_KEY_DIM = 256  # what the kernels hold
_MOST_TAPS = 8


class DeltaConfig(Protocol):
    """What this module reads of a configuration; `LlamaConfig` is one, and documents the fields."""

    num_hidden_layers: int
    layer_types: list[str] | None
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int | None


@dataclass(frozen=True, slots=True)
class DeltaFacts:
    """The gated delta rule of a model; the numbers are 0 where no layer has a state."""

    layers: tuple[bool, ...]  # [num_layers]: which have a state; others have attention
    num_k_heads: int = 0  # of q and k
    num_v_heads: int = 0
    k_dim: int = 0  # of a head
    v_dim: int = 0
    conv_size: int = 0  # tokens that the convolution sees

    @property
    def k_size(self) -> int:
        """All heads of q, or of k."""
        return self.num_k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        """All heads of v."""
        return self.num_v_heads * self.v_dim


def delta_facts(config: DeltaConfig) -> DeltaFacts:
    """Derive the facts of a configuration; ConfigError for a field that is wrong."""
    interval = config.full_attention_interval
    if interval is not None:
        as_integer("full_attention_interval", interval)
    if config.layer_types is not None:
        layers = tuple(kind == STATE_LAYER for kind in config.layer_types)
    else:
        layers = tuple(
            interval is not None and (layer + 1) % interval != 0 for layer in range(config.num_hidden_layers)
        )
    if not any(layers):
        return DeltaFacts(layers)
    limit = 2**16
    facts = DeltaFacts(
        layers,
        num_k_heads=as_integer("linear_num_key_heads", config.linear_num_key_heads, below=limit),
        num_v_heads=as_integer("linear_num_value_heads", config.linear_num_value_heads, below=limit),
        k_dim=as_integer("linear_key_head_dim", config.linear_key_head_dim, below=_MOST_KEY_DIM + 1),
        v_dim=as_integer("linear_value_head_dim", config.linear_value_head_dim, below=limit),
        conv_size=as_integer("linear_conv_kernel_dim", config.linear_conv_kernel_dim, below=_MOST_TAPS + 1),
    )
    if facts.num_v_heads % facts.num_k_heads:
        raise ConfigError(
            f"linear_num_value_heads ({facts.num_v_heads}) must be a multiple of linear_num_key_heads "
            f"({facts.num_k_heads})"
        )
    if 2 * (facts.k_size + facts.v_size + facts.num_v_heads) >= INT_LIMIT:
        raise ConfigError("the heads of linear attention have more than 2**31 elements together")
    return facts
