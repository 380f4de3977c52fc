"""A chain of drafters of one sequence: the first that has something drafts.

There is one draft, a chain of tokens, and no tree of them: a tree needs masks of its own in attention and a state for
each branch, and chains of the right length keep most of what it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from infinilm.logs import logger
from infinilm.speculation import Drafter
from infinilm.speculation.lengths import Source

__all__ = ["Draft", "DrafterChain"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next in a sequence.

    Attributes
    ----------
    token_ids : list of int
        In order, at least one.
    source : Source
        The `name` of the drafter that proposed them, and its `evidence` for them.
    """

    token_ids: list[int]
    source: Source


class DrafterChain:
    """The drafters of one sequence, in the order in which they are asked.

    A drafter that fails is logged and leaves the chain; the others go on.

    Parameters
    ----------
    drafters : iterable of Drafter
    """

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self._drafters = list(drafters)

    def __len__(self) -> int:
        return len(self._drafters)

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
                token_ids = [int(token_id) for token_id in drafter.draft(limit)[:limit]]
                source = str(drafter.name), int(getattr(drafter, "evidence", 0))
            except BaseException:  # as above
                self._drop(drafter)
                continue
            if token_ids:
                yield Draft(token_ids, source)

    def _drop(self, drafter: Drafter) -> None:
        logger.exception("a drafter of a request failed and is left out; the request goes on")
        self._drafters.remove(drafter)
