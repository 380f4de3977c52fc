"""`GrammarMatcher`: what a sequence may say next by llguidance, in this process; and what that may cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from infinilm.errors import RequestError, panics_as_errors

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["MAX_MASK_SECONDS", "TOO_COSTLY", "GrammarMatcher", "MaskBudget", "reason"]

# Masks are made in the engine's thread, where all wait for them. Those of ordinary grammars and of large schemas take
# less than the first of these; what is beyond it may be the second for one mask, and the third for all of a sequence.
_MASK_SECONDS = 0.002
MAX_MASK_SECONDS = 0.1
_MAX_ALL_MASKS_SECONDS = 1.0
TOO_COSTLY = (
    "the grammar is too costly at this place: finding the tokens that may come takes so long that other requests would "
    "wait; make it less ambiguous"
)


class MaskBudget:
    """The CPU time that the masks of one sequence took, those of its drafts among them."""

    def __init__(self) -> None:
        self._beyond = 0.0  # seconds, beyond what is ordinary

    def spend(self, seconds: float, name: str) -> None:
        """Count a mask; RequestError, which begins with `name`: it or all of them took too long."""
        beyond = seconds - _MASK_SECONDS
        if beyond > 0:
            self._beyond += beyond
            if beyond > MAX_MASK_SECONDS or self._beyond > _MAX_ALL_MASKS_SECONDS:
                raise RequestError(f"{name}: {TOO_COSTLY}")


class GrammarMatcher:
    """What one sequence may say next: a `Matcher` of the requests.

    Parameters
    ----------
    matcher : LLMatcher
        Its state changes, so no other sequence may use it.
    name : str
        Begins messages.
    budget : MaskBudget, optional
        A sequence that has begun pays from it; else the matcher begins a sequence of its own.
    """

    def __init__(self, matcher: LLMatcher, name: str, budget: MaskBudget | None = None) -> None:
        self._matcher = matcher
        self._name = name
        self._has_begun = budget is not None
        self._budget = budget or MaskBudget()

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next into `row`, int32 [ceil(vocab_size / 32)].

        RequestError: no token may, or the grammar is too costly at this place.
        """
        started = time.thread_time()
        with panics_as_errors(self._name, RequestError):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        self._budget.spend(time.thread_time() - started, self._name)

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled. RequestError: it does not fit."""
        self._has_begun = True
        with panics_as_errors(self._name, RequestError):
            self._matcher.consume_token(token_id)
        self._check()

    def copy(self, name: str | None = None) -> GrammarMatcher:
        """Make another one in the same state, of the same name or another one.

        Once a sequence has begun, its copies look ahead in it, and spend what it may spend.
        """
        budget = self._budget if self._has_begun else None
        with panics_as_errors(self._name, RequestError):
            return GrammarMatcher(self._matcher.deep_copy(), name or self._name, budget)

    def forced_tokens(self) -> list[int]:
        """Tokens of the text that must come next; the last ones are left out where longer tokens could begin there."""
        with panics_as_errors(self._name, RequestError):
            return self._matcher.compute_ff_tokens()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-sequence token may come."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{self._name}: {reason(self._matcher.get_error())}")


def reason(error: str) -> str:
    """Llguidance's message, without what is for its developers."""
    text = error.replace("\n<non-verbose/>", "").strip()
    if text.startswith("NoExtension") or not text:
        return "no text satisfies it here"
    if "coerce_one_of" in text:  # an option of llguidance, with which more than one part could hold
        return "cannot be enforced: the parts of oneOf are not seen to exclude each other; say anyOf"
    return f"cannot be enforced: {text[:1].lower()}{text[1:]}" if not text.startswith("at ") else text
