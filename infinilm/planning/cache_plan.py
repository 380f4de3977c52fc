"""The plan of a KV cache: its budget, its dtype, and how many blocks and states its layers get."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinilm import _core
from infinilm.cache import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig, resolve_cache_dtype
from infinilm.checks import dtype_name
from infinilm.errors import CacheFullError, ConfigError
from infinilm.planning.block_plan import BlockPlan, divide_blocks
from infinilm.planning.sizes import format_bytes, parse_size
from infinilm.planning.stages import StageMemory, StagePart
from infinilm.scheduling.block_group import blocks_of_window
from infinilm.scheduling.block_manager import DEFAULT_BLOCK_SIZE
from infinilm.scheduling.states import plan_states, snapshot_interval

# The cache takes this share of the memory that is free. A GPU mostly serves one model, beside which little else comes;
# other programs, and the files that the system keeps for reading, share a machine's memory.
_DEFAULT_SHARES = {"cpu": 0.5, "cuda": 0.88}


def parse_cache_budget(kv_cache: int | str | None, free_bytes: int, device: str = "cpu") -> int:
    """Bytes the KV cache may take.

    Parameters
    ----------
    kv_cache
        Bytes, a size such as "4GiB" or "500MB", a share of what is free such as "50%", or None: half of it on a CPU,
        88% on a GPU.
    free_bytes
        What is free once the weights and the workspace are in memory.
    device
        Where it is, such as "cuda:1".

    Raises
    ------
    ConfigError
        If `kv_cache` is none of these or not positive.
    """
    if kv_cache is None:
        return int(free_bytes * _DEFAULT_SHARES[device.partition(":")[0]])
    if isinstance(kv_cache, str) and (match := re.fullmatch(r"\s*([0-9.]+)\s*%\s*", kv_cache)):
        share = 0.0
        with contextlib.suppress(ValueError):
            share = float(match[1])
        if 0 < share <= 100:
            return int(free_bytes * share / 100)
    expected = "a share of free memory such as '50%', a PagedKVCacheConfig or a StaticKVCacheConfig"
    return parse_size("kv_cache", kv_cache, expected)


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPlan:
    """How the memory is used: weights, workspace, and a KV cache of `num_blocks` blocks of `block_size` tokens.

    With several ranks, bytes are those of the GPU that holds most. On a CPU they are those of all ranks together.

    Attributes
    ----------
    weight_bytes : int
        Bytes of the weights. On a CPU those used in place are pages of the checkpoint's files, which processes share.
    workspace_bytes : int
        The most that a step needs: activations and scratch of `max_num_batched_tokens` tokens, and logits.
    kv_bytes_per_token, kv_budget_bytes : int
        Bytes of one token in the cache, all layers; and what the cache may take at most.
    max_model_len : int
        Tokens of a sequence, prompt and output together; one of that length always fits.
    max_num_seqs : int
        Sequences that run at the same time; they share the blocks.
    num_blocks, block_size : int
        Blocks of the cache, and the tokens each holds.
    sliding_window, num_window_blocks : int
        The widest window, behind which blocks are used again; 0: they are not. Blocks of layers with a window, where
        these have blocks of their own; else 0.
    window_bytes_per_token : int
        Part of `kv_bytes_per_token`, of layers with a window.
    kv_cache_dtype : str
        What keys and values are kept in.
    state_bytes, num_states : int
        For models with layers that keep a state of each sequence: bytes of one state in all these layers, and how many
        states there are, of running sequences and of prefixes. 0 for other models.
    num_log_rows, log_bytes : int
        Rows of the log of a state, which are the drafted tokens that its sequence may have in a step; their bytes.
    snapshot_interval : int
        Tokens between two states that are kept of a prefix, without which it is computed again; 0: none are kept.
    stages : tuple of StageMemory
        With a pipeline, what each stage has of all this; else empty.
    host_weight_bytes, host_workspace_bytes : int
        Beside a GPU, bytes of the experts in memory of the host, and the most that a step needs there: arrays of
        `max_num_batched_tokens` tokens and scratch of the CPU's kernels. No other number counts them; else 0.
    """

    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    kv_cache_dtype: str
    sliding_window: int = 0
    num_window_blocks: int = 0
    window_bytes_per_token: int = 0
    state_bytes: int = 0
    num_states: int = 0
    snapshot_interval: int = 0
    num_log_rows: int = 0
    log_bytes: int = 0
    stages: tuple[StageMemory, ...] = ()
    host_weight_bytes: int = 0
    host_workspace_bytes: int = 0

    @property
    def blocks(self) -> BlockPlan:
        """The blocks of all layers."""
        return BlockPlan(self.num_blocks, self.num_window_blocks, self.sliding_window)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache; on a CPU its pages are taken from the system as blocks are first used."""
        of_all = self.num_blocks * (self.kv_bytes_per_token - self.window_bytes_per_token)
        of_windows = (self.num_window_blocks or self.num_blocks) * self.window_bytes_per_token
        return self.block_size * (of_all + of_windows) + self.num_states * (self.state_bytes + self.log_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, workspace and cache: what the model adds to its process once the cache is full."""
        return self.weight_bytes + self.workspace_bytes + self.kv_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds, in layers that keep all keys where some do."""
        return self.num_blocks * self.block_size

    @property
    def num_full_seqs(self) -> int:
        """Sequences of `max_model_len` tokens that the cache holds at the same time."""
        most = min(self.max_num_seqs, self.num_blocks // -(-self.max_model_len // self.block_size))
        if self.num_window_blocks:
            most = min(most, self.num_window_blocks // blocks_of_window(self.sliding_window, self.block_size))
        return most

    @property
    def _others(self) -> str:
        windows, states = self.num_window_blocks, self.num_states
        per_token = format_bytes(self.window_bytes_per_token)
        return (f" and {windows} of layers that keep a window, {per_token} per token" if windows else "") + (
            f" and {states} states of {format_bytes(self.state_bytes + self.log_bytes)}" if states else ""
        )

    def __repr__(self) -> str:
        """Show the sentence of `str`; `dataclasses.asdict` has the numbers."""
        return f"<MemoryPlan: {self}>"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Show IPython and Jupyter the sentence of `str`."""
        printer.text(str(self))

    def __str__(self) -> str:
        weights, workspace = format_bytes(self.weight_bytes), format_bytes(self.workspace_bytes)
        if self.host_weight_bytes:
            weights += f" and {format_bytes(self.host_weight_bytes)} of experts on the CPU"
            workspace += f" and {format_bytes(self.host_workspace_bytes)} on the CPU"
        return (
            f"weights {weights}; workspace {workspace}; "
            f"KV cache in {self.kv_cache_dtype}, {format_bytes(self.kv_bytes_per_token)} per token, "
            f"{self.num_blocks} blocks of {self.block_size} tokens{self._others} = {format_bytes(self.kv_bytes)} "
            f"(budget {format_bytes(self.kv_budget_bytes)}), {self.num_full_seqs} of at most {self.max_num_seqs} "
            f"sequences at the full {self.max_model_len} tokens"
        )


def _no_room(weight_bytes: int, workspace_bytes: int, missing: int, max_num_seqs: int, is_pipeline: bool) -> str:
    """What to say of a model that leaves nothing for the KV cache; the part of it that decides is what to lower."""
    if workspace_bytes > weight_bytes:
        remedy = f"lower max_num_seqs (now {max_num_seqs}), max_num_batched_tokens or num_threads"
    elif is_pipeline:  # its stages may be on several machines
        remedy = "pass as memory what the machines of all stages have free together"
    else:
        remedy = "free memory, take a smaller model or quantization, or divide it over more GPUs or machines"
    return (
        f"no memory is left for the KV cache: the weights take {format_bytes(weight_bytes)} and the workspace of a "
        f"step {format_bytes(workspace_bytes)}, {format_bytes(missing)} more than is free: {remedy}"
    )


def divide_memory(
    *,
    weight_bytes: int,
    workspace_bytes: int,
    cache: CacheSizing,
    max_position_embeddings: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache: int | str | CacheConfig | None,
    kv_cache_dtype: str | None,
    free_bytes: int,
) -> MemoryPlan:
    """Divide `free_bytes`, the bytes left beside the weights and the workspace; below 0: so many are missing.

    With `max_model_len` None the context shrinks to what one sequence can have within the budget; when it is given,
    it must fit. The cache takes no more than `max_num_seqs` sequences of that length can fill, unless a
    `CacheConfig` says how large it is, whose bytes are those of one rank.

    Raises
    ------
    CacheFullError
        If not even one sequence fits; the message says what was needed and which setting decides.
    ConfigError
        If `kv_cache` is not what it may be.
    """
    dtype = cache.dtype(kv_cache_dtype, kv_cache)
    kv_bytes_per_token, state_bytes = cache.bytes_per_token(dtype), cache.state_bytes
    bytes_of_each = state_bytes + cache.log_bytes
    num_states = interval = 0
    longest = max_model_len or max_position_embeddings
    if isinstance(kv_cache, CacheConfig):
        layout = kv_cache.layout(
            max_position_embeddings=max_position_embeddings,
            kv_bytes_per_token=kv_bytes_per_token // cache.num_sharing,
            dtype=dtype,
        )
        budget, most_blocks, block_size = layout.num_slots * kv_bytes_per_token, layout.num_blocks, layout.block_size
        if state_bytes:
            max_num_seqs = min(max_num_seqs, most_blocks)
            has_blocks = layout.kind == "paged"
            num_states = plan_states(max_num_seqs, with_snapshots=has_blocks)
            interval = snapshot_interval(state_bytes, kv_bytes_per_token, block_size, longest) if has_blocks else 0
        budget += num_states * bytes_of_each
        given = f"{most_blocks} blocks of {block_size}"
    else:
        budget, block_size = parse_cache_budget(kv_cache, max(free_bytes, 0), cache.device), DEFAULT_BLOCK_SIZE
        if budget == 0:  # a share of nothing
            raise CacheFullError(
                _no_room(weight_bytes, workspace_bytes, max(1 - free_bytes, 1), max_num_seqs, bool(cache.parts))
            )
        free_bytes = max(free_bytes, 0)
        if state_bytes:
            # Snapshots are worth it where most of the budget is left for what they save.
            num_states = plan_states(max_num_seqs, with_snapshots=True)
            interval = snapshot_interval(state_bytes, kv_bytes_per_token, block_size, longest)
            if 2 * num_states * bytes_of_each > budget:
                num_states, interval = plan_states(max_num_seqs, with_snapshots=False), 0
            if num_states * bytes_of_each >= budget:
                raise CacheFullError(
                    f"the cache has {format_bytes(budget)}, but the states of {max_num_seqs} sequences take "
                    f"{format_bytes(num_states * bytes_of_each)} of it: lower max_num_seqs, or raise kv_cache (now "
                    f"{kv_cache!r}; {format_bytes(free_bytes)} are free beside {format_bytes(weight_bytes)} of "
                    f"weights and {format_bytes(workspace_bytes)} of workspace)"
                )
        for_blocks = budget - num_states * bytes_of_each
        # In a stage whose layers all have states, blocks take no memory.
        most_blocks, given = for_blocks // max(kv_bytes_per_token * block_size, 1), repr(kv_cache)
        if cache.is_encoder:
            # A text lies in one step, and two steps are made at a time. The last block of each text may have room left.
            most_blocks = min(most_blocks, 2 * (-(-cache.num_step_tokens // block_size) + max_num_seqs))
    is_static = isinstance(kv_cache, StaticKVCacheConfig)  # a sequence is one row, which is one block, and keeps all
    window_bytes = cache.bytes_per_token(dtype, windows_only=True)
    blocks = divide_blocks(
        () if is_static else cache.sliding_windows,
        bytes_per_token=kv_bytes_per_token,
        window_bytes_per_token=window_bytes,
        block_size=block_size,
        num_blocks=most_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        num_step_tokens=cache.num_step_tokens,
        is_bounded=not isinstance(kv_cache, CacheConfig),
        takes_rest=not isinstance(kv_cache, PagedKVCacheConfig) or kv_cache.num_blocks is None,
    )
    room = block_size if is_static else blocks.num_blocks * block_size
    length = max_model_len or min(max_position_embeddings, room)
    blocks_per_seq = -(-max(length, 1) // block_size)
    if blocks_per_seq > (1 if is_static else blocks.num_blocks):
        advice = f"pass max_model_len <= {room} or " if room else ""
        needed = kv_bytes_per_token * blocks_per_seq
        if blocks.num_window_blocks:
            needed -= window_bytes * max(blocks_per_seq - blocks.num_window_blocks, 0)
        remedy = f"{advice}raise {'max_cache_len' if is_static else 'kv_cache'}"
        raise CacheFullError(
            f"the KV cache has {format_bytes(budget)}, but one sequence of {length or 1} tokens needs "
            f"{format_bytes(needed * block_size)} in {blocks_per_seq} blocks of "
            f"{block_size} tokens: {remedy} (now {given}; {format_bytes(free_bytes)} are free "
            f"beside {format_bytes(weight_bytes)} of weights and {format_bytes(workspace_bytes)} of workspace)"
        )
    return MemoryPlan(
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_budget_bytes=budget,
        max_model_len=length,
        max_num_seqs=min(max_num_seqs, most_blocks) if is_static else max_num_seqs,
        num_blocks=blocks.num_blocks,
        block_size=block_size,
        kv_cache_dtype=dtype,
        sliding_window=blocks.sliding_window,
        num_window_blocks=blocks.num_window_blocks,
        window_bytes_per_token=window_bytes,
        state_bytes=state_bytes,
        num_states=num_states,
        snapshot_interval=interval,
        num_log_rows=cache.num_log_rows if state_bytes else 0,
        log_bytes=cache.log_bytes,
        stages=cache.stages(dtype),
    )


@dataclass(frozen=True, slots=True)
class CacheSizing:
    """What decides the dtype of a model's KV cache, the bytes of a token and who needs how many blocks."""

    device: str  # the device of the ranks
    computed: str  # the dtype that the engine computes in
    auto_dtype: str  # the dtype of keys and values if the caller names none
    spec: _core.ModelSpec  # the part of the largest rank
    num_sharing: int  # ranks whose memory is the same: on a CPU all
    num_step_tokens: int  # that a step computes at most
    parts: Sequence[StagePart] = ()  # with a pipeline
    draft_bytes_per_token: int = 0  # of the cache of a draft model, which has as many tokens
    num_log_rows: int = 0  # of a state

    def dtype(self, requested: str | None, kv_cache: object = None) -> str:
        """What keys and values are kept in: `requested`, or the dtype of a `CacheConfig`, which must agree.

        Raises
        ------
        ConfigError
            As `resolve_cache_dtype`, or two different dtypes.
        """
        given = kv_cache.dtype if isinstance(kv_cache, CacheConfig) else None
        if given is not None and requested is not None and dtype_name(requested) not in ("auto", given):
            raise ConfigError(
                f"kv_cache_dtype is {requested!r}, but kv_cache is a {type(kv_cache).__name__} with dtype={given!r}; "
                "pass one of them"
            )
        return resolve_cache_dtype(given or requested, self.auto_dtype, computed=self.computed, device=self.device)

    @property
    def is_encoder(self) -> bool:
        """Keys and values are of one step alone, and of one layer at a time."""
        return not self.spec.lm_head

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a sequence, all layers, of the ranks that share a memory; 0: there is none."""
        return self.num_sharing * self.spec.state_bytes()

    @property
    def log_bytes(self) -> int:
        """The same of the log of a state."""
        return self.num_sharing * self.spec.state_bytes(self.device, self.num_log_rows) - self.state_bytes

    @property
    def sliding_windows(self) -> list[int]:
        """The window of each layer with attention; 0: it sees all keys. None moves on where a text lies in a step."""
        caches = [layer.cache for layer in self.spec.layers if not self.is_encoder]
        return [cache.sliding_window for cache in caches if cache.kind != "none"]

    def bytes_per_token(self, dtype: str, *, windows_only: bool = False) -> int:
        """Bytes of a token, all layers or those with a window, K and V, of the ranks that share a memory.

        All layers are those of the draft model, too.
        """
        own = self.num_sharing * self.spec.kv_bytes_per_token(dtype, windows_only, self.device)
        return own if windows_only else own + self.draft_bytes_per_token

    def stages(self, dtype: str) -> tuple[StageMemory, ...]:
        """What each stage takes, with a cache in this dtype."""
        return tuple(part.memory(self.num_sharing, dtype, self.device) for part in self.parts)
