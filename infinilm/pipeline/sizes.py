"""How large the caches of all stages of a pipeline are: they have blocks and states of the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from infinilm.planning.block_plan import BlockPlan, least_of
from infinilm.planning.cache_plan import MemoryPlan
from infinilm.scheduling.states import snapshot_interval

__all__ = ["join_sizes", "sizes_of"]


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
