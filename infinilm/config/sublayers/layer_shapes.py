"""Layers that differ in shape, in a configuration: their heads, their MLPs, and the keys and values that they share.

Called by `spec.decoder_spec`, and where files are read, which say keys once where these are the values, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinilm._core import OwnVectorsSpec
from infinilm.checks import INT_LIMIT, as_boolean, as_integer
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["LAYER_KEYS", "LayerShape", "LayerShapeConfig", "layer_shapes", "own_vectors"]


@dataclass(init=False, repr=False, eq=False)
class LayerShapeConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    global_head_dim: int | None = None  # None: head_dim
    num_global_key_value_heads: int | None = None  # None: num_key_value_heads
    swa_num_key_value_heads: int | None = None  # of layers with a window; None: num_key_value_heads
    swa_num_attention_heads: int | None = None  # of layers with a window; None: num_attention_heads
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int | None = None  # None: vocab_size


LAYER_KEYS = frozenset(defaults_of(LayerShapeConfig)) - {"swa_num_key_value_heads", "swa_num_attention_heads"}
"""The keys of Gemma 4."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer."""

    num_heads: int
    head_dim: int
    num_kv_heads: int
    intermediate_size: int  # inner size of the MLP
    window: int  # 0: none; w: position p sees p - w + 1 .. p
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
    heads, window_heads = config.num_attention_heads, config.num_key_value_heads
    window_queries = heads
    if config.swa_num_attention_heads is not None:
        window_queries = as_integer("swa_num_attention_heads", config.swa_num_attention_heads, below=INT_LIMIT)
    if config.swa_num_key_value_heads is not None:
        window_heads = as_integer("swa_num_key_value_heads", config.swa_num_key_value_heads, below=INT_LIMIT)
    if window_queries % window_heads:
        queries, keys = (
            key if getattr(config, f"swa_{key}") is None else f"swa_{key}"
            for key in ("num_attention_heads", "num_key_value_heads")
        )
        raise ConfigError(f"{queries} ({window_queries}) must be a multiple of {keys} ({window_heads})")
    if heads % global_heads:
        raise ConfigError(
            f"num_attention_heads ({heads}) must be a multiple of num_global_key_value_heads ({global_heads})"
        )
    if (
        max(heads, window_queries) + 2 * global_heads
    ) * global_dim >= INT_LIMIT or 4 * config.intermediate_size >= INT_LIMIT:
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
                window_queries if window else heads,
                config.head_dim if window else global_dim,
                window_heads if window else global_heads,
                config.intermediate_size * (2 if wide else 1),
                window,
                config.attention_k_eq_v and not window and owner is None,
                owner,
            )
        )
    return tuple(shapes)


def own_vectors(
    config: LayerShapeConfig, activation: str, pad_token_id: int, may_lack_rows: bool = False
) -> OwnVectorsSpec | None:
    """Return the vectors that a token has for each layer; None: there are none.

    `pad_token_id`: the token whose vectors those of a picture have. `may_lack_rows`: tokens beyond the table have the
    vectors of the first one.
    """
    size = as_integer("hidden_size_per_layer_input", config.hidden_size_per_layer_input, least=0)
    if not size:
        return None
    if size * config.num_hidden_layers >= INT_LIMIT:
        raise ConfigError(f"hidden_size_per_layer_input * num_hidden_layers must be < 2**31; got {size} of each")
    rows = config.vocab_size
    if config.vocab_size_per_layer_input is not None:
        rows = as_integer("vocab_size_per_layer_input", config.vocab_size_per_layer_input, below=INT_LIMIT)
    if rows < config.vocab_size and not may_lack_rows:
        raise ConfigError(
            f"vocab_size_per_layer_input must be at least vocab_size, {config.vocab_size}, so that each token has a "
            f"row; got {rows}"
        )
    pad_id = as_integer("pad_token_id", pad_token_id, least=0, below=rows)
    return OwnVectorsSpec(size, rows, activation=activation, pad_id=pad_id)
