"""How much may be asked of an LLM: refused before it costs anything, and with the name of the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import infinilm
from infinilm import LLM, RequestLimits
from llm.support import PATIENCE, one, wait_for
from llm.test_requests import Gate

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
SMALL = RequestLimits(
    max_queued_seqs=3, max_n=2, max_logprobs=4, max_logit_bias=2, max_stop_token_ids=2, max_stop=2, max_stop_len=3
)


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=1, limits=SMALL) as made:
        yield made


@pytest.mark.parametrize(
    ("sampling", "limit"),
    [
        ({"n": 3}, "max_n=2"),
        ({"n": 10**9}, "max_n=2"),
        ({"logprobs": 5}, "max_logprobs=4"),
        ({"prompt_logprobs": 5}, "max_logprobs=4"),
        ({"logit_bias": {1: 1, 2: 1, 3: 1}}, "max_logit_bias=2"),
        ({"stop_token_ids": [1, 2, 3]}, "max_stop_token_ids=2"),
        ({"stop": ["a", "b", "c"]}, "max_stop=2"),
        ({"stop": ["abcd"]}, "max_stop_len=3"),
    ],
)
def test_parameters_beyond_a_limit(small: LLM, sampling: dict[str, Any], limit: str) -> None:
    for call in (small.generate, small.stream, small.submit):
        with pytest.raises(infinilm.RequestError, match=f"limits.{limit}"):
            call("the", **sampling)
    assert small.metrics().num_waiting == 0


def test_parameters_at_the_limit(small: LLM) -> None:
    got = one(small, "the", n=2, logprobs=4, logit_bias={1: 1, 2: 1}, stop=["abc", "de"], **SETTINGS)
    assert len(got.token_ids) == 5
    assert small.score("the", top=4)
    with pytest.raises(infinilm.RequestError, match=r"limits\.max_logprobs=4"):
        small.score("the", top=5)


def test_the_defaults_are_bounded(llm: LLM) -> None:
    for sampling in ({"n": 100_000}, {"stop": ["x"] * 100}, {"stop": "x" * 10_000}):
        with pytest.raises(infinilm.RequestError, match="limits"):
            llm.generate("the", **sampling)


CALLS: dict[str, Callable[[LLM], object]] = {
    "submit": lambda llm: llm.submit("an"),
    "generate": lambda llm: llm.generate("an"),
    "stream": lambda llm: list(llm.stream("an")),
    "score": lambda llm: llm.score("an"),
    "forward": lambda llm: llm.forward([1]),
}


@pytest.mark.parametrize("waiting", [[{}, {}, {}], [{"n": 2}, {}], [{"n": 2, "prompt_logprobs": 1}]], ids=str)
def test_a_full_queue(small: LLM, waiting: list[dict[str, Any]]) -> None:
    """One runs and three wait; what comes then is refused, and what is there goes on."""
    gate = Gate()
    expected = one(small, "the", **SETTINGS)
    requests = [small.submit("the", logits_processor=gate, **SETTINGS)]
    assert gate.reached.wait(PATIENCE)
    requests += [small.submit("an", **more, **SETTINGS) for more in waiting]
    assert small.metrics().num_waiting == 3
    for call in CALLS.values():
        with pytest.raises(infinilm.QueueFullError, match=r"limits\.max_queued_seqs") as caught:
            call(small)
        assert isinstance(caught.value, infinilm.RequestError)
    gate.open()
    assert {len(c.token_ids) for r in requests for c in r.result(PATIENCE).outputs} == {5}
    assert requests[0].result().outputs == [expected]
    wait_for(lambda: small.metrics().num_waiting == 0)
    for call in CALLS.values():
        call(small)


def test_a_request_that_can_never_be_queued(folder: Path) -> None:
    """The sequences of one prompt run or wait at the same time; those of several prompts need not."""
    with LLM(folder, max_num_seqs=1, limits=RequestLimits(max_queued_seqs=3)) as llm:
        assert len(llm.generate(["the"] * 9, n=2, use_tqdm=False, **SETTINGS)) == 9
        for sampling in ({"n": 5}, {"n": 4, "prompt_logprobs": 0}):
            with pytest.raises(infinilm.RequestError, match="asks for 5 sequences at once, and 4 can"):
                llm.generate("the", **sampling, **SETTINGS)


def test_bad_limits(folder: Path) -> None:
    for item in dataclasses.fields(RequestLimits):
        if item.name == "max_seconds":
            continue
        for value in (-1, True, 1.5, None):
            with pytest.raises(infinilm.ConfigError, match=item.name):
                RequestLimits(**{item.name: value})  # type: ignore[arg-type]
    with pytest.raises(infinilm.ConfigError, match="max_n"):
        RequestLimits(max_n=0)
    for seconds in (0, -1, True, float("nan"), float("inf"), "5"):
        with pytest.raises(infinilm.ConfigError, match="max_seconds"):
            RequestLimits(max_seconds=seconds)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="limits"):
        LLM(folder, limits={"max_n": 3})  # type: ignore[arg-type]
