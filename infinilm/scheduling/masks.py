"""`StepMasks`: which tokens the constraints of a step allow, filled in while the step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from infinilm.scheduling.matcher import Matcher, is_allowed
from infinilm.scheduling.sequence import Int32Array, Sequence

__all__ = ["KNOWN", "VOID", "StepMasks"]

# In the drafts of a step: the token of the row is known; the row cannot count. No row draws either of them.
KNOWN, VOID = -(2**30), -(2**31)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step, one for each row of a sequence that has a constraint and that the engine samples.

    A mask depends on the tokens of the step before, so it is filled in when these are known, while the step runs.
    """

    sequences: list[Sequence]
    rows: list[int]  # [len(sequences)]: the row of each
    drafts: list[int] | None  # as in `Step`
    allowed: Int32Array  # [len(sequences), num_mask_words]
    allowed_row: Int32Array  # [num_rows]: index into `sequences`, or -1

    @staticmethod
    def of(samples: list[Sequence], num_rows: int, drafts: list[int] | None = None) -> StepMasks | None:
        """Masks, not filled in yet, of a step that samples these in its first rows; None if it needs none.

        `drafts`: of the step; a draft that no matcher can follow becomes `VOID` when the masks are filled in.
        """
        rows = [row for row, s in enumerate(samples) if s.constraint is not None and not s.samples_on_host]
        if not rows:
            return None
        sequences = [samples[row] for row in rows]
        allowed_row = np.full(num_rows, -1, np.int32)
        allowed_row[rows] = np.arange(len(rows), dtype=np.int32)
        allowed = np.empty((len(rows), sequences[0].num_mask_words), np.int32)
        return StepMasks(sequences, rows, drafts, allowed, allowed_row)

    def batch_arrays(self) -> dict[str, Any]:
        """The arrays of the batch, which share memory with these."""
        return {"allowed": self.allowed, "allowed_row": self.allowed_row}

    def fill(self) -> list[tuple[Sequence, BaseException]]:
        """Ask every matcher; returns the sequences whose matcher failed, each with its exception.

        The rows of these, and of sequences that have ended meanwhile, allow every token, because theirs are dropped.
        """
        failures: list[tuple[Sequence, BaseException]] = []
        ahead: Matcher | None = None  # has taken in the drafts before a row
        for i, (sequence, row) in enumerate(zip(self.sequences, self.allowed, strict=True)):
            if self.drafts is not None and self.drafts[self.rows[i]] != KNOWN:
                ahead = self._fill_ahead(i, ahead, self.drafts)
                continue
            ahead = sequence.constraint
            if sequence.constraint is not None and sequence.request.finish_reason is None:
                try:
                    sequence.constraint.fill(row)
                    continue
                except BaseException as error:  # a matcher may be user code, and this is the engine thread
                    failures.append((sequence, error))
            row.fill(-1)
        return failures

    def _fill_ahead(self, i: int, before: Matcher | None, drafts: list[int]) -> Matcher | None:
        """Fill in the mask of a draft, which a copy of the matcher takes in; returns the copy.

        `before`: the matcher of the row before. The draft becomes void, which ends the draft, where that row does not
        allow it, or where the constraint or a failure of the copy ends the sequence.
        """
        row, token_id, sequence = self.allowed[i], drafts[self.rows[i]], self.sequences[i]
        if before is not None and is_allowed(self.allowed[i - 1], token_id):
            try:
                ahead = before.copy() if before is sequence.constraint else before
                ahead.advance(token_id)
                if not ahead.is_finished:
                    ahead.fill(row)
                    return ahead
            except BaseException:  # a matcher may be user code; it fails again without drafts, if it gets this far
                pass
        row.fill(-1)
        drafts[self.rows[i]] = VOID
        return None
