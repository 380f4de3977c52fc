"""Drafters that tests write: they know the answers that were given without drafts, and draft them or anything else."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import infinilm
from infinilm import LLM
from infinilm.scheduling.sequence import Sequence as Scheduled
from infinilm.speculation.lengths import Lengths, Offer

MODES = ("right", "wrong", "random", "until", "some", "odd")


class Book:
    """Gives drafters to an LLM, by `mode`, and keeps the answers of all sequences; "off" gives none.

    right, wrong: every token; until: some right ones and then wrong ones; some: right ones, but often none; random: any
    tokens; odd: right ones among wrong ones, ids that no token has, and ends, and more than were asked for.
    """

    def __init__(self, mode: str = "off") -> None:
        self.mode = mode
        self.answers: dict[Any, Sequence[int]] = {}
        self.failing = False

    def __call__(self, sequence: Any) -> Drafter | None:
        assert isinstance(sequence, Scheduled)
        if self.mode == "off":
            self.answers[_key(sequence)] = sequence.output_token_ids
            return None
        return Drafter(sequence, self.mode, self.answers.get(_key(sequence), []))


def _key(sequence: Scheduled) -> Any:
    adapter = None if sequence.adapter is None else sequence.adapter_id
    params = replace(sequence.params, speculation=None, prediction=None)  # which change no answer
    return sequence.prompt_token_ids.tobytes(), repr(params), sequence.seed, adapter


class Drafter:
    name = "book"

    def __init__(self, sequence: Scheduled, mode: str, answer: Sequence[int]) -> None:
        self.sequence, self.mode, self.answer = sequence, mode, answer
        self.tokens: list[int] = []
        self.rng = random.Random(zlib.crc32(sequence.prompt_token_ids.tobytes()))

    def update(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        own = [*self.sequence.prompt_token_ids.tolist(), *self.sequence.output_token_ids]
        assert self.tokens == own, "a drafter gets each token once"

    def draft(self, limit: int) -> list[int]:
        assert limit >= 1
        rng, begin = self.rng, len(self.tokens) - len(self.sequence.prompt_token_ids)
        right = [int(token_id) for token_id in self.answer[begin:]]
        if self.mode == "some" and rng.random() < 0.5:
            return []
        if self.mode in ("right", "some"):
            return right[:limit]
        if self.mode == "wrong":
            return [token_id ^ 1 for token_id in right[:limit]]
        if self.mode == "until":
            count = rng.randrange(4)
            return [*right[:count], *(token_id ^ 1 for token_id in right[count:])][:limit]
        if self.mode == "odd":
            odd = [-1, 2**31 - 1, *self.sequence.stop_token_ids]
            odd += [0] * len(odd)
            return [token_id if rng.random() < 0.8 else rng.choice(odd) for token_id in right] + [0] * limit
        return [rng.randrange(64) for _ in range(rng.randint(1, limit))]


class AnyLengths(Lengths):
    """Lengths without a reason, others in each step, 0 among them; steps wait for results or do not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def asks(self, _num_seqs: int) -> bool:
        return self.rng.random() < 0.8

    def waits(self, _num_seqs: int) -> bool:
        return self.rng.random() < 0.5

    def choose(self, _num_seqs: int, offers: Sequence[Offer], _num_prompt_tokens: int = 0) -> list[int]:
        return [self.rng.choice((0, offer.num_tokens, self.rng.randint(0, offer.num_tokens))) for offer in offers]


def use_lengths(llm: LLM, lengths: Lengths | None) -> None:
    """Let them choose from now on; None: all of each draft is verified."""
    drafting = llm._thread.scheduler._drafting
    assert drafting is not None
    drafting.lengths = lengths


def told(outputs: Sequence[infinilm.RequestOutput]) -> list[Any]:
    """All of the outputs but their times, as something that equals another only if all bits do."""
    return [(o.prompt_token_ids, repr(o.prompt_logprobs), [repr(c) for c in o.outputs]) for o in outputs]


def counts(llm: LLM) -> tuple[int, int]:
    """(tokens drafted, those that were right) so far."""
    stats = llm._thread.scheduler.stats
    return stats.num_draft_tokens, sum(stats.accepted_at)


def assert_drafted(llm: LLM, before: tuple[int, int], mode: str) -> None:
    """That drafts were made since, and were right or wrong as the mode says."""
    drafted, accepted = (now - then for now, then in zip(counts(llm), before, strict=True))
    assert drafted > 0
    if mode in ("right", "some"):
        assert accepted == drafted
    elif mode == "wrong":
        assert accepted == 0
    elif mode in ("until", "odd"):
        assert 0 < accepted < drafted
    else:
        assert accepted < drafted
