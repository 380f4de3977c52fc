"""Drafts of an answer that is known already, and is computed once more to see whether it comes again."""

from __future__ import annotations

from collections.abc import Sequence

from infinilm.speculation import Drafter, DraftRequest

__all__ = ["ReplayDrafter", "follow_replay"]


class ReplayDrafter:
    """Drafts the tokens of a known answer, as long as the sequence has drawn these alone.

    Parameters
    ----------
    token_ids : sequence of int
        The answer.
    num_prompt_tokens : int
        Tokens before it.
    """

    name = "replay"

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._place = -num_prompt_tokens  # in the answer, of the token that comes next
        self._is_lost = False

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in the prompt, and then what the sequence draws."""
        begin = max(self._place, 0)
        self._place += len(token_ids)
        drawn = token_ids[len(token_ids) - max(self._place - begin, 0) :] if self._place > begin else []
        self._is_lost |= list(drawn) != list(self._token_ids[begin : max(self._place, begin)])

    def draft(self, limit: int) -> list[int]:
        """The next tokens of the answer, `limit` at most."""
        return [] if self._is_lost else list(self._token_ids[self._place : self._place + limit])


def follow_replay(request: DraftRequest) -> Drafter | None:
    """The drafter of a sequence that replays an answer."""
    if request.replay is None:
        return None
    return ReplayDrafter(request.replay, len(request.prompt_token_ids))
