"""Drafts that are looked up: what came next where the end of the text has occurred before, in the text itself."""

from __future__ import annotations

from collections.abc import Sequence

from infinilm import _core

__all__ = ["LookupDrafter"]


_MOST_EVIDENCE = 5  # 16 tokens and more: nearly all such drafts are right


class LookupDrafter:
    """Drafts from the prompt and the output of one sequence.

    Other sequences are never looked at, since the time of an answer would tell a client what others wrote.

    Parameters
    ----------
    min_match : int
        Tokens at the end of the text that must have occurred before, >= 1.
    num_tokens : int
        Tokens of a draft at most.
    """

    name = "lookup"

    @property
    def evidence(self) -> int:
        """The size of the match that the newest draft follows: 1 for a token, 2 up to three, 3 up to seven, .., 5."""
        return min(self._automaton.match_length.bit_length(), _MOST_EVIDENCE)

    def __init__(self, min_match: int, num_tokens: int) -> None:
        self._automaton = _core.SuffixAutomaton()
        self._min_match, self._num_tokens = min_match, num_tokens

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the text."""
        self._automaton.extend(token_ids)

    def draft(self, limit: int) -> list[int]:
        """What followed the most recent earlier occurrence of the longest end of the text, `limit` tokens at most."""
        return self._automaton.draft(min(limit, self._num_tokens), self._min_match)
