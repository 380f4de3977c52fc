"""Steps of layers with a state: sequences of any lengths, and the states that they go on from and leave."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ops.support import framed, tensor

lengths = st.lists(st.sampled_from((1, 2, 3, 5, 17, 40)), min_size=1, max_size=4)
NUM_STATES, LOG_ROWS = 9, 15


class Sequences:
    """Sequences of a step: where each goes on, and what it leaves."""

    def __init__(self, rng: np.random.Generator, counts: list[int], fresh: list[bool], same: list[bool]) -> None:
        order = rng.permutation(NUM_STATES).astype(np.int32)
        self.counts = counts
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.out = order[: len(counts)]
        before = order[len(counts) : 2 * len(counts)]
        self.inn = np.array(
            [-1 if new else out if own else other
             for new, own, out, other in zip(fresh, same, self.out, before, strict=True)],
            np.int32,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, Any, Any]:
        return tensor(self.starts), tensor(self.inn), tensor(self.out)


def draw_sequences(data: st.DataObject, rng: np.random.Generator) -> Sequences:
    counts = data.draw(lengths)
    flags = st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))
    return Sequences(rng, counts, data.draw(flags), data.draw(flags))


class Replay:
    """Sequences in two steps: first some tokens and drafts, then those of the drafts that were right, and the rest.

    `first`, `second`: the arguments of ops, and which tokens of the sequences each step computes. The last of a step's
    tokens are wrong drafts, in whose place the second step has others.
    """

    def __init__(self, data: st.DataObject, sequences: Sequences) -> None:
        begins, counts = sequences.starts[:-1].tolist(), sequences.counts
        seen = [data.draw(st.integers(max(1, count - LOG_ROWS), count)) for count in counts]
        right = [data.draw(st.integers(0, max(count - n - 1, 0))) for count, n in zip(counts, seen, strict=True)]
        ends = [data.draw(st.integers(n + r, count)) for count, n, r in zip(counts, seen, right, strict=True)]
        into = [before if data.draw(st.booleans()) and before >= 0 else after
                for before, after in zip(sequences.inn.tolist(), sequences.out.tolist(), strict=True)]  # fmt: skip
        self.first_rows = np.concatenate([range(begin, begin + end) for begin, end in zip(begins, ends, strict=True)])
        self.rows = np.concatenate(
            [
                range(begin + n + r, begin + count)
                for begin, n, r, count in zip(begins, seen, right, counts, strict=True)
            ]
        ).astype(int)
        starts = [
            np.cumsum([0, *ends]),
            np.cumsum([0, *(c - n - r for c, n, r in zip(counts, seen, right, strict=True))]),
        ]
        states = (sequences.inn, sequences.out), (sequences.out, np.array(into, np.int32))
        self.first, self.second = (
            [tensor(np.asarray(x, np.int32)) for x in (start, *own)] for start, own in zip(starts, states, strict=True)
        )
        self.out = into
        self.state_tokens = tensor(np.array(seen, np.int32))
        self.num_replayed = tensor(np.array(right, np.int32))

    def log(self, b: Any, *parts: Any) -> list[Any]:
        """Keep the drafts of the first step; what an op gets of each of the parts [num_tokens, n]."""
        widths = [part.shape[1] for part in parts]
        kept = np.full((NUM_STATES, LOG_ROWS, sum(widths)), np.nan, np.float32)
        rows = [tensor(framed(part[self.first_rows], (1, 2))) for part in parts]
        b.log_drafts(rows, tensor(kept), *self.first, self.state_tokens)
        ends = np.cumsum(widths).tolist()
        return [tensor(kept[:, :, end - width : end]) for end, width in zip(ends, widths, strict=True)]
