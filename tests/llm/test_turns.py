"""Turns: shares of the time in a world with a clock of its own, and bits of results with real engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from encoders import make_encoder
from hypothesis import given, settings, strategies as st

from infinilm import LLM, InfinilmError
from infinilm.scheduling.sequence import Lane
from infinilm.serving.turns import Turn, Turns

pytestmark = pytest.mark.one_rank  # models take turns before a step begins, whatever it runs on

SLICE = 0.004
SECONDS = 120  # for anything to happen


@dataclass
class World:
    """Engines that take turns; time passes while one of them computes, and nowhere else."""

    now: float = 0.0
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(lambda: self.now)


@dataclass
class Engine:
    """Computes steps of a known length, as long as it has work; `used`: seconds by lane."""

    world: World
    steps: dict[Lane, float]
    turn: Turn = field(init=False)
    used: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.turn = self.world.turns.join()

    def run(self) -> bool:
        """A step, if it is this engine's turn."""
        lane = self.turn.take([lane for lane in Lane if lane in self.steps], 0)
        if lane is None:
            return False
        self.world.now += self.steps[lane]
        self.used[lane] += self.steps[lane]
        return True


def run_once(engines: Sequence[Engine]) -> None:
    """All of them ask; where none computes, one has given the turn on, which another one takes in the next round."""
    assert any(sum([engine.run() for engine in engines]) for _ in range(2)), "there is work, and no engine computes"


def run_until(world: World, engines: Sequence[Engine], end: float) -> None:
    while world.now < end:
        run_once(engines)


seconds = st.floats(1e-4, 0.05)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(seconds, min_size=2, max_size=4))
def test_answers_of_several_models_share_alike(steps: list[float]) -> None:
    world = World()
    engines = [Engine(world, {Lane.INTERACTIVE: step}) for step in steps]
    run_until(world, engines, 10.0)
    used = [engine.used[Lane.INTERACTIVE] for engine in engines]
    assert max(used) - min(used) <= 2 * (max(steps) + SLICE), used


@settings(max_examples=60, deadline=None)
@given(answers=seconds, bulk=seconds)
def test_bulk_work_has_an_eighth_of_what_answers_have(answers: float, bulk: float) -> None:
    world = World()
    chat, embedder = Engine(world, {Lane.INTERACTIVE: answers}), Engine(world, {Lane.BULK: bulk})
    run_until(world, [chat, embedder], 20.0)
    gap = chat.used[Lane.INTERACTIVE] - 8 * embedder.used[Lane.BULK]
    assert abs(gap) <= 2 * (8 * (bulk + SLICE) + answers + SLICE), gap


@settings(max_examples=60, deadline=None)
@given(answers=seconds, bulk=seconds, before=st.floats(0.5, 2.0))
def test_a_query_is_next(answers: float, bulk: float, before: float) -> None:
    """It waits for the slice that runs, and no longer, whatever its model has computed of bulk work before."""
    world = World()
    chat, embedder = Engine(world, {Lane.INTERACTIVE: answers}), Engine(world, {Lane.BULK: bulk})
    run_until(world, [chat, embedder], before)
    embedder.steps = {Lane.BULK: bulk, Lane.INTERACTIVE: 0.001}
    came = world.now
    while not embedder.used[Lane.INTERACTIVE]:
        run_once([embedder, chat])
    assert world.now - came <= max(answers, bulk) + SLICE + max(answers, bulk) + 0.001 + 1e-9


def test_what_was_idle_has_saved_up_nothing() -> None:
    world = World()
    busy, idle = Engine(world, {Lane.INTERACTIVE: 0.01}), Engine(world, {Lane.INTERACTIVE: 0.01})
    run_until(world, [busy], 100.0)
    run_until(world, [idle, busy], 101.0)
    assert 0.4 < idle.used[Lane.INTERACTIVE] < 0.6
    busy.turn.leave()
    run_until(world, [idle], 102.0)  # the turn was given back
    assert idle.used[Lane.INTERACTIVE] > 1.3


