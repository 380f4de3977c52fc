"""Constraints on what a sequence may say: the interface to whatever knows a grammar, and the masks of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from infinilm.requests.steps import Sequence

__all__ = ["Matcher", "StepMasks", "allowed_tokens"]

Int32Array = npt.NDArray[np.int32]


class Matcher(Protocol):
    """What one sequence may say next, given the tokens that it has said.

    The engine calls a matcher from one thread at a time. An exception in any method ends its sequence, and no other.
    """

    def fill(self, row: Int32Array) -> None:
        """Write which tokens may come next.

        Parameters
        ----------
        row : int32 array, [ceil(vocab_size / 32)]
            Bit i % 32 of word i // 32 says whether token i may come next. All words are written; bits from vocab_size
            on do not count.
        """

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled."""

    def copy(self) -> Matcher:
        """Make another matcher in the same state, which changes apart from this one."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-sequence token may come."""


def num_mask_words(vocab_size: int) -> int:
    """Length of a row that a matcher fills."""
    return -(-vocab_size // 32)


def allowed_tokens(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Which tokens may come next, [vocab_size]; raises what the matcher raises."""
    row = np.zeros(num_mask_words(vocab_size), np.int32)
    matcher.fill(row)
    return np.unpackbits(row.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step, one per sequence that has a constraint and whose token is drawn where the model runs.

    A mask depends on the tokens of the step before, so it is filled in when these are known, while the step runs.
    """

    sequences: list[Sequence]
    allowed: Int32Array  # [len(sequences), num_mask_words]
    allowed_row: Int32Array  # [num_rows]: index into `sequences`, or -1

    @staticmethod
    def of(samples: list[Sequence], num_rows: int) -> StepMasks | None:
        """Masks, not filled in yet, of a step that samples these in its first rows; None if it needs none."""
        rows = [row for row, s in enumerate(samples) if s.constraint is not None and not s.draws_on_host]
        if not rows:
            return None
        sequences = [samples[row] for row in rows]
        allowed_row = np.full(num_rows, -1, np.int32)
        allowed_row[rows] = np.arange(len(rows), dtype=np.int32)
        return StepMasks(sequences, np.empty((len(rows), sequences[0].num_mask_words), np.int32), allowed_row)

    def fill(self) -> list[tuple[Sequence, BaseException]]:
        """Ask every matcher; returns the sequences whose matcher failed, and how.

        The rows of these, and of sequences that have ended meanwhile, allow everything: nobody wants their tokens.
        """
        failures: list[tuple[Sequence, BaseException]] = []
        for sequence, row in zip(self.sequences, self.allowed, strict=True):
            if sequence.constraint is not None and sequence.owner.finish_reason is None:
                try:
                    sequence.constraint.fill(row)
                    continue
                except BaseException as error:  # of user code, in the engine thread
                    failures.append((sequence, error))
            row.fill(-1)
        return failures
