"""`EngineModel`: an `InferEngine` with `generate`.

`EngineRows` is what both kinds of KV cache have in common for a caller that works on whole rows: it knows the length
of each, and writes the `InferEngine.Input` of its next tokens. `compare` uses it too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.cache import StaticKVCacheConfig
from infinilm.engine.hooks import HookRegistry
from infinilm.engine.infer_engine import InferEngine
from infinilm.errors import CacheFullError, InfinilmError
from infinilm.generation import GenerationMixin, Sampling, TokenRows, log_softmax, sample_tokens
from infinilm.text.generation_config import GenerationConfig

__all__ = ["EngineModel", "EngineRows"]

Int32Array = npt.NDArray[np.int32]


class EngineModel(GenerationMixin):
    """A model that an engine computes; `AutoLlamaModel.from_pretrained` makes it. A context manager.

    Parameters
    ----------
    engine : InferEngine
        With its weights; `close` closes it.
    generation_config : GenerationConfig, optional
        What counts where the caller of `generate` says nothing, and the ids that end a row, if it has any.
    grow_cache : bool
        Let `generate` put a larger static KV cache in the place of one that cannot hold its batch; otherwise that is
        an error.

    Attributes
    ----------
    engine : InferEngine
        Use it by hand as you like, but not while `generate` runs: both write the cache from its beginning.
    config : ModelConfig
    dtype, device : str
    max_model_len : int
        Tokens of a row.
    """

    def __init__(
        self, engine: InferEngine, *, generation_config: GenerationConfig | None = None, grow_cache: bool = False
    ) -> None:
        self.engine = engine
        self.config = engine.config
        self.dtype = engine.dtype
        self.device = engine.device
        self.use_generation_config(generation_config or GenerationConfig())
        self._grow_cache = grow_cache
        self._lock = threading.RLock()  # the rows of one call have the whole cache
        self._busy = False

    @property
    def max_model_len(self) -> int:  # type: ignore[override]  # of the cache in use, which may change
        """Tokens of a row, prompt and output together."""
        positions = self.config.max_position_embeddings
        cache = self.engine.cache_layout
        return (
            positions
            if self._grow_cache
            else min(positions, cache.num_slots if cache.kind == "paged" else cache.block_size)
        )

    def forward(self, input: InferEngine.Input, *, return_logits: bool = False) -> InferEngine.Output:
        """Run one step by hand; see `InferEngine.forward`."""
        return self.engine.forward(input, return_logits=return_logits)

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        """Use the hooks of a registry; see `InferEngine.set_hook_registry`."""
        self.engine.set_hook_registry(registry)

    @contextmanager
    def _rows(self, num_rows: int, num_tokens: int) -> Iterator[TokenRows]:
        self.engine.check_caller()
        with self._lock:
            if self._busy:  # in this very thread
                raise InfinilmError("a streamer cannot generate with the model that is calling it; do it afterwards")
            cache = self.engine.cache_layout
            too_small = cache.num_blocks < num_rows or cache.block_size < num_tokens
            if self._grow_cache and cache.kind == "static" and too_small:
                # A power of two, so that calls of nearly the same length share one cache.
                length = min(1 << (num_tokens - 1).bit_length(), self.max_model_len)
                self.engine.reset_cache(StaticKVCacheConfig(num_rows, length))
            self._busy = True
            try:
                yield EngineRows(self.engine, num_rows, num_tokens)
            finally:
                self._busy = False

    def close(self) -> None:
        """Free the weights, the cache and the threads. Idempotent."""
        self.engine.close()

    def __repr__(self) -> str:
        return f"<EngineModel {self.config.model_type}, {self.dtype} on {self.device}>"


class EngineRows(TokenRows):
    """Rows of tokens in the cache of an engine, empty at first.

    In a static cache row i is the cache's row i, so a row that has ended stays in the batch and computes its last
    place again, or its first, which needs no state of those before. In a paged cache row i owns the blocks from
    i * blocks_per_row on, and leaves the batch when it ends.

    Parameters
    ----------
    engine : InferEngine
    num_rows : int
    num_tokens : int
        Tokens that a row will have at most.

    Raises
    ------
    CacheFullError
        The engine's cache does not hold that many tokens.
    """

    def __init__(self, engine: InferEngine, num_rows: int, num_tokens: int) -> None:
        self._engine = engine
        self._paged = engine.cache_layout.kind == "paged"
        self._lengths = np.zeros(num_rows, np.int64)
        cache = engine.cache_layout
        blocks_per_row = -(-num_tokens // cache.block_size)
        if self._paged and num_rows * blocks_per_row > cache.num_blocks:
            raise CacheFullError(
                f"{num_rows} rows of {num_tokens} tokens need {num_rows * blocks_per_row} blocks of {cache.block_size} "
                f"and the paged KV cache has {cache.num_blocks}: give it more, or lower max_new_tokens"
            )
        if not self._paged and (num_rows > cache.num_blocks or num_tokens > cache.block_size):
            raise CacheFullError(
                f"{num_rows} rows of {num_tokens} tokens do not fit: the static KV cache has {cache.num_blocks} rows "
                f"of {cache.block_size}; raise max_batch_size or max_cache_len, or lower max_new_tokens"
            )
        blocks_per_row = blocks_per_row if self._paged else 1
        self._block_tables = np.arange(num_rows * blocks_per_row).reshape(num_rows, blocks_per_row)

    def step(
        self,
        chunks: Sequence[Int32Array],
        sampling: Sampling,
        random_val: npt.NDArray[np.float32],
        seen: npt.NDArray[np.bool_] | None,
    ) -> Int32Array:
        """See `TokenRows.step`."""
        rows = [row for row, chunk in enumerate(chunks) if len(chunk)] if self._paged else list(range(len(chunks)))
        tokens = np.zeros(len(chunks), np.int32)
        if sampling.on_host:
            output = self.forward(chunks, return_logits=True, temperature=0)
            assert output.logits is not None
            own = None if seen is None else seen[rows]
            tokens[rows] = sample_tokens(output.logits.numpy(), sampling, random_val[rows], own)
        else:
            output = self.forward(
                chunks,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                random_val=random_val[rows],
            )
            tokens[rows] = output.output_ids.numpy()
        return tokens

    def log_probs(self, chunks: Sequence[Int32Array]) -> npt.NDArray[np.float32]:
        """See `TokenRows.log_probs`."""
        rows = [row for row, chunk in enumerate(chunks) if len(chunk)] if self._paged else list(range(len(chunks)))
        output = self.forward(chunks, return_logits=True, temperature=0)
        assert output.logits is not None
        logits = output.logits.numpy()
        out = np.zeros((len(chunks), logits.shape[-1]), np.float32)
        out[rows] = log_softmax(logits)
        return out

    def copy(self, rows: Sequence[tuple[int, int]]) -> None:
        """See `TokenRows.copy`."""
        block_size = self._engine.cache_layout.block_size
        for row, other in rows:
            num_tokens = int(self._lengths[row])
            used = slice(-(-num_tokens // block_size))
            self._engine.copy_blocks(
                self._block_tables[row][used].tolist(), self._block_tables[other][used].tolist(), num_tokens
            )
            self._lengths[other] = num_tokens

    def forward(
        self, chunks: Sequence[Int32Array], *, return_logits: bool = False, **sampling: Any
    ) -> InferEngine.Output:
        """Append new tokens to the rows; one request per row, with a paged cache one per row that has new tokens."""
        counts = np.array([len(chunk) for chunk in chunks])
        make = self._paged_input if self._paged else self._static_input
        output = self._engine.forward(make(chunks, counts, sampling), return_logits=return_logits)
        self._lengths += counts
        return output

    def _static_input(self, chunks: Sequence[Int32Array], counts: npt.NDArray[Any], sampling: Any) -> InferEngine.Input:
        width = int(counts.max())
        idle = self._lengths - 1 if not self._engine.has_states else np.zeros_like(self._lengths)
        return InferEngine.Input(
            input_ids=np.stack([np.pad(chunk, (0, width - len(chunk))) for chunk in chunks]),  # [num_rows, width]
            cache_lengths=np.where(counts > 0, self._lengths, np.maximum(idle, 0)),
            input_lengths=np.maximum(counts, 1),
            **sampling,
        )

    def _paged_input(self, chunks: Sequence[Int32Array], counts: npt.NDArray[Any], sampling: Any) -> InferEngine.Input:
        busy = counts > 0
        return InferEngine.Input(
            input_ids=np.concatenate(chunks)[None],  # [1, num_tokens]
            cache_lengths=self._lengths[busy],
            input_lengths=counts[busy],
            block_tables=self._block_tables[busy],
            **sampling,
        )
