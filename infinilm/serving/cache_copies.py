"""`CacheCopies`: blocks and states of a cache as segments, which stay when the cache lets go of them, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.scheduling.scheduler import FoundSegment
from infinilm.scheduling.sequence import Int32Array
from infinilm.tiers import Segment

__all__ = ["CacheCopies"]

Bytes = npt.NDArray[np.uint8]


class CacheCopies:
    """Copies what an engine has computed. Its methods are called between steps.

    A segment has an array for each rank, with its layers one behind the other, however many stages divide them: what a
    pipeline has kept another one finds, and so does an engine of one stage.

    Parameters
    ----------
    engine : _core.InferEngine or StagedEngine
    stage_sizes : sequence of int
        Ranks of each stage.

    Attributes
    ----------
    num_ranks : int
        How many ranks all stages have together.
    """

    def __init__(self, engine: Any, stage_sizes: Sequence[int]) -> None:
        self._engine = engine
        self.num_ranks = sum(stage_sizes)
        numbers = np.split(np.arange(sum(stage_sizes)), np.cumsum(stage_sizes)[:-1])
        # What the engine gives has a place for each rank of each stage. A rank is in those stages that have so many.
        self._places = [
            [int(stage[rank]) for stage in numbers if rank < len(stage)] for rank in range(max(stage_sizes))
        ]

    def blocks(self, found: FoundSegment) -> Segment:
        """The blocks of a segment."""
        groups = [self._engine.read_blocks(group, blocks) for group, blocks in enumerate(found.blocks)]
        return Segment(found.present, tuple(map(self._joined, groups)))

    def state(self, found: FoundSegment) -> Segment:
        """The state behind a segment that has one."""
        assert found.state is not None
        return Segment((), (), self._joined(self._engine.read_state(found.state)))

    def fills_blocks(self, segment: Segment) -> Callable[[int, Int32Array], None]:
        """What writes a segment to blocks, see `BlockManager.adopt`. It raises RequestError if the shapes differ."""

        def write(group: int, blocks: Int32Array) -> None:
            if len(blocks):
                like = self._engine.read_blocks(group, []) if self._is_divided else ()
                self._engine.write_blocks(group, blocks.tolist(), self._divided(segment.rows[group], like))

        return write

    def fills_state(self, segment: Segment, num_tokens: int) -> Callable[[int], None]:
        """What writes a state behind so many tokens, see `Scheduler.adopt`. It raises RequestError as above."""

        def write(state: int) -> None:
            like = self._engine.read_state(state) if self._is_divided else ()
            self._engine.write_state(state, num_tokens, self._divided(segment.state, like))

        return write

    @property
    def _is_divided(self) -> bool:
        return any(len(places) > 1 for places in self._places)

    def _joined(self, parts: Sequence[_core.Tensor]) -> tuple[Bytes, ...]:
        """[num_entries, bytes] of each rank, from those of each rank of each stage."""
        arrays = [part.numpy() for part in parts]
        if not self._is_divided:
            return tuple(arrays)
        return tuple(np.concatenate([arrays[place] for place in places], axis=1) for places in self._places)

    def _divided(self, rows: Sequence[Bytes], like: Sequence[_core.Tensor]) -> list[_core.Tensor]:
        """The way back; `like`: [any, bytes] of each rank of each stage. What does not fit the engine refuses."""
        if not self._is_divided:
            return [_core.from_dlpack(array) for array in rows]
        out = [_core.from_dlpack(np.zeros((0, 0), np.uint8))] * len(like)
        for places, array in zip(self._places, rows, strict=False):
            ends = np.cumsum([like[place].shape[1] for place in places])
            ends[-1] = array.shape[1]  # of an array of another length one part has, too
            for place, part in zip(places, np.split(array, ends[:-1], axis=1), strict=True):
                out[place] = _core.from_dlpack(np.ascontiguousarray(part))
        return out
