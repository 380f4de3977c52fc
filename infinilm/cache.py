"""KV cache configurations of the engine layer: how much room, and in what units it is handed out.

Both kinds are one layout in the core, `[num_blocks, num_kv_heads, block_size, head_dim]` for K and V of a layer each:
a static cache has one block of `max_cache_len` tokens per batch row, a paged one has many small blocks that block
tables join to sequences. `InferEngine` takes a configuration and asks it for its `layout`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from infinilm.checks import DTYPES, as_integer, dtype_name, short_repr
from infinilm.errors import CacheFullError, ConfigError
from infinilm.logs import logger

__all__ = [
    "CACHE_DTYPES", "SCALED_DTYPES", "CacheConfig", "CacheLayout", "PagedCacheConfig", "PagedKVCacheConfig",
    "StaticKVCacheConfig", "resolve_cache_dtype",
]  # fmt: skip

SCALED_DTYPES = ("int8", "fp8")
"""What K and V can be kept in with a float32 scale for each head of a token; fp8 (e4m3) on GPUs alone."""

CACHE_DTYPES = (*DTYPES, *SCALED_DTYPES)
"""What K and V can be kept in."""

UNLIMITED = 2**64 - 1
"""`max_cache_len` that means: as many tokens as the model has positions."""

_BYTES_LIMIT = 2**62  # sizes of tensors are signed 64-bit in the core


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of one rank, as the core allocates it."""

    kind: Literal["static", "paged"]
    num_blocks: int  # static: rows of the batch
    block_size: int  # tokens; static: those of one row
    dtype: str  # of K and V

    @property
    def num_slots(self) -> int:
        """Tokens it holds; slot = block * block_size + offset."""
        return self.num_blocks * self.block_size


class CacheConfig:
    """What the KV cache configurations have in common; abstract. They are immutable, and copies are deep.

    Raises
    ------
    NotImplementedError
        When constructed: use `StaticKVCacheConfig` or `PagedKVCacheConfig`.
    """

    __slots__ = ()

    dtype: str | None
    """The dtype of K and V; None: the engine chooses."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "CacheConfig is abstract; construct a StaticKVCacheConfig or a PagedKVCacheConfig instead"
        )

    def __repr__(self) -> str:
        return "<CacheConfig (abstract)>"

    def layout(self, *, max_position_embeddings: int, kv_bytes_per_token: int, dtype: str) -> CacheLayout:
        """Blocks and their size in an engine.

        Parameters
        ----------
        max_position_embeddings
            Positions of the model.
        kv_bytes_per_token
            Bytes of a token on one rank in `dtype`: all layers, K and V.
        dtype
            The dtype of K and V, as `resolve_cache_dtype` gives it.

        Raises
        ------
        CacheFullError
            The bytes are too few for one block, or more than any machine has.
        """
        raise NotImplementedError

    def default(self, max_position_embeddings: int) -> CacheConfig:
        """The default configuration of this kind: room for one sequence of all the model's positions."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, repr=False)
class StaticKVCacheConfig(CacheConfig):
    """A cache with one row per sequence of the batch, each `max_cache_len` tokens long.

    K and V are `[num_layers, max_batch_size, num_kv_heads, max_cache_len, head_dim]` each. Memory is reserved, and on
    a CPU taken from the system as rows grow.

    Parameters
    ----------
    max_batch_size
        Rows, at least 1. A batch may be smaller: its row i is the cache's row i.
    max_cache_len
        Tokens of a row, at least 1. The default means max_position_embeddings of the model.
    dtype
        The dtype of K and V, one of `CACHE_DTYPES`; None: as the engine computes, or as `LLM` resolves
        `kv_cache_dtype`. On a GPU it is the engine's, "int8" or "fp8".

    Raises
    ------
    ConfigError
        A value that is no integer in its range, or an unknown dtype.
    """

    max_batch_size: int = 1
    max_cache_len: int = UNLIMITED
    _: KW_ONLY
    dtype: str | None = None

    def __post_init__(self) -> None:
        _store_dtype(self)
        _store_integer(self, "max_batch_size", self.max_batch_size)
        _store_integer(self, "max_cache_len", self.max_cache_len)

    def __repr__(self) -> str:
        return "<StaticKVCacheConfig>"

    def layout(self, *, max_position_embeddings: int, kv_bytes_per_token: int, dtype: str) -> CacheLayout:
        """Blocks and their size in an engine; see `CacheConfig.layout`."""
        length = max_position_embeddings if self.max_cache_len == UNLIMITED else self.max_cache_len
        if length > max_position_embeddings:
            logger.warning(
                "max_cache_len=%d is beyond the %d positions the model was made for", length, max_position_embeddings
            )
        _check_bytes(
            self.max_batch_size * length * kv_bytes_per_token,
            f"max_batch_size={self.max_batch_size} and max_cache_len={length}",
        )
        return CacheLayout("static", self.max_batch_size, length, dtype)

    def default(self, max_position_embeddings: int) -> CacheConfig:
        """``StaticKVCacheConfig()``, with the same dtype."""
        return StaticKVCacheConfig(dtype=self.dtype)


