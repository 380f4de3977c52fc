"""Constraints on what a sequence may say: the interface to whatever knows a grammar."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Matcher", "allowed_tokens", "num_mask_words"]

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
