"""The indexer of latent attention in a configuration: small heads by which a token chooses the keys that it reads.

Called by `spec.decoder_spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm._core import IndexerSpec
from infinilm.checks import as_integer, short_repr
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["INDEXER_KEYS", "IndexerConfig", "indexer_spec", "shares_choice"]


@dataclass(init=False, repr=False, eq=False)
class IndexerConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    index_topk: int | None = None  # keys that a token reads; None: it reads all that it sees
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    indexer_types: list[str] | None = None  # of each layer, "full" or "shared"; None: the next three say it
    index_topk_pattern: str | None = None  # the same, as F and S
    index_topk_freq: int = 1  # so many layers from index_skip_topk_offset - 1 on have one indexer, that of the first
    index_skip_topk_offset: int = 2


INDEXER_KEYS = frozenset(defaults_of(IndexerConfig))
"""Keys of config.json."""

_NORM_EPS = 1e-6  # of the LayerNorm of keys
_TYPES: Mapping[str, str] = {"F": "full", "S": "shared"}


def indexer_spec(config: IndexerConfig) -> IndexerSpec | None:
    """Return the indexer that layers have; None: there is none.

    Raises
    ------
    ConfigError
        A field is wrong.
    """
    if config.index_topk is None:
        return None
    limit = 2**16
    return IndexerSpec(
        num_heads=as_integer("index_n_heads", config.index_n_heads, below=limit),
        head_dim=as_integer("index_head_dim", config.index_head_dim, below=limit),
        top_k=as_integer("index_topk", config.index_topk, below=2**24),
        norm_eps=_NORM_EPS,
    )


def shares_choice(config: IndexerConfig) -> list[bool]:
    """Return of each layer whether its tokens read the keys that they chose in the layer before.

    Raises
    ------
    ConfigError
        `indexer_types` or `index_topk_pattern` is not one of such types for each layer.
    """
    layers = range(config.num_hidden_layers)
    types: Any = config.indexer_types
    key = "indexer_types"
    if types is None and config.index_topk_pattern is not None:
        key = "index_topk_pattern"
        types = [_TYPES.get(letter, letter) for letter in config.index_topk_pattern]
    if types is None:
        freq = as_integer("index_topk_freq", config.index_topk_freq)
        offset = as_integer("index_skip_topk_offset", config.index_skip_topk_offset, least=0)
        return [max(layer - offset + 1, 0) % freq != 0 for layer in layers]
    if not isinstance(types, list) or len(types) != len(layers) or not set(types) <= set(_TYPES.values()):
        raise ConfigError(
            f"{key} must say of each of the {len(layers)} layers whether its indexer is full or shared; "
            f"got {short_repr(getattr(config, key))}"
        )
    return [own == "shared" for own in types]
