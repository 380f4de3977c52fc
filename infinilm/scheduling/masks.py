"""`StepMasks`: which tokens the constraints of a step allow, filled in while the step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from infinilm.scheduling.sequence import Int32Array, Sequence

__all__ = ["StepMasks"]


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step, one for each sequence that has a constraint and that the engine samples.

    A mask depends on the tokens of the step before, so it is filled in when these are known, while the step runs.
    """

    sequences: list[Sequence]
    allowed: Int32Array  # [len(sequences), num_mask_words]
    allowed_row: Int32Array  # [num_rows]: index into `sequences`, or -1

    @staticmethod
    def of(samples: list[Sequence], num_rows: int) -> StepMasks | None:
        """Masks, not filled in yet, of a step that samples these in its first rows; None if it needs none."""
        rows = [row for row, s in enumerate(samples) if s.constraint is not None and not s.samples_on_host]
        if not rows:
            return None
        sequences = [samples[row] for row in rows]
        allowed_row = np.full(num_rows, -1, np.int32)
        allowed_row[rows] = np.arange(len(rows), dtype=np.int32)
        return StepMasks(sequences, np.empty((len(rows), sequences[0].num_mask_words), np.int32), allowed_row)

    def batch_arrays(self) -> dict[str, Any]:
        """The arrays of the batch, which share memory with these."""
        return {"allowed": self.allowed, "allowed_row": self.allowed_row}

    def fill(self) -> list[tuple[Sequence, BaseException]]:
        """Ask every matcher; returns the sequences whose matcher failed, each with its exception.

        The rows of these, and of sequences that have ended meanwhile, allow every token, because theirs are dropped.
        """
        failures: list[tuple[Sequence, BaseException]] = []
        for sequence, row in zip(self.sequences, self.allowed, strict=True):
            if sequence.constraint is not None and sequence.request.finish_reason is None:
                try:
                    sequence.constraint.fill(row)
                    continue
                except BaseException as error:  # a matcher may be user code, and this is the engine thread
                    failures.append((sequence, error))
            row.fill(-1)
        return failures
