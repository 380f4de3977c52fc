"""The rules of a beam search, and a search over rows of tokens.

Scores and rules are those of transformers (`GenerationMixin._beam_search` of version 5): a step takes the best
continuations of all beams together; those that end with one of the best `width` of them become outputs, and the best
`width` of the others are the next beams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["BeamRules", "RowBeam", "RowSearch", "best"]


class _Scored(Protocol):
    @property
    def score(self) -> np.float32: ...


_Candidate = TypeVar("_Candidate", bound=_Scored)


def best(items: Iterable[_Candidate], count: int) -> list[_Candidate]:
    """The items with the best scores, the best first; of equal ones the earlier first."""
    return sorted(items, key=lambda item: -item.score)[:count]


@dataclass(frozen=True, slots=True)
class BeamRules:
    """How a search goes on and ends.

    Attributes
    ----------
    width : int
        Beams at once.
    max_tokens : int
        Tokens of an output.
    num_stops : int
        Tokens that end an output.
    length_penalty, early_stopping
        See `SamplingParams`.
    """

    width: int
    max_tokens: int
    num_stops: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    @property
    def num_best(self) -> int:
        """How many continuations a step looks at: `width` of them go on, whatever ends."""
        return max(2, 1 + self.num_stops) * self.width

    def score(self, log_probability: np.float32, length: int) -> np.float32:
        """What outputs are compared by: the sum of its log-probabilities over its length to the `length_penalty`."""
        score: np.float32 = log_probability / np.float32(float(length) ** self.length_penalty)
        return score

    def split(
        self, candidates: Iterable[_Candidate], ends: Callable[[_Candidate], bool]
    ) -> tuple[list[_Candidate], list[_Candidate]]:
        """The next beams of these continuations, and those that end; the best first."""
        running: list[_Candidate] = []
        ended: list[_Candidate] = []
        for place, candidate in enumerate(best(candidates, self.num_best)):
            if not ends(candidate):
                running.append(candidate)
            elif place < self.width:
                ended.append(candidate)
        return running[: self.width], ended

    def has_ended(self, beams: Sequence[_Scored], outputs: Sequence[_Scored], length: int) -> bool:
        """Whether no beam goes on, or none is expected to become better than the outputs.

        `beams`, `outputs`: the best first, `width` at most; `length`: tokens of a beam.
        """
        if not beams:
            return True
        if len(outputs) < self.width:
            return False
        if self.early_stopping is True:
            return True
        is_patient = self.early_stopping == "never" and self.length_penalty > 0
        possible = self.score(beams[0].score, self.max_tokens if is_patient else length)
        return bool(possible <= outputs[-1].score)


@dataclass(frozen=True, slots=True)
class RowBeam:
    """A beam or an output.

    Attributes
    ----------
    row : int
        Where it is computed, 0 to `width` - 1.
    token_ids : tuple of int
    score : float32
        The sum of log-probabilities of a beam, `BeamRules.score` of an output.
    """

    row: int
    token_ids: tuple[int, ...]
    score: np.float32


class RowSearch:
    """A search whose beams are rows of one array, for a caller that computes the rows.

    Parameters
    ----------
    rules : BeamRules
    stop_token_ids : collection of int
        End an output.

    Attributes
    ----------
    beams : list of RowBeam
        The best first; the prompt alone at first, in row 0, and none once the search has ended.
    outputs : list of RowBeam
        Those that have ended, the best first, `width` at most.
    """

    def __init__(self, rules: BeamRules, stop_token_ids: Collection[int]) -> None:
        self._rules, self._stop_token_ids = rules, stop_token_ids
        self.beams = [RowBeam(0, (), np.float32(0))]
        self.outputs: list[RowBeam] = []

    def advance(self, log_probs: Sequence[npt.NDArray[np.float32]]) -> list[tuple[int, int]]:
        """Choose the next beams.

        Parameters
        ----------
        log_probs : sequence of float32 array, [len(beams)] of [vocab_size]
            One array for each of `beams`, of its next token.

        Returns
        -------
        list of (int, int)
            The rows of which others become copies, and these, before the beams get their last tokens.
        """
        if not self.beams:
            return []
        rules, length = self._rules, len(self.beams[0].token_ids) + 1
        candidates = (
            RowBeam(beam.row, (*beam.token_ids, token_id), beam.score + row[token_id])
            for beam, row in zip(self.beams, log_probs, strict=True)
            for token_id in np.argsort(-row, kind="stable")[: rules.num_best].tolist()
        )
        running, ended = rules.split(
            candidates, lambda one: one.token_ids[-1] in self._stop_token_ids or length >= rules.max_tokens
        )
        scored = [replace(one, score=rules.score(one.score, length)) for one in ended]
        self.outputs = best([*self.outputs, *scored], rules.width)
        if rules.has_ended(running, self.outputs, length):
            running = []
        # The first beam that continues a row stays there, and the others go where none stays.
        continued: set[int] = set()
        free = [row for row in range(rules.width) if row not in {one.row for one in running}]
        self.beams, copies = [], []
        for one in running:
            row = free.pop() if one.row in continued else one.row
            if row != one.row:
                copies.append((one.row, row))
            continued.add(one.row)
            self.beams.append(replace(one, row=row))
        return copies
