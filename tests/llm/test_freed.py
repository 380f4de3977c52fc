"""A request without references is freed at once, by counts of references, not by the garbage collector.

One that fails is not: its exception has a traceback, whose frames refer to it.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infinilm import LLM
from llm.support import idle, wait_for
from llm.test_abort import LONG

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cancel(llm: LLM) -> None:
    request = llm.submit(LONG, **SETTINGS)
    request.cancel()
    request.result()


def read_twice(llm: LLM) -> None:
    request = llm.submit("the", **SETTINGS)
    assert [event.text for event in request] == [event.text for event in request]
    assert request.output().outputs == request.result().outputs


def leave(llm: LLM) -> None:
    for _ in llm.stream("the", **SETTINGS):
        break


async def follow(llm: LLM) -> None:
    async with llm.asubmit(["the", "an"], **SETTINGS) as running:
        async for _ in running.deltas(lambda: 0.001):
            pass
        assert running.outputs()[0].finished
    await asyncio.sleep(0.01)  # the loop holds them until their last rest is over


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(["the", "an"], use_tqdm=False, **SETTINGS),
    "n": lambda llm: llm.generate("the", n=3, prompt_logprobs=1, logprobs=2, use_tqdm=False, **SETTINGS),
    "stop": lambda llm: llm.generate("the", stop="zzz", min_tokens=5, use_tqdm=False, **SETTINGS),
    "stream": lambda llm: list(llm.stream("the", **SETTINGS)),
    "leave": leave,
    "submit": read_twice,
    "cancel": cancel,
    "agenerate": lambda llm: asyncio.run(llm.agenerate("the", **SETTINGS)),
    "asubmit": lambda llm: asyncio.run(follow(llm)),
    "score": lambda llm: llm.score("the"),
    "embed": lambda llm: llm.embed("the"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_has_ended_is_freed(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []
    put = llm._thread._queue.put

    def look(works: list[Any]) -> None:
        seen.extend(weakref.ref(one) for work in works for one in (work, *work.dependents))
        put(works)

    monkeypatch.setattr(llm._thread._queue, "put", look)
    CALLS[name](llm)
    assert seen
    wait_for(lambda: idle(llm) and all(work() is None for work in seen))