def test_steps_are_short_while_others_wait() -> None:
    world = World()
    chat, other = Engine(world, {Lane.INTERACTIVE: 0.01}), Engine(world, {Lane.BULK: 0.01})
    assert chat.turn.max_prompt_tokens(Lane.INTERACTIVE) is None
    assert chat.turn.max_prompt_tokens(Lane.BULK) == 64  # nothing was measured yet
    chat.turn.observe(1000, 0.016)
    assert chat.turn.max_prompt_tokens(Lane.BULK) == 1000
    assert other.run()
    assert chat.turn.max_prompt_tokens(Lane.INTERACTIVE) == 1000
    other.turn.take((), 0)
    world.now += 2
    assert chat.turn.max_prompt_tokens(Lane.INTERACTIVE) is None
    other.turn.leave()
    assert chat.run() and chat.turn.max_prompt_tokens(Lane.INTERACTIVE) is None


def test_short_steps_tell_less_of_a_token_than_long_ones() -> None:
    """A query takes long for its few tokens; passages beside it are not to be cut into small steps for that."""
    turn = World().turns.join()
    assert not turn.is_long(10**6, 0)  # nothing was measured yet
    for _ in range(8):
        turn.observe(1000, 0.016)
        turn.observe(10, 0.004)
    assert 600 < (turn.max_prompt_tokens(Lane.BULK) or 0) < 1000
    assert turn.is_long(2000, 0.001) and not turn.is_long(2000, 0.03) and not turn.is_long(600, 0)


class LazySteps:
    """An engine whose step begins when it is waited for, and where a step of `held` tokens waits to be let go."""

    def __init__(self, engine: Any, held: int) -> None:
        self._engine, self._held = engine, held
        self.waits, self.go = threading.Event(), threading.Event()
        self.steps: list[tuple[int, bool]] = []  # the tokens of each, and whether it was aborted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, batch: Any, has_masks: bool) -> LazyStep:
        return LazyStep(self, lambda: self._engine.submit(batch, has_masks), batch.arrays()["input_ids"].shape[0])

    def hold(self, num_tokens: int, seconds: float) -> bool:
        if num_tokens != self._held:
            return True
        self.waits.set()
        return self.go.wait(seconds)


@dataclass
class LazyStep:
    engine: LazySteps
    submit: Callable[[], Any]
    num_tokens: int
    is_aborted: bool = False

    def wait(self, seconds: float) -> bool:
        return self.engine.hold(self.num_tokens, seconds)

    def abort(self) -> None:
        self.is_aborted = True
        self.engine.go.set()

    def result(self) -> Any:
        self.engine.steps.append((self.num_tokens, self.is_aborted))
        self.engine.go.clear()
        return SimpleNamespace(aborted=True) if self.is_aborted else self.submit().result()


def test_a_query_interrupts_a_long_step_once(tmp_path: Path) -> None:
    """The text is computed again, then to its end whatever comes, and has the same bits."""
    texts, query = [[3] * 40, [4] * 64, *([[5] * 50] * 20)], [[7, 8, 9]]
    with LLM(make_encoder(tmp_path / "bert", "bert"), use_tqdm=False, dtype="float32") as llm:
        alone, wanted = llm.embed(texts), llm.embed(query)
        llm.take_turns(Turns())
        turn = llm._thread.turn
        assert turn is not None
        turn.observe(1, 1000.0)  # each step of one text is long now
        engine = llm._thread._engine = LazySteps(llm._thread._engine, 64)  # type: ignore[assignment]
        with ThreadPoolExecutor(1) as pool:
            bulk = pool.submit(llm.embed, texts)
            assert engine.waits.wait(SECONDS)
            assert np.array_equal(llm.embed(query), wanted)  # it comes before the step that it would have waited for
            assert engine.steps[-2:] == [(64, True), (3, False)]
            engine.waits.clear()
            assert engine.waits.wait(SECONDS)
            with ThreadPoolExecutor(1) as other:
                num_waiting = llm.metrics().num_waiting
                late = other.submit(llm.embed, query)
                while llm.metrics().num_waiting == num_waiting:  # until it is put in
                    assert not late.done()
                engine.go.set()
                assert np.array_equal(late.result(), wanted)
            assert np.array_equal(bulk.result(), alone)
        assert [step for step in engine.steps if step[0] == 64] == [(64, True), (64, False)]
        assert llm.metrics().num_preemptions == 1


