"""Cancelled work that runs is ended between layers, when no other request has a part in it; no answer changes."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinilm import LLM, HookRegistry, _core
from llm import tiny
from llm.support import PATIENCE, idle, one, wait_for

NUM_LAYERS = 8
LONG = [1 + i % 200 for i in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("abort") / "tiny", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilm.serving.engine_thread._LOOK_EVERY_SECONDS", 0.001)


class Watch:
    """Stands between the engine thread and the engine: sees what is aborted."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.llm = llm._engine, llm
        self.asked = threading.Event()  # to abort
        self.num_steps = self.num_aborted = 0
        llm._thread._engine = self  # type: ignore[assignment]

    def submit(self, batch: _core.Batch, late_masks: bool) -> Any:
        watch, pending = self, self.engine.submit(batch, late_masks)
        self.num_steps += 1

        class Pending:
            def wait(self, seconds: float) -> bool:
                return pending.wait(seconds)

            def abort(self) -> None:
                pending.abort()
                watch.asked.set()

            def result(self) -> _core.StepOutput:
                output = pending.result()
                watch.num_aborted += output.aborted
                return output

        return Pending()

    def close(self) -> None:
        self.engine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Stop:
    """A hook that counts layers, and holds a step with several tokens at the end of one until it is told to go on."""

    def __init__(self, at: int, go_on: threading.Event) -> None:
        self.at, self.go_on = at, go_on
        self.reached = threading.Event()
        self.layers: list[int] = []

    def __call__(self, name: str, tensor: _core.Tensor, layer: int) -> None:
        self.layers.append(layer)
        if layer == self.at and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(PATIENCE)


@pytest.fixture(params=[1, 2], ids="tp{}".format)
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings = {"tensor_parallel_size": request.param, "hooks": HookRegistry(), "use_tqdm": False}
    with LLM(folder, device="cpu", speculation="off", **settings) as made:  # drafts would follow the clock
        yield made


@pytest.fixture
def registry(llm: LLM) -> HookRegistry:
    found = llm._thread._hooks.registry
    assert found is not None
    return found


def test_a_cancelled_prompt_ends_between_layers(llm: LLM, registry: HookRegistry) -> None:
    expected = one(llm, LONG, max_tokens=4, temperature=0, ignore_eos=True).token_ids
    llm._thread.reset_prefix_cache()
    watch = Watch(llm)
    stop = Stop(3, watch.asked)
    handle = registry.register_hook("layer?_residual", stop)
    request = llm.submit(LONG, max_tokens=4, temperature=0, ignore_eos=True)
    assert stop.reached.wait(PATIENCE)
    request.cancel()
    wait_for(lambda: idle(llm))
    assert request.result().outputs[0].finish_reason == "abort"
    assert stop.layers == [0, 1, 2, 3] and (watch.num_steps, watch.num_aborted) == (1, 1)
    handle.remove()
    # Nothing of it is found again.
    output = llm.generate(LONG, max_tokens=4, temperature=0, ignore_eos=True, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected
    assert watch.num_steps == 1 + 4
    assert llm._thread.scheduler.stats.num_used_blocks == 0


def test_what_was_cached_before_stays(llm: LLM, registry: HookRegistry) -> None:
    """A step that is aborted costs other requests nothing: prefixes computed before are still found."""
    watch = Watch(llm)
    stop = Stop(-1, watch.asked)  # nowhere yet; other hooks would forget the prefixes
    registry.register_hook("layer?_residual", stop)
    one(llm, LONG[:64], max_tokens=1)
    known = set(llm._thread.scheduler.blocks._keys)
    assert len(known) == 4
    stop.at = 2
    request = llm.submit([*LONG[:64], *LONG[:30]], max_tokens=4)
    assert stop.reached.wait(PATIENCE)
    request.cancel()
    wait_for(lambda: idle(llm))
    assert watch.num_aborted == 1
    assert set(llm._thread.scheduler.blocks._keys) == known
    again = llm.generate([*LONG[:64], 1], max_tokens=1, use_tqdm=False)[0]
    assert again.metrics is not None and again.metrics.cached_tokens == 64


def test_a_step_for_others_too_goes_on(llm: LLM, registry: HookRegistry) -> None:
    expected = one(llm, [7, 8, 9], max_tokens=12, temperature=0, ignore_eos=True).token_ids
    watch, go_on = Watch(llm), threading.Event()
    stop = Stop(3, go_on)
    with llm._thread._stepping:  # both come into the same step
        cancelled = llm.submit(LONG, max_tokens=4)
        kept = llm.submit([7, 8, 9], max_tokens=12, temperature=0, ignore_eos=True)
        handle = registry.register_hook("layer?_residual", stop)
    assert stop.reached.wait(PATIENCE)
    cancelled.cancel()
    assert not watch.asked.wait(0.1)  # a hundred looks
    go_on.set()
    assert kept.result().outputs[0].token_ids == expected
    assert watch.num_aborted == 0
    handle.remove()


@pytest.mark.parametrize("ahead", [0.0, 1e9], ids=["one by one", "ahead"])
def test_cancelling_at_any_time(folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """A request that is not cancelled gets the tokens that it has alone, with company, prefixes and short steps."""
    monkeypatch.setattr("infinilm.serving.engine_thread._AHEAD_BELOW_SECONDS", ahead)
    monkeypatch.setattr("infinilm.serving.engine_thread._LOOK_EVERY_SECONDS", 0.0)
    rng = random.Random(int(ahead > 0))
    settings: dict[str, Any] = {"device": "cpu", "use_tqdm": False, "max_num_batched_tokens": 64}
    prompts = [LONG[:n] + tail for n in (16, 40, 80) for tail in ([3], [4, 5, 6], LONG[::-1][:20])]
    with LLM(folder, **settings) as llm:
        alone = [one(llm, p, max_tokens=6, temperature=0, ignore_eos=True).token_ids for p in prompts]
    with LLM(folder, **settings) as llm:
        watch = Watch(llm)
        for turn in itertools.count():  # some step is aborted sooner or later; on a busy machine it may be later
            if turn >= 400 and (watch.num_aborted or turn >= 100_000):
                break
            chosen = rng.sample(range(len(prompts)), rng.choice([1, 1, 1, 2, 3]))
            requests = [llm.submit(prompts[i], max_tokens=6, temperature=0, ignore_eos=True) for i in chosen]
            threading.Event().wait(rng.choice([0, 0, 0.0005, 0.001, 0.003]))
            kept = rng.random() < 0.5
            for request in requests[kept:]:
                request.cancel()
            if kept:
                assert requests[0].result(PATIENCE).outputs[0].token_ids == alone[chosen[0]]
            if rng.random() < 0.05:
                llm._thread.reset_prefix_cache()
        assert watch.num_aborted > 0
        for prompt, expected in zip(prompts, alone, strict=True):
            assert one(llm, prompt, max_tokens=6, temperature=0, ignore_eos=True).token_ids == expected
        wait_for(lambda: idle(llm))
        assert llm._thread.scheduler.stats.num_used_blocks == 0
