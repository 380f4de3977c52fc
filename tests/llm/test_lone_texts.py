"""A short text of an encoder is computed by the thread of its caller, where nothing else is to be respected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import make_encoder

from infinilm import LLM, EngineDeadError, HookRegistry, RequestError
from infinilm.requests.limits import RequestLimits
from infinilm.serving.turns import Turns
from llm.support import PATIENCE

SHORT, LONG = list(range(1, 17)), list(range(1, 18))


@pytest.fixture(autouse=True)
def texts_of_16_tokens_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilm.scheduling.lone_text.MOST_TOKENS", len(SHORT))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("lone") / "bert", "bert")


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, use_tqdm=False, **{"dtype": "float32", **settings})


@pytest.fixture
def llm(bert: Path) -> Iterator[LLM]:
    with open_llm(bert) as made:
        yield made


def is_queued(llm: LLM, embed: Callable[[], object]) -> bool:
    """Whether a call gives its text to the engine thread, which begins with the first."""
    assert llm._thread._thread is None
    embed()
    return llm._thread._thread is not None


def test_it_needs_no_thread_of_the_engine(llm: LLM) -> None:
    assert not is_queued(llm, lambda: llm.embed(SHORT))
    assert is_queued(llm, lambda: llm.embed(LONG))
    metrics = llm.metrics()
    assert (metrics.num_finished, metrics.num_steps, metrics.num_prompt_tokens) == (2, 2, 33)
    assert metrics.prompt_tps is not None and metrics.prompt_tps > 0 and metrics.output_tps == 0


@pytest.mark.parametrize("name", ["bert", "modern-bert", "embedding-gemma", "mpnet", "jina-v2"])
def test_its_bits_are_those_of_the_queue(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several lengths have them, with types of tokens where there are some; others use the same blocks."""
    monkeypatch.setattr("infinilm.scheduling.lone_text.MOST_TOKENS", 64)
    with open_llm(make_encoder(tmp_path / name, name)) as llm:
        has_types = bool(llm.config.type_vocab_size)
        for count in (1, 2, 15, 16, 17, 33, 64):
            prompt: Any = {"prompt_token_ids": [3 + i * 7 % 50 for i in range(count)]}
            if has_types:
                prompt["token_type_ids"] = [i % 2 for i in range(count)]
            alone = llm.embed(prompt)
            np.testing.assert_array_equal(asyncio.run(llm.aembed(prompt)), alone)
            np.testing.assert_array_equal(llm.embed([LONG, prompt])[1:], alone)


def test_labels(tmp_path: Path) -> None:
    with open_llm(make_encoder(tmp_path / "labels", "bert-labels")) as llm:
        assert not is_queued(llm, lambda: llm.classify(SHORT))
        (alone,), beside = llm.classify(SHORT), llm.classify([SHORT, LONG])
        assert beside[0].scores == alone.scores


def test_what_only_steps_of_the_queue_respect(bert: Path) -> None:
    hooks = HookRegistry()
    seen: list[str] = []
    hooks.register_hook("final_norm", lambda *_: seen.append("rows"))
    with open_llm(bert, hooks=hooks) as llm:
        assert is_queued(llm, lambda: llm.embed(SHORT)) and seen
    with open_llm(bert, limits=RequestLimits(max_seconds=PATIENCE)) as llm:
        assert is_queued(llm, lambda: llm.embed(SHORT))
    with open_llm(bert) as llm:
        llm.take_turns(Turns())
        assert is_queued(llm, lambda: llm.embed(SHORT))


def test_a_decoder_has_none(folder: Path) -> None:
    with LLM(folder, use_tqdm=False) as llm:
        assert is_queued(llm, lambda: llm.embed([5, 6]))


def test_an_interrupt_leaves_everything_as_it_was(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a step runs is raised when it is done."""
    expected = llm.embed(SHORT)
    core = llm._thread._engine

    class Interrupted:
        def forward(self, batch: Any) -> Any:
            core.forward(batch)
            raise KeyboardInterrupt

    monkeypatch.setattr(llm._thread, "_engine", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        llm.embed(SHORT)
    monkeypatch.undo()
    np.testing.assert_array_equal(llm.embed(SHORT), expected)
    np.testing.assert_array_equal(asyncio.run(llm.aembed(SHORT)), expected)


def test_an_engine_that_dies_is_dead_for_all(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def forward(self, batch: Any) -> Any:
            raise EngineDeadError("a rank failed")

        def close(self) -> None:
            pass

    core = llm._thread._engine
    monkeypatch.setattr(llm._thread, "_engine", Dying())
    with pytest.raises(EngineDeadError, match="a rank failed"):
        llm.embed(SHORT)
    for prompt in (SHORT, LONG):
        with pytest.raises(EngineDeadError, match="died: a rank failed"):
            llm.embed(prompt)
    core.close()


def test_a_closed_engine_says_so(bert: Path) -> None:
    llm = open_llm(bert)
    llm.embed(SHORT)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.embed(SHORT)


def test_bad_input_is_refused_as_elsewhere(llm: LLM) -> None:
    with pytest.raises(RequestError, match="out of range"):
        llm.embed([1, 10**6])
    with pytest.raises(RequestError, match=r"token_type_ids.*out of range"):
        llm.embed({"prompt_token_ids": [1, 2], "token_type_ids": [0, 9]})


def test_calls_of_many_threads(llm: LLM) -> None:
    """Some pass the queue, others find it busy; none waits for ever, and no bit depends on it."""
    prompts: list[Any] = [[1 + (i + j) % 90 for j in range(1 + 11 * i % 32)] for i in range(24)]
    expected = llm.embed(prompts)
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        start.wait(PATIENCE)
        for i in range(thread, thread + 24):
            np.testing.assert_array_equal(llm.embed(prompts[i % 24])[0], expected[i % 24])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, thread) for thread in range(8)]:
            done.result(PATIENCE)
    assert llm.metrics().num_running == llm.metrics().num_waiting == 0
