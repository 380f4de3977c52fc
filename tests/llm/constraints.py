"""A matcher for tests, and a way to give one to the requests of an LLM."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import infinilm
from infinilm import LLM
from infinilm.requests import prompts
from infinilm.requests.request import GenerationRequest
from infinilm.scheduling import matcher as ct


def allowed_after(tokens: list[int], vocab_size: int, seed: int) -> np.ndarray:
    """What the toy grammar allows after these output tokens, [vocab_size] bool: a few tokens, or nearly all."""
    rng = np.random.default_rng(zlib.crc32(np.array([seed, *tokens], np.int64).tobytes()))
    allowed = rng.random(vocab_size) < rng.choice([0.02, 0.5, 0.98])
    allowed[rng.integers(vocab_size)] = True
    return allowed


class Toy:
    """Allows a set of tokens that depends on all tokens so far; refuses to take in any other.

    Parameters
    ----------
    length : int
        Finished after so many tokens; 0: never.
    act : callable
        Called with the name of each call ("fill", "advance", "is_finished") and the tokens so far; may raise.
    """

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        length: int = 0,
        act: Callable[[str, list[int]], object] = lambda name, tokens: None,
    ) -> None:
        self.vocab_size, self.seed, self.length, self.act = vocab_size, seed, length, act
        self.tokens: list[int] = []
        self._calling = threading.Lock()

    def fill(self, row: np.ndarray) -> None:
        with self._calling:
            assert row.shape == (-(-self.vocab_size // 32),) and row.dtype == np.int32 and row.flags.c_contiguous
            self.act("fill", self.tokens)
            allowed = allowed_after(self.tokens, self.vocab_size, self.seed)
            bits = np.ones(32 * len(row), np.bool_)  # those behind the vocabulary do not count
            bits[: self.vocab_size] = allowed
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token_id: int) -> None:
        with self._calling:
            self.act("advance", self.tokens)
            assert type(token_id) is int
            assert allowed_after(self.tokens, self.vocab_size, self.seed)[token_id], (self.tokens, token_id)
            self.tokens.append(token_id)

    def copy(self) -> Toy:
        other = Toy(self.vocab_size, self.seed, self.length, self.act)
        other.tokens = self.tokens.copy()
        return other

    def forced_tokens(self) -> list[int]:
        """Any tokens: they are a guess."""
        self.act("forced_tokens", self.tokens)
        allowed = np.flatnonzero(allowed_after(self.tokens, self.vocab_size, self.seed))
        return [int(allowed[0]), 3, 3]

    @property
    def is_finished(self) -> bool:
        self.act("is_finished", self.tokens)
        return len(self.tokens) == self.length


def processor(vocab_size: int, seed: int) -> Callable[[Any, Any], Any]:
    """What a Toy does as a logits_processor, which changes the logits on the host."""
    prompt_length: list[int] = []

    def process(token_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        prompt_length.append(len(token_ids))
        tokens = token_ids[min(prompt_length) :].tolist()
        return np.where(allowed_after(tokens, vocab_size, seed), logits, np.float32(-np.inf))

    return process


Matchers = Callable[[list[int]], "ct.Matcher | None"]


def constrain(patch: pytest.MonkeyPatch, matcher_of: Matchers) -> None:
    """Give the matcher of its prompt ids, or none, to every request that is made from now on."""

    def make(request_id: str, prompt: str | None, completions: list[Any], *_: Any) -> GenerationRequest:
        ids = completions[0].sequence.prompt_token_ids.tolist()
        return GenerationRequest(request_id, prompt, completions, constraint=matcher_of(ids))

    patch.setattr(prompts, "GenerationRequest", make)


def answers(outputs: list[infinilm.RequestOutput]) -> list[Any]:
    return [[(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def generate(model: LLM, prompts: list[Any], params: Any) -> list[Any]:
    return answers(model.generate(prompts, params, use_tqdm=False))
