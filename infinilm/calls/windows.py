"""Windows that slide over a text that is longer than the context."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["sliding_windows"]


def sliding_windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows in which every token but the first of the text counts once.

    Parameters
    ----------
    num_tokens : int
        Tokens of the text.
    length : int
        Tokens of a window.
    stride : int
        Tokens from the beginning of a window to that of the next, below `length`: those that they share are seen again.

    Yields
    ------
    tuple of int
        Where a window begins and ends, and its first token that counts: it was in no window before.
    """
    counted = 1  # nothing stands before the first token
    for begin in range(0, num_tokens, stride):
        end = min(begin + length, num_tokens)
        yield begin, end, counted
        counted = end
        if end == num_tokens:
            return
