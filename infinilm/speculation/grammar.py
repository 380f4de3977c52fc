"""Drafts from the constraint of a sequence: tokens that its grammar leaves no choice about, such as keys of a schema.

A text that is forced can often be cut into tokens in several ways, and a model need not choose the usual one. So even
these are drafts that a step verifies. Where the mask of a row allows a single token, the row can draw no other one.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinilm.speculation import Drafter, DraftRequest

__all__ = ["GrammarDrafter", "follow_grammar"]


class GrammarDrafter:
    """Drafts the text that must come next, as the tokenizer cuts it.

    Parameters
    ----------
    request : DraftRequest
        Has a constraint.
    """

    name = "grammar"

    def __init__(self, request: DraftRequest) -> None:
        self._request = request

    def update(self, token_ids: Sequence[int]) -> None:
        """Do nothing: the constraint has taken in these tokens."""

    def draft(self, limit: int) -> list[int]:
        """Tokens of the forced text, `limit` at most."""
        constraint = self._request.constraint
        return [] if constraint is None else constraint.forced_tokens()[:limit]


def follow_grammar(request: DraftRequest) -> Drafter | None:
    """The drafter of a sequence that has a constraint."""
    return None if request.constraint is None else GrammarDrafter(request)
