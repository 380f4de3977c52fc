"""The indexer of attention in a configuration: small heads by which a token chooses the keys that it reads.

Called by `spec.decoder_spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from infinilm._core import IndexerSpec
from infinilm.checks import as_integer, short_repr
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["BLOCK_KEYS", "INDEXER_KEYS", "IndexerConfig", "indexer_kinds", "indexer_spec"]


@dataclass(init=False, repr=False, eq=False)
class IndexerConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    index_topk: int | None = None  # keys that a token reads; None: it reads all that it sees, or blocks of them
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_block_size: int | None = None  # keys of a block; None: there are no blocks
    index_topk_blocks: int | None = None  # blocks that a token reads
    index_local_blocks: int | None = None  # of these, so many up to its own, whatever their scores
    indexer_types: list[str] | None = None  # of each layer, "full", "shared" or "none"; None: the next three say it
    index_topk_pattern: str | None = None  # the same, as F and S
    index_topk_freq: int = 1  # so many layers from index_skip_topk_offset - 1 on have one indexer, that of the first
    index_skip_topk_offset: int = 2


_BLOCKS = ("index_block_size", "index_topk_blocks", "index_local_blocks")

INDEXER_KEYS = frozenset(defaults_of(IndexerConfig)).difference(_BLOCKS)
"""Keys of config.json, of latent attention."""

BLOCK_KEYS = frozenset({"index_n_heads", "index_head_dim", "indexer_types", *_BLOCKS})
"""Keys of config.json, of attention whose heads of keys choose blocks."""

IndexerKind = Literal["full", "shared", "none"]

_NORM_EPS = 1e-6  # of the LayerNorm of keys
_TYPES: Mapping[str, IndexerKind] = {"F": "full", "S": "shared"}


def indexer_spec(config: IndexerConfig) -> IndexerSpec | None:
    """Return the indexer that layers have; None: there is none.

    Raises
    ------
    ConfigError
        A field is wrong.
    """
    if config.index_topk is None and config.index_topk_blocks is None:
        return None
    limit = 2**16
    num_heads = as_integer("index_n_heads", config.index_n_heads, below=limit)
    head_dim = as_integer("index_head_dim", config.index_head_dim, below=limit)
    if config.index_topk_blocks is None:
        top_k = as_integer("index_topk", config.index_topk, below=2**24)
        return IndexerSpec(num_heads=num_heads, head_dim=head_dim, top_k=top_k, norm_eps=_NORM_EPS)
    size, blocks, last = (as_integer(key, getattr(config, key), below=2**12) for key in _BLOCKS)
    if last > blocks:
        raise ConfigError(f"index_local_blocks must be at most index_topk_blocks, {blocks}; got {last}")
    if num_heads != config.num_key_value_heads:
        raise ConfigError(
            f"index_n_heads must be num_key_value_heads, {config.num_key_value_heads}: each head of keys has an "
            f"indexer of its own; got {num_heads}"
        )
    return IndexerSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        top_k=blocks * size,
        by_head=True,
        run_keys=size,
        last_runs=last,
    )


def indexer_kinds(config: IndexerConfig) -> list[IndexerKind]:
    """Return of each layer whether its tokens choose keys, read those that they chose in the layer before, or all.

    Raises
    ------
    ConfigError
        `indexer_types` or `index_topk_pattern` is not one of such types for each layer.
    """
    layers = range(config.num_hidden_layers)
    known = {"full", "none"} if config.index_topk_blocks is not None else set(_TYPES.values())
    types: Any = config.indexer_types
    key = "indexer_types"
    if types is None and config.index_topk_pattern is not None:
        key = "index_topk_pattern"
        types = [_TYPES.get(letter, letter) for letter in config.index_topk_pattern]
    if types is None and config.index_topk_blocks is not None:
        return ["none"] * len(layers)
    if types is None:
        freq = as_integer("index_topk_freq", config.index_topk_freq)
        offset = as_integer("index_skip_topk_offset", config.index_skip_topk_offset, least=0)
        return ["shared" if max(layer - offset + 1, 0) % freq else "full" for layer in layers]
    if not isinstance(types, list) or len(types) != len(layers) or not set(types) <= known:
        raise ConfigError(
            f"{key} must say of each of the {len(layers)} layers whether its indexer is {' or '.join(sorted(known))}; "
            f"got {short_repr(getattr(config, key))}"
        )
    return types
