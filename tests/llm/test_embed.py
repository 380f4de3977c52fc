"""LLM.embed: held against the reference model, alone, beside other requests, and under hooks."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilm import LLM, HookRegistry, ReferenceModel, RequestError
from llm.support import PATIENCE, one, run_program, wait_for

PROMPTS: list[Any] = ["the", "Once upon a time there was", list(range(3, 60)), [5]]
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceModel:
    return ReferenceModel.from_pretrained(folder, dtype="float64")


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_is_the_reference(llm: LLM, reference: ReferenceModel, pooling: str) -> None:
    got = llm.embed(PROMPTS, pooling)
    assert got.shape == (len(PROMPTS), llm.config.hidden_size) and got.dtype == np.float32
    for prompt, vector in zip(PROMPTS, got, strict=True):
        ids = llm.tokenize(prompt) if isinstance(prompt, str) else prompt
        seen: dict[str, Any] = {}
        reference.forward(ids, tap=lambda name, _, x, seen=seen: seen.update({name: x}))
        hidden = seen["final_norm"]
        expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, rtol=1e-6)


def test_the_bar_counts_texts(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts of a list, of which the number is known, and none where no bar is wanted."""
    monkeypatch.setattr("infinilm.progress.can_show", lambda: True)
    llm.embed(PROMPTS)
    told = capsys.readouterr().err
    assert "embedding" in told and f"{len(PROMPTS)}/{len(PROMPTS)}" in told
    llm.embed(PROMPTS, use_tqdm=False)
    assert not capsys.readouterr().err


def test_texts_of_a_generator_are_not_kept(llm: LLM) -> None:
    """Millions of texts need memory for their vectors, and not for themselves."""
    texts = (f"{i} " + "the " * 5000 for i in range(100))  # 2 MB together
    tracemalloc.start()
    try:
        assert len(llm.embed(texts, truncate=8)) == 100
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_vectors_are_arrays_that_other_libraries_take(llm: LLM) -> None:
    vectors = llm.embed(["the", "a fox"])
    assert vectors.dtype == np.float32 and vectors.flags.c_contiguous
    assert np.shares_memory(np.from_dlpack(vectors), vectors)  # such as torch.from_dlpack


def test_of_no_prompts(llm: LLM) -> None:
    """As generate and score, whose lists are empty."""
    assert llm.embed([]).shape == asyncio.run(llm.aembed([])).shape == (0, llm.config.hidden_size)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_aembed_is_embed(llm: LLM, pooling: str) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*(llm.aembed(prompt, pooling) for prompt in PROMPTS))

    np.testing.assert_array_equal(np.concatenate(asyncio.run(main())), llm.embed(PROMPTS, pooling))
    with pytest.raises(RequestError, match="pooling:"):
        asyncio.run(llm.aembed("the", "median"))


def test_a_cancelled_aembed_is_not_computed(llm: LLM) -> None:
    gate = threading.Event()

    def wait(token_ids: Any, logits: Any) -> Any:
        assert gate.wait(PATIENCE)
        return logits

    async def main() -> None:
        task = asyncio.create_task(llm.aembed(PROMPTS))
        while llm.metrics().num_waiting < len(PROMPTS):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    holder = llm.submit("the", logits_processor=wait, **(SETTINGS | {"max_tokens": 2}))
    try:
        wait_for(lambda: llm.metrics().num_running > 0)  # in a step that is held up, which no request can join
        before = llm.metrics().num_prompt_tokens
        asyncio.run(main())
    finally:
        gate.set()
    holder.result(PATIENCE)
    assert llm.metrics().num_prompt_tokens - before <= len(llm.tokenize("the"))
    wait_for(lambda: llm.metrics().num_waiting == 0)


def test_does_not_depend_on_the_batch(folder: Path, llm: LLM) -> None:
    """Nor on chunks of prompts; and requests that run beside say what they say alone."""
    expected = llm.embed(PROMPTS)
    text = one(llm, "the", **SETTINGS)
    with LLM(folder, max_num_batched_tokens=7, max_num_seqs=3) as model:
        handles = [model.submit("the", **SETTINGS) for _ in range(4)]
        found: list[Any] = [None] * 4
        threads = [
            threading.Thread(target=lambda i=i: found.__setitem__(i, model.embed(PROMPTS))) for i in range(len(found))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for vectors in found:
            np.testing.assert_array_equal(vectors, expected)
        for handle in handles:
            assert handle.result(PATIENCE).outputs[0] == text
        np.testing.assert_array_equal(np.stack([model.embed(prompt)[0] for prompt in PROMPTS]), expected)


BESIDE_MASKS = """
from infinilm import LLM

with LLM({folder!r}) as llm:
    settings = dict(min_tokens=60, max_tokens=60, temperature=0)
    expected = llm.generate([3, 4, 5], use_tqdm=False, **settings)[0].outputs[0].token_ids
    vector = llm.embed([6, 7, 8]).tobytes()
    for _ in range(5):
        running = llm.submit([3, 4, 5], **settings)
        while not running.done:
            assert llm.embed([6, 7, 8]).tobytes() == vector
        assert running.result().outputs[0].token_ids == expected
"""


def test_beside_masks(folder: Path) -> None:
    """A step made ahead has both. In a process of its own, which can be ended where it waits for its masks for ever."""
    run_program(BESIDE_MASKS.format(folder=str(folder)))


def test_under_hooks(folder: Path) -> None:
    """The user's hooks go on, and what they change is embedded."""
    registry = HookRegistry()
    seen: list[int] = []

    def double_first(name: str, tensor: Any, layer: int) -> Any:
        rows = np.array(tensor.numpy())
        seen.append(len(rows))
        rows[:, 0] = 1e6
        return rows

    with LLM(folder, hooks=registry, tensor_parallel_size=1) as model:
        plain = model.embed([3, 4, 5])
        handle = registry.register_hook("final_norm", double_first)
        np.testing.assert_allclose(model.embed([3, 4, 5])[0, 0], 1, rtol=1e-5)
        assert seen == [3]
        handle.remove()
        np.testing.assert_array_equal(model.embed([3, 4, 5]), plain)


def test_bad_input(llm: LLM) -> None:
    for prompts, pooling, message in (
        ("the", "median", "pooling: expected"),
        ([[]], "mean", "empty"),
        ("", "mean", "prompt 0: expected a text that is not empty"),
        (["the", ""], "mean", "prompt 1: expected a text that is not empty"),
        ([list(range(200)) * 3], "mean", "shorten"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.embed(prompts, pooling)
    assert llm.embed("the").shape == (1, llm.config.hidden_size)
