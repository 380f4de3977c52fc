"""Calls of an LLM from the threads that it waits for: hooks and logits processors. They fail, and nothing hangs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infinilm
from infinilm import LLM
from llm.support import PATIENCE, engine_threads, one, run_program, wait_for

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
Call = Callable[[LLM, infinilm.Request], object]

CALLS: dict[str, Call] = {
    "generate": lambda llm, earlier: llm.generate("an", use_tqdm=False),
    "chat": lambda llm, earlier: llm.chat([{"role": "user", "content": "an"}], use_tqdm=False),
    "stream": lambda llm, earlier: list(llm.stream("an")),
    "submit": lambda llm, earlier: llm.submit("an").result(),
    "score": lambda llm, earlier: llm.score("an"),
    "forward": lambda llm, earlier: llm.forward([1, 2]),
    "result": lambda llm, earlier: earlier.result(),
    "events": lambda llm, earlier: list(earlier),
    "reset_cache": lambda llm, earlier: llm.reset_cache(),
    "resize": lambda llm, earlier: llm.reset_cache("1MiB"),
    "close": lambda llm, earlier: llm.close(),
    "with": lambda llm, earlier: llm.__exit__(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("place", ["processor", "hook"])
def test_calls_that_would_wait_for_themselves(folder: Path, name: str, place: str) -> None:
    hooks = infinilm.HookRegistry()
    with LLM(folder, hooks=hooks, enable_prefix_caching=False, tensor_parallel_size=1) as llm:
        expected = one(llm, "the", **SETTINGS)
        started = threading.Event()
        earlier: list[infinilm.Request] = []

        def call(*_: Any) -> None:
            assert started.wait(PATIENCE)
            CALLS[name](llm, earlier[0])

        if place == "hook":
            handle = hooks.register_hook("logits", call)
            earlier.append(llm.submit("the", **SETTINGS))
            started.set()
            with pytest.raises(infinilm.InfinilmError, match="hook"):
                earlier[0].result(PATIENCE)
            handle.remove()
        else:
            earlier.append(llm.submit("the", logits_processor=lambda _, logits: wait(started, logits), **SETTINGS))
            caller = llm.submit("an", logits_processor=call, **SETTINGS)
            started.set()
            with pytest.raises(infinilm.InfinilmError, match="logits_processor"):
                caller.result(PATIENCE)
            assert earlier[0].result(PATIENCE).outputs == [expected]
        assert one(llm, "the", **SETTINGS) == expected


def wait(event: threading.Event, value: Any) -> Any:
    assert event.wait(PATIENCE)
    return value


def test_the_rest_of_a_stream(folder: Path) -> None:
    """One that began elsewhere is read on in a processor."""
    with LLM(folder) as llm:
        stream = llm.stream("the", **SETTINGS, logits_processor=lambda ids, logits: logits)
        next(stream)

        def read_on(ids: Any, logits: Any) -> Any:
            list(stream)
            return logits

        with pytest.raises(infinilm.InfinilmError, match="logits_processor"):
            llm.generate("an", logits_processor=read_on, **SETTINGS)
        assert len(one(llm, "the", **SETTINGS).token_ids) == 12


def test_another_llm_may_be_called(folder: Path) -> None:
    with LLM(folder) as llm, LLM(folder) as other:
        expected = one(llm, "the", **SETTINGS)

        def ask(ids: Any, logits: Any) -> Any:
            one(other, "an", **SETTINGS)
            return logits

        assert one(llm, "the", logits_processor=ask, **SETTINGS) == expected


def test_what_never_waits_is_allowed(llm: LLM) -> None:
    requests: list[infinilm.Request] = []
    started = threading.Event()

    def look(ids: Any, logits: Any) -> Any:
        assert started.wait(PATIENCE)
        llm.metrics()
        llm.detokenize(llm.tokenize("the"))
        requests[0].cancel()
        return logits

    requests.append(llm.submit("the", logits_processor=look, ignore_eos=True))
    started.set()
    assert requests[0].result(PATIENCE).outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("place", ["processor", "hook"])
def test_an_llm_that_is_collected_on_its_own_threads_is_closed(folder: Path, place: str) -> None:
    """In a cycle, whose last reference from outside goes while the engine runs."""
    before = len(engine_threads())
    for _ in range(2):
        hooks, reached, go = infinilm.HookRegistry(), threading.Event(), threading.Event()

        def collect(*args: Any, reached: threading.Event = reached, go: threading.Event = go) -> Any:
            reached.set()
            assert go.wait(PATIENCE)
            gc.collect()
            return args[1] if len(args) == 2 else None

        llm = LLM(folder, hooks=hooks)
        llm.me = llm  # type: ignore[attr-defined]
        if place == "hook":
            hooks.register_hook("logits", lambda name, tensor, layer, collect=collect: collect(name, tensor, layer))
        sampling = {"logits_processor": collect} if place == "processor" else {}
        request = llm.submit("the", **sampling, **SETTINGS)
        engine = llm._engine
        assert reached.wait(PATIENCE)
        del request, llm
        go.set()
        wait_for(lambda: len(engine_threads()) == before)

        def is_closed(engine: Any = engine) -> bool:
            try:
                engine.state_dict()
            except infinilm.EngineDeadError:
                return True
            return False

        wait_for(is_closed)


@pytest.mark.parametrize("call", ["llm.close()", "llm.generate('an')", "llm.submit('an').result()"])
def test_the_program_ends_after_a_call_in_a_processor(folder: Path, call: str) -> None:
    program = f"""
import infinilm, threading
llm = infinilm.LLM({str(folder)!r}, use_tqdm=False)
def processor(ids, logits):
    {call}
    return logits
try:
    llm.generate("the", max_tokens=3, logits_processor=processor)
except infinilm.InfinilmError as error:
    print(error)
"""
    assert "a logits_processor cannot call the LLM" in run_program(program)
