"""Calls with more prompts than can wait, and prompts that are drawn as the engine has room for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import infinilm
from infinilm import LLM, RequestLimits
from infinilm.calls.feed import Feed
from infinilm.requests.source import RequestSource
from llm.support import PATIENCE, one, tokens, wait_for
from llm.test_requests import Gate

pytestmark = pytest.mark.one_rank  # what waits is outside of the engine

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
PROMPTS = [[1, 5 + i, 7] for i in range(30)]


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[LLM]:
    """Two run and three wait."""
    with LLM(folder, max_num_seqs=2, limits=RequestLimits(max_queued_seqs=3)) as made:
        yield made


@pytest.fixture(autouse=True)
def idle(small: LLM) -> None:
    """What the test before left without waiting has given back its places in the queue."""
    wait_for(lambda: not small._thread._queue.num_open)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens(llm.generate(PROMPTS, use_tqdm=False, **SETTINGS))


def test_more_prompts_than_can_wait(small: LLM, expected: list[list[int]]) -> None:
    for prompts in (PROMPTS, np.array(PROMPTS), iter(PROMPTS), map(tuple, PROMPTS)):
        outputs = small.generate(prompts, use_tqdm=False, **SETTINGS)
        assert tokens(outputs) == expected
        assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    assert len(small.score(PROMPTS)) == len(small.score(iter(PROMPTS))) == len(small.embed(iter(PROMPTS))) == 30
    assert tokens(asyncio.run(small.agenerate(iter(PROMPTS), **SETTINGS))) == expected


def test_several_sequences_and_parameters_of_each(small: LLM, llm: LLM) -> None:
    params = [infinilm.SamplingParams(n=1 + i % 4, seed=i, max_tokens=3, prompt_logprobs=0) for i in range(30)]
    got, wanted = ([o.outputs for o in m.generate(PROMPTS, params, use_tqdm=False)] for m in (small, llm))
    assert got == wanted
    assert [o.outputs for o in small.generate(iter(PROMPTS), params, use_tqdm=False)] == wanted


class Endless:
    """Prompts without an end, and how many were drawn."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        for i in itertools.count():
            self.num_drawn += 1
            yield [1, 5 + i % 30]


def test_an_endless_stream(small: LLM) -> None:
    """No more prompts are drawn than there is room for, and leaving the loop ends the rest."""
    prompts = Endless()
    seen: set[int] = set()
    for event in small.stream(prompts, **SETTINGS):
        seen.add(event.index)
        assert prompts.num_drawn <= len(seen) + 5
        if len(seen) > 40:
            break
    wait_for(lambda: small.metrics().num_running + small.metrics().num_waiting == 0)
    assert prompts.num_drawn < 50


def test_an_endless_stream_of_asyncio(small: LLM) -> None:
    async def indices(events: AsyncIterator[infinilm.TokenEvent]) -> set[int]:
        seen: set[int] = set()
        async for event in events:
            seen.add(event.index)
            if len(seen) > 20:
                break
        return seen

    assert asyncio.run(indices(small.astream(Endless(), **SETTINGS))) == set(range(21))


def test_events_come_before_the_next_prompt_is_there(small: LLM) -> None:
    """A slow source does not hold back what runs: each prompt here waits for the answer to the one before."""
    ended: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for i in range(4):
            assert len(ended) >= i - 1
            yield [1, 5 + i]
            wait_for(lambda: not small._thread.scheduler.has_work and not small._thread._queue.num_open)
            # A request leaves the queue before its last event is delivered; one that comes later is served after that.
            one(small, [1, 9], **SETTINGS)

    for event in small.stream(prompts(), **SETTINGS):
        if event.finish_reason:
            ended.append(event.index)
    assert ended == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [list, iter])
