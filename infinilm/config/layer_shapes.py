"""What a configuration says of layers that differ in shape: their heads, whose keys and values they read, their MLPs.

Called by `families.model_facts`; the numpy reference model and the engine read the same facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from infinilm.checks import INT_LIMIT, as_boolean, as_integer
from infinilm.errors import ConfigError

__all__ = ["LAYER_DEFAULTS", "LAYER_KEYS", "LayerShape", "LayerShapeConfig", "layer_shapes", "own_vectors"]

LAYER_DEFAULTS = {
    "global_head_dim": None,  # None: head_dim
    "num_global_key_value_heads": None,  # None: num_key_value_heads
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": None,  # None: vocab_size
}
"""Of families whose layers are alike."""

LAYER_KEYS = frozenset(LAYER_DEFAULTS)


class LayerShapeConfig(Protocol):
    """What this module reads of a configuration; `LlamaConfig` is one, and documents the fields."""

    vocab_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    global_head_dim: int | None
    num_global_key_value_heads: int | None
    attention_k_eq_v: bool
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int | None

    @property
    def num_key_value_heads(self) -> int:
        """Heads of k and v."""

    @property
    def head_dim(self) -> int:
        """Size of one head."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int  # of the MLP
    values_are_keys: bool = False  # v is what k_proj gives, before norm and RoPE
    kv_owner: int | None = None  # the earlier layer whose keys and values it reads; None: it has its own


def layer_shapes(config: LayerShapeConfig, windows: Sequence[int]) -> tuple[LayerShape, ...]:
    """Derive the shapes of all layers; `windows`: of each, 0 for none. ConfigError for a field that is wrong."""
    for key in ("attention_k_eq_v", "use_double_wide_mlp"):
        as_boolean(key, getattr(config, key), error=ConfigError)
    layers = config.num_hidden_layers
    shared = as_integer("num_kv_shared_layers", config.num_kv_shared_layers, least=0)
    if shared and shared >= layers:
        raise ConfigError(f"num_kv_shared_layers must be less than num_hidden_layers, {layers}; got {shared}")
    global_dim, global_heads = config.head_dim, config.num_key_value_heads
    if config.global_head_dim is not None:
        global_dim = as_integer("global_head_dim", config.global_head_dim, below=2**16)
    if config.num_global_key_value_heads is not None and config.attention_k_eq_v:
        global_heads = as_integer("num_global_key_value_heads", config.num_global_key_value_heads, below=INT_LIMIT)
    heads = config.num_attention_heads
    if heads % global_heads:
        raise ConfigError(
            f"num_attention_heads ({heads}) must be a multiple of num_global_key_value_heads ({global_heads})"
        )
    if (heads + 2 * global_heads) * global_dim >= INT_LIMIT or 4 * config.intermediate_size >= INT_LIMIT:
        raise ConfigError("a layer has more than 2**31 elements of heads, or of an MLP")
    first_shared = layers - shared
    shapes = []
    for layer, window in enumerate(windows):
        owner = None
        if layer >= first_shared:
            alike = [other for other in range(first_shared) if (windows[other] > 0) == (window > 0)]
            if not alike:
                raise ConfigError(
                    f"num_kv_shared_layers is {shared}, but layer {layer} {'has a' if window else 'has no'} sliding "
                    f"window, and none of the first {first_shared} layers is like that"
                )
            owner = alike[-1]
        wide = owner is not None and config.use_double_wide_mlp
        shapes.append(
            LayerShape(
                config.head_dim if window else global_dim,
                config.num_key_value_heads if window else global_heads,
                config.intermediate_size * (2 if wide else 1),
                config.attention_k_eq_v and not window and owner is None,
                owner,
            )
        )
    return tuple(shapes)


def own_vectors(config: LayerShapeConfig) -> tuple[int, int]:
    """Return the size of the vector that a token has for each layer, and the rows of their table; 0, 0: none."""
    size = as_integer("hidden_size_per_layer_input", config.hidden_size_per_layer_input, least=0)
    if not size:
        return 0, 0
    if size * config.num_hidden_layers >= INT_LIMIT:
        raise ConfigError(f"hidden_size_per_layer_input * num_hidden_layers must be < 2**31; got {size} of each")
    rows = config.vocab_size
    if config.vocab_size_per_layer_input is not None:
        rows = as_integer("vocab_size_per_layer_input", config.vocab_size_per_layer_input, below=INT_LIMIT)
    if rows < config.vocab_size:
        raise ConfigError(
            f"vocab_size_per_layer_input must be at least vocab_size, {config.vocab_size}, so that each token has a "
            f"row; got {rows}"
        )
    return size, rows
