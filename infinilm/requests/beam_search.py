"""Beam search: the most probable outputs of a prompt, found by following several at once.

Its rules are `infinilm.beams.BeamRules`. A beam is a sequence of the scheduler, and beams that begin alike share their
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from infinilm._core import MAX_LOGPROBS
from infinilm.beams import BeamRules, best
from infinilm.requests.request import Completion, EngineRequest
from infinilm.scheduling.sequence import Sequence
from infinilm.text.detokenize import OutputText

__all__ = ["BeamSearch", "Hypothesis", "Moves"]

Logprobs = dict[int, float]


class Hypothesis(NamedTuple):
    """An output that has ended.

    Attributes
    ----------
    score : float32
        The sum of its log-probabilities, divided by its length to the power of `length_penalty`.
    token_ids : list of int
    token_times : list of float
        When each came: seconds, perf_counter.
    logprobs : list of dict of int to float
        Each token has its own log-probability and those of the most probable ones, best first.
    """

    score: np.float32
    token_ids: list[int]
    token_times: list[float]
    logprobs: list[Logprobs]


class Moves(NamedTuple):
    """What becomes of the beams, in this order."""

    dropped: list[Sequence]
    forked: list[tuple[Sequence, Sequence]]  # each with the sequence that it begins as, before that is continued
    continued: list[tuple[Sequence, int]]  # each with its next token


@dataclass(slots=True, eq=False)
class _Beam:
    sequence: Sequence
    score: np.float32  # the sum of its log-probabilities
    logprobs: list[Logprobs]  # of its tokens
    text: OutputText | None  # None: there are no stop strings
    row: Logprobs | None = None  # the most probable next tokens, best first; None: not computed yet


@dataclass(slots=True, eq=False)
class _Candidate:
    beam: _Beam
    token_id: int
    score: np.float32
    text: OutputText | None = None  # with this token, if there are stop strings


class BeamSearch(EngineRequest):
    """A search, which ends the completions of its prompt when it has ended.

    Parameters
    ----------
    completions : list of Completion
        They get the best outputs, and never run themselves.
    """

    def __init__(self, completions: SequenceOf[Completion]) -> None:
        first = completions[0].sequence
        params = first.params
        assert params.beam_width is not None
        # A row is sampled, too, and what it draws is dropped.
        self._params = replace(params, temperature=0.0, speculation="off")
        self._stop_token_ids = first.stop_token_ids
        num_stops = len(self._stop_token_ids)
        self._rules = BeamRules(
            params.beam_width, completions[0].max_new_tokens, num_stops, params.length_penalty, params.early_stopping
        )
        # Stop tokens that may not come yet are left out.
        num_rows = self._rules.num_best + (num_stops if params.min_tokens else 0)
        self.num_logprobs = min(max(num_rows, params.logprobs or 0), completions[0].pipeline.vocab_size)
        self._prompt = first
        super().__init__(self._branch([], []))
        self._beams = [_Beam(self.sequence, np.float32(0), [], completions[0].make_text() if params.stop else None)]
        self._hypotheses: list[Hypothesis] = []  # the best first
        self.dependents = list(completions)
        self.completions = tuple(completions)

    @property
    def ends_dependents(self) -> bool:
        """True: the completions never run."""
        return True

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of all beams."""
        return [beam.sequence for beam in self._beams]

    def _branch(self, token_ids: list[int], token_times: list[float]) -> Sequence:
        """A sequence with this output."""
        sequence = Sequence(
            self._prompt.prompt_token_ids,
            self._params,
            seed=0,
            request=self,
            adapter=self._prompt.adapter,
            given=self._prompt.given,
            is_held=True,
            is_streamed=False,
            output_token_ids=token_ids,
            token_times=token_times,
        )
        sequence.needs_logits = self.num_logprobs > MAX_LOGPROBS
        sequence.num_logprobs = -1 if sequence.needs_logits else self.num_logprobs
        return sequence

    # ---- in the engine thread ----

    def take_row(self, sequence: Sequence, logprobs: Logprobs) -> bool:
        """Take the log-probabilities of the most probable next tokens of a beam; whether those of all are here now."""
        for beam in self._beams:
            if beam.sequence is sequence:
                beam.row = logprobs
        return all(beam.row is not None for beam in self._beams)

    def advance(self, now: float) -> Moves:
        """Choose the next beams, once all rows are here; `finish_reason` says whether the search has ended.

        `now`: seconds, perf_counter.
        """
        rules, length = self._rules, len(self._beams[0].logprobs) + 1
        running, ended = rules.split(self._candidates(length), lambda candidate: self._ends(candidate, length))
        hypotheses = [self._hypothesis(one, rules.score(one.score, length), now) for one in ended]
        self._hypotheses = best(self._hypotheses + hypotheses, rules.width)
        if rules.has_ended(running, self._hypotheses, length):
            self.finish_reason = "stop"
            return Moves(self.sequences, [], [])
        return self._move(running, now)

    def _candidates(self, length: int) -> list[_Candidate]:
        """Continuations of all beams, the best among them; `length`: their tokens."""
        too_soon = self._stop_token_ids if length <= self._params.min_tokens else ()
        return [
            _Candidate(beam, token_id, beam.score + np.float32(logprob))
            for beam in self._beams
            for token_id, logprob in (beam.row or {}).items()
            if token_id not in too_soon
        ]

    def _ends(self, candidate: _Candidate, length: int) -> bool:
        """Whether an output ends with its last token."""
        if candidate.beam.text is not None:
            candidate.text = candidate.beam.text.copy()
            candidate.text.push(candidate.token_id, search=length > self._params.min_tokens)
            if candidate.text.stopped_by is not None:
                return True
        return candidate.token_id in self._stop_token_ids or length >= self._rules.max_tokens

    def _hypothesis(self, candidate: _Candidate, score: np.float32, now: float) -> Hypothesis:
        beam, token_id = candidate.beam, candidate.token_id
        ids, times = beam.sequence.output_token_ids, beam.sequence.token_times
        return Hypothesis(score, [*ids, token_id], [*times, now], [*beam.logprobs, self._told(beam, token_id)])

    def _told(self, beam: _Beam, token_id: int) -> Logprobs:
        """The log-probabilities of a next token that its completion tells."""
        assert beam.row is not None
        shown = list(beam.row.items())[: self._params.logprobs or 0]
        return dict(shown) | {token_id: beam.row[token_id]}

    def _move(self, chosen: list[_Candidate], now: float) -> Moves:
        """Make these candidates the beams. The first of each beam continues it, and the others are forks of it."""
        moves = Moves([], [], [])
        continued: set[_Beam] = set()
        beams: list[_Beam] = []
        for one in chosen:
            old = one.beam
            sequence = old.sequence
            if old in continued:
                ids, times = sequence.output_token_ids, sequence.token_times
                sequence = self._branch([*ids, one.token_id], [*times, now])
                moves.forked.append((old.sequence, sequence))
            else:
                moves.continued.append((sequence, one.token_id))
                continued.add(old)
            beams.append(_Beam(sequence, one.score, [*old.logprobs, self._told(old, one.token_id)], one.text))
        moves.dropped.extend(beam.sequence for beam in self._beams if beam not in continued)
        self._beams = beams
        return moves

    def winners(self) -> Iterable[tuple[Completion, Hypothesis | None]]:
        """Each completion and its output; None: the search has found too few."""
        found: list[Hypothesis | None] = [*self._hypotheses]
        found += [None] * (len(self.completions) - len(found))
        return zip(self.completions, found, strict=False)