def test_a_step_that_a_query_aborted_is_taken_back_before_other_work(tmp_path: Path) -> None:
    """Work between two steps, such as other weights, waits for the step in flight, which a query may have aborted."""
    texts = [[3] * 40, [4] * 64, *([[5] * 50] * 20)]
    with (
        LLM(make_encoder(tmp_path / "bert", "bert"), use_tqdm=False, dtype="float32") as llm,
        ThreadPoolExecutor(1) as pool,
    ):
        alone = llm.embed(texts)
        llm.take_turns(Turns())
        thread = llm._thread
        works: list[Future[list[tuple[int, bool]]]] = []
        assert thread.turn is not None
        thread.turn.observe(1, 1000.0)  # a step of one text each

        class AbortedSteps(LazySteps):
            """The first step of 64 tokens is aborted, and work comes, as soon as the step is in flight."""

            def submit(self, batch: Any, has_masks: bool) -> LazyStep:
                step = super().submit(batch, has_masks)
                if step.num_tokens == 64 and not works:
                    works.append(pool.submit(thread.between_steps, lambda: list(self.steps)))
                    while not thread._work:
                        assert not works[0].done()
                    step.abort()
                return step

        engine = thread._engine = AbortedSteps(thread._engine, 0)  # type: ignore[assignment]
        assert np.array_equal(llm.embed(texts), alone)
        assert works[0].result(SECONDS)[-1] == (64, True)
        assert [step for step in engine.steps if step[0] == 64] == [(64, True), (64, False)]


def test_nothing_depends_on_turns() -> None:
    """Answers, vectors and scores of models that share the time have the bits that each has alone."""
    texts = [[7 * i % 250 + 1, *range(1, 60 + i)] for i in range(24)]
    turns = Turns()
    with LLM("demo", use_tqdm=False, seed=0) as one, LLM("demo", use_tqdm=False, seed=0) as other:
        alone = [o.text for o in one.generate(["Once", "The fox"] * 4, max_tokens=60, seed=3, use_tqdm=False)]
        vectors = other.embed(texts, use_tqdm=False)
        query = other.embed([[5, 6, 7]], use_tqdm=False)
        for llm in (one, other):
            llm.take_turns(turns)
        found: dict[str, object] = {}

        def write() -> None:
            outputs = one.generate(["Once", "The fox"] * 4, max_tokens=60, seed=3, use_tqdm=False)
            found["answers"] = [output.text for output in outputs]

        def embed() -> None:
            found["vectors"] = other.embed(texts, use_tqdm=False)

        threads = [threading.Thread(target=work) for work in (write, embed)]
        for thread in threads:
            thread.start()
        assert np.array_equal(other.embed([[5, 6, 7]], use_tqdm=False), query)
        assert other.generate("Once", max_tokens=5, temperature=0, use_tqdm=False)[0].text  # beside bulk work
        for thread in threads:
            thread.join()
        assert found["answers"] == alone
        assert np.array_equal(np.asarray(found["vectors"]), vectors)


def test_the_end_of_a_model_gives_the_turn_back() -> None:
    """One that is closed in the middle of an answer holds up no other. A model with requests joins no turns."""
    turns = Turns()
    one, other = LLM("demo", use_tqdm=False), LLM("demo", use_tqdm=False)
    with one, other:
        for llm in (one, other):
            llm.take_turns(turns)
        running = one.submit("Once", max_tokens=400, ignore_eos=True)
        next(iter(running))
        with pytest.raises(InfinilmError, match="busy"):
            one.take_turns(turns)
        one.close()
        with pytest.raises(InfinilmError):
            running.result()
        assert other.generate("Once", max_tokens=3, use_tqdm=False)[0].text


def test_cancelled_while_another_model_computes() -> None:
    turns = Turns()

    async def main(one: LLM, other: LLM) -> None:
        async with one.asubmit("Once", max_tokens=300, ignore_eos=True) as running:
            task = asyncio.ensure_future(other.aembed([[5] * 100] * 50))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await running.wait()
        assert (await other.aembed([[5] * 10])).shape[0] == 1

    with LLM("demo", use_tqdm=False) as one, LLM("demo", use_tqdm=False) as other:
        for llm in (one, other):
            llm.take_turns(turns)
        asyncio.run(main(one, other))
