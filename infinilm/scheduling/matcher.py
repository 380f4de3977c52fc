"""`Matcher`: says which tokens a sequence may have next. The interface between the engine thread and grammars."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Matcher", "TokenRules", "allowed_tokens", "is_allowed", "num_mask_words", "packed_mask"]

Int32Array = npt.NDArray[np.int32]


class Matcher(Protocol):
    """Says which token one sequence may have next, given the tokens that it has.

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

    def forced_tokens(self) -> list[int]:
        """Tokens of the text that must come next, as the tokenizer cuts it; none if nothing is known to be forced.

        A model may cut the same text in another way, so these tokens are a guess. They are not taken in.
        """

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-sequence token may come."""


class TokenRules:
    """`allowed_token_ids` and `min_tokens` as a matcher, in front of that of a constraint.

    Parameters
    ----------
    allowed : int32 array, [ceil(vocab_size / 32)], optional
        As `Matcher.fill` writes it: the tokens that may ever come.
    ends : int32 array, [ceil(vocab_size / 32)]
        The tokens that may not come among the first `min_tokens`.
    min_tokens : int
    inner : Matcher, optional
    """

    def __init__(self, allowed: Int32Array | None, ends: Int32Array, min_tokens: int, inner: Matcher | None) -> None:
        self._allowed = allowed
        self._ends = ends
        self._min_tokens = min_tokens
        self._inner = inner
        self._num_tokens = 0

    def fill(self, row: Int32Array) -> None:
        """Write which tokens may come next."""
        if self._inner is None:
            row.fill(-1)
        else:
            self._inner.fill(row)
        if self._allowed is not None:
            row &= self._allowed
        if self._num_tokens < self._min_tokens:
            row &= ~self._ends

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled."""
        self._num_tokens += 1
        if self._inner is not None:
            self._inner.advance(token_id)

    def copy(self) -> TokenRules:
        """Make another one in the same state."""
        inner = None if self._inner is None else self._inner.copy()
        other = TokenRules(self._allowed, self._ends, self._min_tokens, inner)
        other._num_tokens = self._num_tokens
        return other

    def forced_tokens(self) -> list[int]:
        """Tokens of the text that the constraint forces."""
        return [] if self._inner is None else self._inner.forced_tokens()

    @property
    def is_finished(self) -> bool:
        """Whether the constraint wants nothing more."""
        return self._inner is not None and self._inner.is_finished

    @property
    def is_over(self) -> bool:
        """Whether every token may come from now on."""
        return self._allowed is None and self._inner is None and self._num_tokens >= self._min_tokens


def num_mask_words(vocab_size: int) -> int:
    """Length of a row that a matcher fills."""
    return -(-vocab_size // 32)


def packed_mask(tokens: npt.NDArray[np.bool_]) -> Int32Array:
    """The row of a mask, [ceil(vocab_size / 32)], from a truth value for each token, [vocab_size]."""
    words = np.zeros(num_mask_words(len(tokens)), np.int32)
    bits = np.packbits(tokens, bitorder="little")
    words.view(np.uint8)[: len(bits)] = bits
    return words


def is_allowed(row: Int32Array, token_id: int) -> bool:
    """Whether a token may come next, by a row that `Matcher.fill` has written."""
    return bool(int(row[token_id // 32]) >> (token_id % 32) & 1)


def allowed_tokens(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Which tokens may come next, [vocab_size]; raises what the matcher raises."""
    row = np.zeros(num_mask_words(vocab_size), np.int32)
    matcher.fill(row)
    return np.unpackbits(row.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
