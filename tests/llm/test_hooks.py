"""Hooks of an `LLM`: what they see and change, whom a failing one harms, and what they must not do."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infinilm
from infinilm import LLM, HookRegistry
from llm.support import PATIENCE, idle, one, wait_for

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def shift_logits(name: str, tensor: Any, layer: int) -> Any:
    """Token 7, always."""
    logits = np.array(tensor.numpy())
    logits[:, 7] = 1000
    return logits


def test_hooks_see_every_token_once(folder: Path, llm: LLM) -> None:
    registry = HookRegistry()
    seen: list[tuple[str, int, int]] = []
    registry.register_hook("layer0_input_layernorm", lambda name, x, layer: seen.append((name, layer, x.shape[0])))
    with LLM(folder, hooks=registry, max_num_batched_tokens=8, max_num_seqs=4) as model:
        prompt = list(range(3, 23))
        got = one(model, prompt, **SETTINGS)
        assert [n for _, _, n in seen] == [8, 8, 4] + [1] * 7, "the last token is not computed"
        assert set(seen) <= {("layer0_input_layernorm", 0, n) for n in (1, 4, 8)}
        assert got == one(llm, prompt, **SETTINGS)


def test_hooks_come_and_go(folder: Path, llm: LLM) -> None:
    """Between two requests too, which share no prefix then: its keys were made under other hooks."""
    prompt = list(range(3, 43))
    plain = one(llm, prompt, **SETTINGS).token_ids
    registry = HookRegistry()
    with LLM(folder, hooks=registry) as model:

        def run() -> tuple[list[int], int]:
            output = model.generate(prompt, use_tqdm=False, **SETTINGS)[0]
            assert output.metrics is not None
            return list(output.outputs[0].token_ids), output.metrics.cached_tokens

        assert run() == (list(plain), 0)
        assert run() == (list(plain), 32)
        handle = registry.register_hook("logits", shift_logits)
        assert run() == ([7] * 8, 0)
        assert run() == ([7] * 8, 32)
        handle.remove()
        assert run() == (list(plain), 0)
        registry.register_hook("layer1_v_proj", lambda name, x, layer: np.zeros(x.shape, np.float32))
        changed, cached = run()
        assert (changed != list(plain), cached) == (True, 0)
        registry.clear()
        assert run() == (list(plain), 0)


def test_a_hook_that_raises_fails_the_requests_of_its_step(folder: Path) -> None:
    registry = HookRegistry()

    def fail(name: str, tensor: Any, layer: int) -> None:
        raise ValueError("on purpose")

    with LLM(folder, hooks=registry, tensor_parallel_size=1) as model:
        expected = one(model, "the", **SETTINGS)
        handle = registry.register_hook("layer1_q_proj", fail)
        with pytest.raises(ValueError, match="on purpose"):
            model.generate("the", **SETTINGS)
        outputs = model.submit("the", **SETTINGS)
        with pytest.raises(ValueError, match="on purpose"):
            outputs.result(PATIENCE)
        handle.remove()
        assert one(model, "the", **SETTINGS) == expected
        assert idle(model)
        assert model.metrics().num_used_blocks == 0


def test_a_hook_cannot_call_its_engine(folder: Path) -> None:
    registry = HookRegistry()
    errors: list[str] = []
    with LLM(folder, hooks=registry) as model:
        calls = (
            lambda: model.generate("the"),
            lambda: model.submit("the"),
            lambda: model.forward([1]),
            lambda: model.reset_cache("1MiB"),
            model.reset_cache,
            model.close,
        )

        def call_all(name: str, tensor: Any, layer: int) -> None:
            for call in calls:
                try:
                    call()
                except infinilm.InfinilmError as error:
                    errors.append(str(error))  # itself, with its traceback, would keep the tensor

        registry.register_hook("embedding", call_all)
        expected = one(model, "the", temperature=0, max_tokens=1)
        assert len(errors) == len(calls)
        assert all("a hook cannot call the engine" in error for error in errors)
        registry.clear()
        assert one(model, "the", temperature=0, max_tokens=1) == expected


def test_registering_while_requests_run(folder: Path, llm: LLM) -> None:
    registry = HookRegistry()
    stop = threading.Event()
    calls: list[int] = []

    def churn() -> None:
        while not stop.is_set():
            handle = registry.register_hook("layer*_residual", lambda name, x, layer: calls.append(layer))
            wait_for(lambda: stop.is_set() or bool(calls))
            handle.remove()

    prompts = [[1, 2, *range(3, 3 + i)] for i in range(12)]
    expected = [one(llm, prompt, **SETTINGS).token_ids for prompt in prompts]
    with LLM(folder, hooks=registry) as model:
        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(5):
                outputs = model.generate(prompts, use_tqdm=False, **SETTINGS)
                assert [output.outputs[0].token_ids for output in outputs] == expected
        finally:
            stop.set()
            thread.join()
    assert calls


def test_hooks_that_refer_to_the_model_do_not_keep_it(folder: Path) -> None:
    registry = HookRegistry()
    model = LLM(folder, hooks=registry)
    registry.register_hook("embedding", lambda name, x, layer, keep=model: None)
    model.generate("the", use_tqdm=False, **SETTINGS)
    gone = weakref.ref(model)
    del model, registry
    gc.collect()
    assert gone() is None


def test_bad_hooks(folder: Path) -> None:
    with pytest.raises(TypeError, match="hooks: expected a HookRegistry"):
        LLM(folder, hooks=[print])  # type: ignore[arg-type]
    registry = HookRegistry()
    registry.register_hook("layer99_q_proj", print)
    with pytest.raises(infinilm.ConfigError, match="layer99_q_proj"):
        LLM(folder, hooks=registry)
    registry.clear()
    with LLM(folder, hooks=registry), pytest.raises(infinilm.ConfigError, match="layer99_q_proj"):
        registry.register_hook("layer99_q_proj", print)
