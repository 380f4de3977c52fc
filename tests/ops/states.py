"""Steps of layers with a state: sequences of any lengths, and the states that they go on from and leave."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ops.support import tensor

lengths = st.lists(st.sampled_from((1, 2, 3, 5, 17, 40)), min_size=1, max_size=4)
NUM_STATES = 9


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