def test_a_bad_prompt_is_named(small: LLM, kind: Any) -> None:
    prompts = [*PROMPTS[:17], [1, -1], *PROMPTS]
    for call in (small.generate, small.score, small.embed, lambda p: list(small.stream(p))):
        with pytest.raises(infinilm.RequestError, match="prompt 17: token id -1"):
            call(kind(prompts))
    wait_for(lambda: small.metrics().num_running + small.metrics().num_waiting == 0)
    assert one(small, [1, 5, 7], **SETTINGS)


def test_an_error_of_the_source_comes_out(small: LLM) -> None:
    def prompts() -> Iterable[list[int]]:
        yield [1, 5]
        raise KeyError("the file has ended")

    with pytest.raises(KeyError, match="the file has ended"):
        small.generate(prompts(), use_tqdm=False, **SETTINGS)
    wait_for(lambda: small.metrics().num_running == 0)


def test_a_queue_that_others_fill_is_tried_again(small: LLM, expected: list[list[int]]) -> None:
    """A call that has begun waits for its turn, where a new one is refused."""
    gate = Gate()
    others: list[infinilm.Request] = []

    def prompts() -> Iterator[list[int]]:
        yield PROMPTS[0]
        wait_for(lambda: small.metrics().num_running + small.metrics().num_waiting == 0)
        others.extend(small.submit("the", logits_processor=gate, **SETTINGS) for _ in range(5))
        assert gate.reached.wait(PATIENCE)
        with pytest.raises(infinilm.QueueFullError):
            small.generate("the")
        yield PROMPTS[1]

    events = small.stream(prompts(), **SETTINGS)
    got: dict[int, list[int | None]] = {0: [], 1: []}
    for event in events:
        got[event.index].append(event.token_id)
        if event.finish_reason:
            gate.open()
    assert [got[0], got[1]] == expected[:2]
    assert all(len(request.result(PATIENCE).outputs[0].token_ids) == 4 for request in others)


def test_nothing_to_draw(small: LLM) -> None:
    assert small.generate(iter(())) == list(small.stream(iter(()))) == small.generate([]) == []
    assert small.generate((i for i in PROMPTS[0]), use_tqdm=False, **SETTINGS)[0].prompt_token_ids == PROMPTS[0]


class Tensor:
    """What this library sees of a tensor of torch: numpy has no way to its memory but by these."""

    def __init__(self, values: Any) -> None:
        self._array = np.array(values)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return Host(self._array)

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Tensor]:
        return map(Tensor, self._array)


class Host(Tensor):
    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return self._array


class Exported:
    """An array that has DLPack alone, as jax's."""

    def __init__(self, values: Any) -> None:
        self._array = np.array(values)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("kind", [np.array, Tensor, Exported])
def test_token_ids_in_arrays_of_other_libraries(llm: LLM, expected: list[list[int]], kind: Any) -> None:
    for prompts in (kind(PROMPTS[0]), [kind(PROMPTS[0])], kind(PROMPTS[:1]), {"prompt_token_ids": kind(PROMPTS[0])}):
        assert tokens(llm.generate(prompts, use_tqdm=False, **SETTINGS)) == expected[:1]
    assert llm.submit(kind(PROMPTS[0]), **SETTINGS).result().outputs[0].token_ids == expected[0]
    assert llm.detokenize(kind(PROMPTS[0])) == llm.detokenize(PROMPTS[0])
    assert llm.score(kind(PROMPTS[0])) == llm.score(PROMPTS[0])
    np.testing.assert_array_equal(llm.forward(kind(PROMPTS[0])), llm.forward(PROMPTS[0]))


def test_a_unit_that_waits_for_room_is_not_started_before() -> None:
    """Here that of a queue that was full: four requests, and then room for two."""
    units = [Mock(all_requests=[object()] * size) for size in (2, 4)]
    feed: Feed[Any] = Feed(Mock(), RequestSource(iter(units), None, 4), Mock())
    assert feed._next_requests(4, 1) == units[:1]
    feed._num_ends, feed._pending = {units[0]: 2}, units[1:]
    assert feed._next_requests(2, 1) == [] and feed._pending == units[1:]
    feed._num_ends = {}
    assert feed._next_requests(4, 1) == units[1:]
