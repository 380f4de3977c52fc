"""The parts of a step's batch that embeddings given to prompts make: see `GivenTokens`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from infinilm.scheduling.layout import BatchArrays, Layout
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import Int32Array, Sequence

__all__ = ["given_arrays", "rope_positions"]


def given_arrays(running: RunningSequences, layout: Layout, sequences: SequenceOf[Sequence]) -> BatchArrays:
    """Embeddings that tokens of a step are given, and positions on axes, where a sequence has such.

    `sequences`: those of the layout, in its order.
    """
    if not np.count_nonzero(running.has_given[layout.slots]):
        return {}
    two_way = np.zeros(len(layout.slots), np.int32)
    rows: list[Int32Array] = []
    embeddings: list[npt.NDArray[np.float32]] = []
    for i, (sequence, first, start, end) in enumerate(_chunks(layout, sequences)):
        if sequence.given is not None:
            two_way[i] = sequence.given.chunk(start)[1]
            for begin, found in sequence.given.within(start, end):
                row = first + begin - start
                rows.append(np.arange(row, row + len(found), dtype=np.int32))
                embeddings.append(found)
    arrays = rope_positions(running, layout, sequences)
    if rows:
        arrays |= {"given_rows": np.concatenate(rows), "given": np.concatenate(embeddings)}
    if np.count_nonzero(two_way):
        arrays["two_way_seqs"] = two_way
    return arrays


def rope_positions(running: RunningSequences, layout: Layout, sequences: SequenceOf[Sequence] = ()) -> BatchArrays:
    """Positions on axes of the tokens of a step, where a sequence has such.

    `sequences`: those of the layout, in its order; none: the tokens are behind all prompts.
    """
    num_axes = int(running.num_axes[layout.slots].max(initial=0))
    if not num_axes:
        return {}
    shifted = layout.positions + running.rope_shift[layout.token_slots]
    positions = np.repeat(shifted[None], num_axes, axis=0)  # [num_axes, num_tokens]
    for sequence, first, start, end in _chunks(layout, sequences):
        if sequence.given is not None and sequence.given.rope_positions is not None:
            of_prompt = sequence.given.rope_positions[:, start:end]
            positions[:, first : first + of_prompt.shape[1]] = of_prompt
    return {"rope_positions": positions}


def _chunks(layout: Layout, sequences: SequenceOf[Sequence]) -> list[tuple[Sequence, int, int, int]]:
    """Each sequence with the first row of its chunk in the step, and the chunk's bounds in the sequence."""
    starts, ends = layout.starts.tolist(), layout.ends.tolist()
    return list(zip(sequences, layout.cu_seqlens_q.tolist(), starts, ends, strict=False))
