"""How large the caches of the stages of a pipeline are: they have blocks and states of the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from infinilm.errors import CacheFullError
from infinilm.planning.block_plan import BlockPlan, least_of
from infinilm.planning.cache_plan import CacheSizing, MemoryPlan, divide_memory
from infinilm.scheduling.states import snapshot_interval

__all__ = ["MemoryShare", "divide_shares", "join_sizes", "sizes_of"]


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """What lies in one memory: all ranks and stages on a CPU, or the ranks of a stage, which have a GPU each.

    Where the first layers of a model are on the CPU and the last ones on a GPU, each part has a share.

    Attributes
    ----------
    devices : tuple of str
        "cpu", or the GPUs.
    cache : CacheSizing
        What decides the cache of a rank, or of all ranks that share a memory.
    weight_bytes, workspace_bytes : int
        What else they take.
    host_weight_bytes, host_workspace_bytes : int
        What experts of the model take in memory of the host, beside a GPU that has everything else.
    """

    devices: tuple[str, ...]
    cache: CacheSizing
    weight_bytes: int
    workspace_bytes: int
    host_weight_bytes: int = 0
    host_workspace_bytes: int = 0


def divide_shares(
    shares: Sequence[MemoryShare], free_bytes: Sequence[int], *, max_model_len: int | None, **settings: Any
) -> MemoryPlan:
    """`divide_memory` of each share, and what all have room for.

    The bytes are those of the share with most weights, which a GPU has for itself; of shares on unlike devices their
    sums.

    Parameters
    ----------
    shares
        One, or one for each stage of a pipeline, in order.
    free_bytes
        What is left in the memory of each beside weights and workspace.
    max_model_len, settings
        See `divide_memory`.
    """
    is_split = len({share.cache.device == "cpu" for share in shares}) > 1

    def divide_one(share: MemoryShare, free: int, longest: int | None) -> MemoryPlan:
        try:
            return divide_memory(
                weight_bytes=share.weight_bytes,
                workspace_bytes=share.workspace_bytes,
                cache=share.cache,
                max_model_len=longest,
                free_bytes=free,
                **settings,
            )
        except CacheFullError as error:
            if not is_split:
                raise
            advice = "raise gpu_layers" if share.cache.device == "cpu" else "lower gpu_layers"
            raise CacheFullError(f"{share.cache.device}: {error}; or {advice}") from error

    def divide(longest: int | None) -> list[MemoryPlan]:
        return [divide_one(share, free, longest) for share, free in zip(shares, free_bytes, strict=True)]

    plans = divide(max_model_len)
    if len(plans) == 1:
        on_host = {name: getattr(shares[0], name) for name in ("host_weight_bytes", "host_workspace_bytes")}
        return replace(plans[0], **on_host)
    if max_model_len is None:  # each has chosen the longest that fits there
        plans = divide(min(plan.max_model_len for plan in plans))
    fullest = max(plans, key=lambda plan: plan.weight_bytes)
    joined = join_sizes(fullest, [sizes_of(plan) for plan in plans])
    stages = tuple(stage for plan in plans for stage in plan.stages)
    if not is_split:
        return replace(joined, stages=stages)
    dtypes = dict.fromkeys(plan.kv_cache_dtype for plan in plans)
    return replace(
        joined,
        **{name: sum(getattr(plan, name) for plan in plans) for name in _SUMS},
        kv_cache_dtype=" and ".join(dtypes),
        num_log_rows=max(plan.num_log_rows for plan in plans),
        stages=stages,
    )


_SUMS = (
    *("weight_bytes", "workspace_bytes", "kv_bytes_per_token", "kv_budget_bytes", "window_bytes_per_token"),
    *("state_bytes", "log_bytes"),
)


def sizes_of(memory: MemoryPlan) -> dict[str, int]:
    """What a stage tells the first one of its own plan: what it has room for, and the bytes of its layers alone."""
    names = ("num_states", "kv_bytes_per_token", "state_bytes")
    return asdict(memory.blocks) | {name: getattr(memory, name) for name in names}


def join_sizes(first: MemoryPlan, sizes: Sequence[Mapping[str, int]]) -> MemoryPlan:
    """The plan of the first stage, with blocks and states for which each stage has room.

    Parameters
    ----------
    first
        As the first stage has made it for its own layers.
    sizes
        `sizes_of` each stage, the first one's too.
    """
    # A stage without such layers has no states, and room for any number.
    num_states = min((of["num_states"] for of in sizes if of["state_bytes"]), default=0)
    # States beyond those of running sequences are snapshots, which all stages have, or none. They are as far apart as
    # in one process: by the bytes of all layers.
    interval = 0
    if num_states > first.max_num_seqs:
        state_bytes, kv_bytes = (sum(of[name] for of in sizes) for name in ("state_bytes", "kv_bytes_per_token"))
        interval = snapshot_interval(state_bytes, kv_bytes, first.block_size, first.max_model_len)
    blocks = [BlockPlan(of["num_blocks"], of["num_window_blocks"], of["sliding_window"]) for of in sizes]
    return replace(
        first,
        **asdict(least_of(blocks)),
        num_states=num_states,
        snapshot_interval=interval,
    )
