"""`RequestLimits.max_seconds`: a request that takes longer is ended within a step, wherever it is, and others go on."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

import infinilm
from infinilm import LLM, HookRegistry, RequestLimits, TimeLimitError
from infinilm.requests.request import EngineRequest
from infinilm.serving.request_queue import RequestQueue
from llm import tiny
from llm.support import PATIENCE, idle, one, wait_for
from llm.test_abort import LONG, NUM_LAYERS, Stop, Watch
from llm.test_requests import Gate

LIMIT = 10.0
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
ENGINES: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


class Clock:
    """What the time limit reads; it stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("infinilm.serving.request_queue.time", made)
    return made


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("limit") / "tiny", num_hidden_layers=NUM_LAYERS)


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, device="cpu", use_tqdm=False, limits=RequestLimits(max_seconds=LIMIT), **settings)


def is_clean(llm: LLM) -> bool:
    """Whether nothing of any request is left."""
    metrics = llm.metrics()
    return idle(llm) and metrics.num_waiting == metrics.num_running == metrics.num_used_blocks == 0


def is_late(request: infinilm.Request, num_tokens: int | None = 0) -> bool:
    """Whether a request ended by its time, with so many tokens; None: any number."""
    with pytest.raises(TimeLimitError, match=r"longer than 10 s.*limits\.max_seconds"):
        request.result(PATIENCE)
    outputs = request.output().outputs
    return all(
        one.finish_reason == "error"
        and isinstance(one.error, TimeLimitError)
        and num_tokens in (None, len(one.token_ids))
        for one in outputs
    )


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_running_and_waiting(folder: Path, clock: Clock, engine: dict[str, Any]) -> None:
    """All kinds of requests at once, which end at the same moment; one that came later goes on."""
    with open_llm(folder, max_num_seqs=2, **engine) as llm:
        expected = one(llm, "an", **SETTINGS)
        gate = Gate(len(llm.tokenize("the")) + 5)
        running = llm.submit("the", logits_processor=gate, **SETTINGS)
        assert gate.reached.wait(PATIENCE)
        waiting = [
            llm.submit("an", **more, **SETTINGS)
            for more in ({}, {"n": 3}, {"n": 2, "prompt_logprobs": 2}, {"min_tokens": 30}, {"stop": ["zzz"]})
        ]
        clock.now += LIMIT / 2
        later = llm.submit("an", **SETTINGS)
        clock.now += LIMIT / 2
        gate.open()
        assert is_late(running, 6)
        assert all(map(is_late, waiting))
        assert later.result(PATIENCE).outputs == [expected]
        wait_for(lambda: is_clean(llm))
        assert one(llm, "an", **SETTINGS) == expected


def test_masks_that_come_late(folder: Path, clock: Clock) -> None:
    """The time is over in the middle of a step that waits for its masks; who shares it goes on."""
    registry = HookRegistry()
    with open_llm(folder, hooks=registry, enable_prefix_caching=False) as llm:
        expected = one(llm, "an", min_tokens=30, **SETTINGS)
        steps: list[None] = []

        def count(*_: Any) -> None:
            steps.append(None)
            if len(steps) == 10:
                clock.now += LIMIT / 2

        with llm._thread._stepping:  # both come into the same step
            request = llm.submit("an", min_tokens=30, **SETTINGS)
            clock.now += LIMIT / 2
            other = llm.submit("an", min_tokens=30, **SETTINGS)
            handle = registry.register_hook("embedding", count)
        assert is_late(request, None)
        assert len(request.output().outputs[0].token_ids) in (9, 10)  # that of the step, if it had come by the look
        assert other.result(PATIENCE).outputs == [expected]
        handle.remove()
        wait_for(lambda: is_clean(llm))


async def _astream(llm: LLM) -> None:
    async for _ in llm.astream("an", **SETTINGS):
        pass


async def _steps(llm: LLM) -> None:
    async with llm.asubmit("an", **SETTINGS) as running:
        async for _ in running.steps():
            pass