@dataclass(frozen=True, slots=True, repr=False)
class PagedKVCacheConfig(CacheConfig):
    """A cache of small blocks, which the block tables of an `InferEngine.Input` join to sequences.

    K and V are `[num_layers, num_blocks, num_kv_heads, block_size, head_dim]` each; the place of a token is
    slot = block * block_size + offset. Which block belongs to whom is the caller's business.

    Parameters
    ----------
    max_kv_memory_bytes
        Bytes the cache may take: K and V of all layers of one rank.
    block_size
        Tokens of a block, at least 1.
    num_blocks
        Blocks, instead of bytes: exactly one of the two is given.
    dtype
        The dtype of K and V, one of `CACHE_DTYPES`; None: as the engine computes, or as `LLM` resolves
        `kv_cache_dtype`. On a GPU it is the engine's, "int8" or "fp8".

    Raises
    ------
    ConfigError
        A value out of its range, or not exactly one of bytes and blocks.
    """

    max_kv_memory_bytes: int | None = None
    block_size: int = 16
    _: KW_ONLY
    num_blocks: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if (self.max_kv_memory_bytes is None) == (self.num_blocks is None):
            given = "both" if self.num_blocks is not None else "neither"
            raise ConfigError(
                f"PagedKVCacheConfig needs exactly one of max_kv_memory_bytes and num_blocks, got {given}"
            )
        for name in ("max_kv_memory_bytes", "block_size", "num_blocks"):
            if getattr(self, name) is not None:
                _store_integer(self, name, getattr(self, name))
        _store_dtype(self)

    def __repr__(self) -> str:
        return "<PagedKVCacheConfig>"

    def layout(self, *, max_position_embeddings: int, kv_bytes_per_token: int, dtype: str) -> CacheLayout:
        """Blocks and their size in an engine; see `CacheConfig.layout`."""
        block_bytes = self.block_size * kv_bytes_per_token
        if self.max_kv_memory_bytes is None:
            assert self.num_blocks is not None  # __post_init__
            num_blocks, setting = self.num_blocks, f"num_blocks={self.num_blocks}"
        else:
            num_blocks = self.max_kv_memory_bytes // block_bytes
            setting = f"max_kv_memory_bytes={self.max_kv_memory_bytes}"
        if num_blocks < 1:
            raise CacheFullError(
                f"{setting} is less than one block needs: {block_bytes} bytes for block_size={self.block_size} tokens "
                f"of {kv_bytes_per_token} bytes; raise max_kv_memory_bytes to at least {block_bytes}, or lower "
                "block_size"
            )
        _check_bytes(num_blocks * block_bytes, f"{setting} and block_size={self.block_size}")
        return CacheLayout("paged", num_blocks, self.block_size, dtype)

    def default(self, max_position_embeddings: int) -> CacheConfig:
        """The same block size and dtype, and as many blocks as a sequence of `max_position_embeddings` tokens takes."""
        num_blocks = -(-max_position_embeddings // self.block_size)
        return PagedKVCacheConfig(block_size=self.block_size, num_blocks=num_blocks, dtype=self.dtype)


PagedCacheConfig = PagedKVCacheConfig
"""Another name of `PagedKVCacheConfig`."""


def resolve_cache_dtype(requested: str | None, auto: str, *, computed: str, device: str) -> str:
    """Return the dtype of K and V.

    Parameters
    ----------
    requested
        One of `CACHE_DTYPES`, or "auto" or None for the default.
    auto
        The default, on a CPU.
    computed
        What the engine computes in: on a GPU the cache has that, or a dtype of `SCALED_DTYPES`.
    device
        "cpu", "cuda" or "cuda:<index>".

    Raises
    ------
    ConfigError
        Another value, or one that the device has not.
    """
    wanted = "auto" if requested is None else dtype_name(requested)
    if wanted not in ("auto", *CACHE_DTYPES):
        raise ConfigError(
            f"kv_cache_dtype: expected 'auto', {', '.join(map(repr, CACHE_DTYPES))}, got {short_repr(requested)}"
        )
    if device.partition(":")[0] == "cuda":
        if wanted not in ("auto", computed, *SCALED_DTYPES):
            raise ConfigError(
                f"kv_cache_dtype: on a GPU the KV cache has the dtype that is computed in, {computed!r}, or is 'int8' "
                f"or 'fp8', got {wanted!r}; leave it out, or pass dtype={wanted!r}"
            )
        return computed if wanted == "auto" else wanted
    if wanted == "fp8":
        raise ConfigError("kv_cache_dtype: 'fp8' is for GPUs, got it on a CPU; 'int8' takes as much memory")
    return auto if wanted == "auto" else wanted


def _store_dtype(config: StaticKVCacheConfig | PagedKVCacheConfig) -> None:
    """Keep `dtype` as one of `CACHE_DTYPES` or None, or refuse it."""
    if config.dtype is None:
        return
    dtype = dtype_name(config.dtype)
    if dtype not in CACHE_DTYPES:
        raise ConfigError(
            f"{type(config).__name__}: dtype: expected {', '.join(map(repr, CACHE_DTYPES))} or None, got "
            f"{short_repr(config.dtype)}"
        )
    object.__setattr__(config, "dtype", dtype)


def _store_integer(config: CacheConfig, name: str, value: object) -> None:
    """Keep `value` as an int, or refuse it."""
    object.__setattr__(config, name, as_integer(f"{type(config).__name__}: {name}", value, below=UNLIMITED + 1))


def _check_bytes(num_bytes: int, setting: str) -> None:
    if num_bytes >= _BYTES_LIMIT:
        raise CacheFullError(f"{setting} ask for a KV cache of {num_bytes} bytes, which no machine has; lower them")
