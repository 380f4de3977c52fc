"""A chain of drafters of one sequence: the first that has something drafts.

There is one draft, a chain of tokens, and no tree of them: a tree needs masks of its own in attention and a state for
each branch, and chains of the right length keep most of what it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from infinilm.logs import logger
from infinilm.speculation import BatchDrafter, Drafter
from infinilm.speculation.lengths import Source

__all__ = ["Draft", "DrafterChain"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next in a sequence.

    Attributes
    ----------
    token_ids : list of int
        In order, at least one; none if they are still to be made.
    source : Source
        The `name` of the drafter that proposed them, and its `evidence` for them.
    num_tokens : int
        Tokens that there are, or may be.
    maker : BatchDrafter or None
        Makes them once a length is chosen; None: they are there.
    """

    token_ids: list[int]
    source: Source
    num_tokens: int
    maker: BatchDrafter | None = None


class DrafterChain:
    """The drafters of one sequence, in the order in which they are asked.

    A drafter that fails is logged and leaves the chain; the others go on.

    Parameters
    ----------
    drafters : iterable of Drafter
    """

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self._drafters = list(drafters)
        # `isinstance` of a protocol takes 50 us, and every request has a chain.
        self._makers = [cast(BatchDrafter, drafter) for drafter in self._drafters if hasattr(drafter, "batch")]

    def __len__(self) -> int:
        return len(self._drafters)

    @property
    def has_makers(self) -> bool:
        """Whether some drafts are made only once their length is chosen."""
        return bool(self._makers)

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that are known now, as `Drafter.update` does."""
        for drafter in self._drafters.copy():
            try:
                drafter.update(token_ids)
            except BaseException:  # a drafter may be user code, and this is the engine thread
                self._drop(drafter)

    def drafts(self, limit_of: Callable[[str], int]) -> Iterator[Draft]:
        """What each drafter proposes, in turn; a caller takes the first that it can use and asks for no more.

        Parameters
        ----------
        limit_of
            Tokens that a draft of a source may have, given its name. A source with less than one is not asked.
        """
        for drafter in self._drafters.copy():
            limit = limit_of(drafter.name)
            if limit < 1:
                continue
            try:
                maker = next((maker for maker in self._makers if maker is drafter), None)
                token_ids = [] if maker is not None else _take(drafter, limit)
                num_tokens = len(token_ids) if maker is None else min(int(maker.num_offered), limit)
                source = str(drafter.name), int(getattr(drafter, "evidence", 0))
            except BaseException:  # as above
                self._drop(drafter)
                continue
            if num_tokens > 0:
                yield Draft(token_ids, source, num_tokens, maker)

    def made(self, draft: Draft, limit: int) -> list[int]:
        """The tokens of a draft whose maker has made it, `limit` at most."""
        assert draft.maker is not None
        try:
            return _take(draft.maker, limit)
        except BaseException:  # as above
            self._drop(draft.maker)
            return []

    def _drop(self, drafter: Drafter) -> None:
        logger.exception("a drafter of a request failed and is left out; the request goes on")
        self._drafters.remove(drafter)
        self._makers = [maker for maker in self._makers if maker is not drafter]


def _take(drafter: Drafter, limit: int) -> list[int]:
    return [int(token_id) for token_id in drafter.draft(limit)[:limit]]