async def _deltas(llm: LLM) -> None:
    async with llm.asubmit("an", **SETTINGS) as running:
        async for _ in running.deltas(lambda: 0.02):
            pass


async def _handle(llm: LLM) -> None:
    await llm.submit("an", **SETTINGS)


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(["an", "the"], **SETTINGS),
    "stream": lambda llm: list(llm.stream("an", **SETTINGS)),
    "score": lambda llm: llm.score("an"),
    "forward": lambda llm: llm.forward([1, 2]),
    "embed": lambda llm: llm.embed("an"),
    "handle": lambda llm: llm.submit("an", **SETTINGS).result(PATIENCE),
    "events of a handle": lambda llm: list(llm.submit("an", **SETTINGS)),
    "await a handle": lambda llm: asyncio.run(_handle(llm)),
    "agenerate": lambda llm: asyncio.run(llm.agenerate("an", **SETTINGS)),
    "astream": lambda llm: asyncio.run(_astream(llm)),
    "asubmit, steps": lambda llm: asyncio.run(_steps(llm)),
    "asubmit, deltas": lambda llm: asyncio.run(_deltas(llm)),
    "aembed": lambda llm: asyncio.run(llm.aembed("an")),
}


def test_every_call(folder: Path, clock: Clock) -> None:
    """All of them raise, also from the queue, where others hold all slots."""
    with open_llm(folder, max_num_seqs=1) as llm:
        gate = Gate()
        holder = llm.submit("the", logits_processor=gate, **SETTINGS)
        assert gate.reached.wait(PATIENCE)
        raised: dict[str, BaseException] = {}

        def call(name: str) -> None:
            try:
                CALLS[name](llm)
            except BaseException as error:
                raised[name] = error

        callers = [threading.Thread(target=call, args=(name,)) for name in CALLS]
        for caller in callers:
            caller.start()
        wait_for(lambda: llm.metrics().num_waiting == len(CALLS) + 1)  # one of them has two prompts
        clock.now += LIMIT
        gate.open()
        for caller in callers:
            caller.join(PATIENCE)
        assert {name: type(error) for name, error in raised.items()} == dict.fromkeys(CALLS, TimeLimitError)
        assert is_late(holder, 1)
        wait_for(lambda: is_clean(llm))


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_step_ends_between_layers(
    deep: Path, clock: Clock, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing wakes the engine thread but its own look at the clock."""
    monkeypatch.setattr("infinilm.serving.engine_thread._LOOK_EVERY_SECONDS", 0.001)
    registry = HookRegistry()
    with open_llm(deep, hooks=registry, **engine) as llm:
        expected = one(llm, LONG, **SETTINGS)
        llm.reset_cache()
        watch = Watch(llm)
        stop = Stop(3, watch.asked)
        handle = registry.register_hook("layer?_residual", stop)
        request = llm.submit(LONG, **SETTINGS)
        assert stop.reached.wait(PATIENCE)
        clock.now += LIMIT
        assert is_late(request)
        assert watch.num_aborted == 1 and len(stop.layers) == 4
        handle.remove()
        assert one(llm, LONG, **SETTINGS) == expected
        wait_for(lambda: is_clean(llm))


def test_in_time(folder: Path, clock: Clock) -> None:
    with open_llm(folder) as llm, LLM(folder) as unlimited:
        expected = one(unlimited, "the", **SETTINGS)
        for model in (llm, unlimited):
            gate = Gate()
            request = model.submit("the", logits_processor=gate, **SETTINGS)
            assert gate.reached.wait(PATIENCE)
            clock.now += LIMIT - 0.001 if model is llm else 1e9
            gate.open()
            assert request.result(PATIENCE).outputs == [expected]
        # A caller who cancels before the time is over has cancelled.
        gate = Gate()
        request = llm.submit("the", logits_processor=gate, **SETTINGS)
        assert gate.reached.wait(PATIENCE)
        request.cancel()
        clock.now += LIMIT
        gate.open()
        assert request.result(PATIENCE).outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_ending_at_any_time(folder: Path, clock: Clock, engine: dict[str, Any]) -> None:
    """A late request has the beginning of its answer without a limit; others have all of theirs."""
    rng = random.Random(3)
    prompts = [[3], [4, 5, 6], LONG[:40], LONG[:80], [*LONG[:40], 7]]
    with open_llm(folder, max_num_batched_tokens=16, max_num_seqs=3, **engine) as llm:
        alone = [one(llm, prompt, **SETTINGS).token_ids for prompt in prompts]
        num_late = num_whole = 0
        for _ in range(40):
            chosen = rng.choices(range(len(prompts)), k=rng.randint(1, 6))
            asked = []
            for i in chosen:
                asked.append((i, llm.submit(prompts[i], min_tokens=rng.choice([0, 20]), **SETTINGS)))
                clock.now += LIMIT / 4
                threading.Event().wait(rng.choice([0, 0, 0.001]))
            clock.now += rng.choice([0, LIMIT / 2])
            for i, request in asked:
                wait_for(lambda request=request: request.done)  # type: ignore[misc]
                output = request.output().outputs[0]
                assert output.token_ids == alone[i][: len(output.token_ids)]
                assert (output.finish_reason, len(output.token_ids)) == ("length", 40) or is_late(request, None)
                num_whole += output.finish_reason == "length"
                num_late += output.finish_reason == "error"
        assert num_late and num_whole
        wait_for(lambda: is_clean(llm))


def test_several_prompts_of_which_one_is_late(folder: Path, clock: Clock) -> None:
    """The call gives all: what ended before, and of the other what there is."""

    def pass_time(token_ids: Any, logits: Any) -> Any:
        if len(token_ids) == 1 + 4:
            clock.now += LIMIT
        return logits

    short, long = (infinilm.SamplingParams(**{**SETTINGS, "max_tokens": count}) for count in (1, 40))
    with open_llm(folder) as llm:
        alone = one(llm, [4], **SETTINGS)
        first, second = llm.generate([[3], [4]], [short, replace(long, logits_processor=pass_time)], use_tqdm=False)
        assert first.outputs[0].finish_reason == "length"
        late = second.outputs[0]
        assert (late.finish_reason, type(late.error)) == ("error", TimeLimitError)
        assert list(late.token_ids) == list(alone.token_ids[:5]) and alone.text.startswith(late.text)


# ---- the queue alone ----


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 3)),
            st.tuples(st.just("pass"), st.sampled_from([0.0, 1.0, 4.0, 9.99, 10.0])),
            st.tuples(st.just("end"), st.integers(0, 50)),
            st.tuples(st.just("look"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_orders_know_who_is_late(actions: list[tuple[str, Any]]) -> None:
    """Against a list of all works that is gone through at each look."""
    patch = pytest.MonkeyPatch()
    clock = Clock()
    patch.setattr("infinilm.serving.request_queue.time", clock)
    queue, begun, late = RequestQueue(1000, LIMIT), dict[EngineRequest, float](), set[EngineRequest]()

    def works(count: int) -> Iterator[EngineRequest]:
        for _ in range(count):
            made = EngineRequest(SimpleNamespace())  # type: ignore[arg-type]
            begun[made] = clock.now
            yield made

    for action, value in [*actions, ("look", 0)]:
        if action == "put":
            first, *dependents = works(value + 1)
            first.dependents = dependents
            queue.put([first])
        elif action == "pass":
            clock.now += value
        elif action == "end" and begun:
            work = list(begun)[value % len(begun)]
            work.finish_reason = "stop"
            queue.open_requests.discard(work)
            del begun[work]
        else:
            queue.receive()
            queue.open_requests.intersection_update(begun)  # those that ended in the inbox
            queue.cancel_late()
            wanted = {work for work, time in begun.items() if clock.now >= time + LIMIT}
            found = set()
            for work in queue.pop_cancelled(queue.num_cancelled):
                assert isinstance(work.cancelled_by, TimeLimitError)
                work.finish_reason = "error"
                found.add(work)
            late |= found
            assert found == wanted
            for work in found:
                queue.open_requests.discard(work)
                del begun[work]
    patch.undo()
    assert queue.num_open == len(begun)
