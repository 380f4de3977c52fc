"""Steps made one ahead: only the time tells them from others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import infinilm
from infinilm import LLM, SamplingParams, _core
from llm import tiny
from llm.support import PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("ahead") / "tiny")


def set_ahead(patch: pytest.MonkeyPatch, ahead: bool) -> None:
    patch.setattr("infinilm.serving.engine_thread._AHEAD_BELOW_SECONDS", 1e9 if ahead else 0.0)


class Recorder:
    """Stands between the engine thread and the engine; counts steps and those made ahead, and may fail one."""

    def __init__(self, engine: _core.InferEngine, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.engine, self.fail_at, self.error = engine, fail_at, error
        self.num_open = 0
        self.num_steps = 0
        self.num_ahead = 0
        self.on_submit: Callable[[int], object] = lambda step: None

    def submit(self, batch: _core.Batch, late_masks: bool) -> Any:
        self.num_ahead += self.num_open > 0
        self.num_open += 1
        self.num_steps += 1
        self.on_submit(self.num_steps)
        recorder, number, pending = self, self.num_steps, self.engine.submit(batch, late_masks)

        class Pending:
            def wait(self, seconds: float) -> bool:
                return pending.wait(seconds)

            def give_masks(self) -> None:
                pending.give_masks()

            def abort(self) -> None:
                pending.abort()

            def result(self) -> _core.StepOutput:
                recorder.num_open -= 1
                output = pending.result()
                if number == recorder.fail_at:
                    assert recorder.error is not None
                    raise recorder.error
                return output

        return Pending()

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Recorder]]:
    def wrap(model: LLM, **more: Any) -> Recorder:
        recorder = Recorder(model._engine, **more)
        monkeypatch.setattr(model._thread, "_engine", recorder)
        return recorder

    yield wrap


def answers(model: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    outputs = model.generate(prompts, params, use_tqdm=False)
    return [(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs]


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[1 + i, *range(20 + i % 3)] for i in range(12)]
    kinds: Iterator[dict[str, Any]] = itertools.cycle(
        [
            {},
            {"temperature": 1.0, "seed": 5},
            {"logprobs": 2},
            {"stop_token_ids": (7, 12, 99), "temperature": 1.5, "seed": 3},
            {"n": 2, "temperature": 1.0, "seed": 1},
            {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
            {"logit_bias": {3: 2.0, 8: -1.5}, "presence_penalty": 0.6, "stop_token_ids": (9,)},
        ]
    )
    return prompts, [SamplingParams(**({"temperature": 0.0, "max_tokens": 25} | next(kinds))) for _ in prompts]


@pytest.mark.parametrize("kv_cache", [None, 10])
def test_answers_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., Recorder], kv_cache: int | None
) -> None:
    prompts, params = make_requests()
    block_bytes = 16 * 2 * 2 * (2 * 8) * 4  # 16 tokens; K and V of 2 layers, 2 heads of 8, float32
    budget = None if kv_cache is None else kv_cache * block_bytes
    results = []
    for ahead in (False, True):
        set_ahead(monkeypatch, ahead)
        with LLM(folder, speculation="off", kv_cache=budget, max_num_batched_tokens=32, use_tqdm=False) as model:
            recorder = record(model)
            results.append(answers(model, prompts, params))
            assert (recorder.num_ahead > 20) == ahead
            assert (model.metrics().num_preemptions > 0) == (kv_cache is not None)
            assert model.metrics().num_used_blocks == 0
    assert results[0] == results[1]
    assert {reason for *_, reason, _ in results[0]} >= {"stop", "length"}


def test_a_token_drawn_on_the_host_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., Recorder]
) -> None:
    set_ahead(monkeypatch, True)
    with LLM(folder, speculation="off", use_tqdm=False) as model:
        settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "use_tqdm": False}
        recorder = record(model)
        host: dict[str, Any] = {"logits_processor": lambda token_ids, logits: logits}
        model.generate([1, 2, 3], **host, **settings)
        assert recorder.num_ahead == 0
        changed: dict[str, Any] = {"logit_bias": {9: 1.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
        biased = model.generate([1, 2, 3], **changed, **settings)  # which the device counts
        assert recorder.num_ahead > 10
        drawn = model.generate([1, 2, 3], **changed, **host, **settings)
        assert drawn[0].outputs[0].token_ids == biased[0].outputs[0].token_ids
        masks: list[dict[str, Any]] = [{"min_tokens": 10}, {"allowed_token_ids": list(range(1, 30)), "min_tokens": 5}]
        for mask in masks:  # which are applied where the model runs
            before = recorder.num_ahead
            masked = model.generate([1, 2, 3], **mask, **settings)
            assert recorder.num_ahead - before > 10
            drawn = model.generate([1, 2, 3], **host, **mask, **settings)  # the same on the host
            assert drawn[0].outputs[0].token_ids == masked[0].outputs[0].token_ids
        together = model.generate([[1, 2, 3], [4]], [SamplingParams(**changed), SamplingParams()], **settings)
        assert together[0].outputs == biased[0].outputs


def test_no_step_is_made_for_a_sequence_at_its_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., Recorder]
) -> None:
    set_ahead(monkeypatch, True)
    with LLM(folder, speculation="off", use_tqdm=False) as model:
        recorder = record(model)
        model.generate([1, 2, 3], temperature=0, max_tokens=10, ignore_eos=True, use_tqdm=False)
        assert recorder.num_steps == 10
        model.generate([[5, 6], [7, 8, 9]], temperature=0, max_tokens=10, ignore_eos=True, use_tqdm=False)
        assert recorder.num_steps == 20


@pytest.mark.parametrize("fail_at", [1, 2, 4, 9])
def test_a_failed_step_does_not_touch_those_in_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., Recorder], fail_at: int
) -> None:
    """A request that comes with the step after the failed one shares the prefix that the failed one computed."""
    set_ahead(monkeypatch, True)
    prompt = list(range(40))
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    with LLM(folder, speculation="off", use_tqdm=False) as model:
        expected = model.generate(prompt, use_tqdm=False, **settings)[0].outputs
        model._thread.scheduler.reset_prefix_cache()
        recorder = record(model, fail_at=fail_at, error=RuntimeError("on purpose"))
        late: list[infinilm.Request] = []

        def arrive(step: int) -> None:
            if step == fail_at:  # taken up with the next step
                caller = threading.Thread(target=lambda: late.append(model.submit(prompt, **settings)))
                caller.start()
                caller.join()

        recorder.on_submit = arrive
        with pytest.raises(RuntimeError, match="on purpose"):
            model.submit(prompt, **settings).result(PATIENCE)
        assert late[0].result(PATIENCE).outputs == expected
        assert recorder.num_steps > fail_at
        assert model.generate(prompt, use_tqdm=False, **settings)[0].outputs == expected
        assert model.metrics().num_used_blocks == 0


def test_the_row_before_is_checked(folder: Path) -> None:
    """What the engine makes of `previous_rows` that point nowhere."""
    import numpy as np

    with LLM(folder, speculation="off", use_tqdm=False) as model:

        def batch(rows: list[int]) -> _core.Batch:
            count = len(rows)
            return _core.Batch(
                input_ids=np.full(count, 3, np.int32),
                positions=np.zeros(count, np.int32),
                slot_mapping=np.arange(count, dtype=np.int64) * 16,
                block_table=np.arange(count, dtype=np.int32)[:, None],
                cu_seqlens_q=np.arange(count + 1, dtype=np.int32),
                context_lens=np.ones(count, np.int32),
                logits_rows=np.arange(count, dtype=np.int32),
                temperature=np.zeros(count, np.float32),
                top_k=np.zeros(count, np.int32),
                top_p=np.ones(count, np.float32),
                min_p=np.zeros(count, np.float32),
                random_val=np.zeros(count, np.float32),
                previous_rows=np.array(rows, np.int32),
            )

        def run(rows: list[int]) -> list[int]:
            output = model._engine.forward(batch(rows))
            assert output.ids is not None
            return output.ids.numpy().tolist()

        first = run([-1, -1])
        follow = run([1, -1])
        assert follow[1] == first[1]  # of token 3 again
        with pytest.raises(infinilm.InfinilmError, match=r"previous_rows\[1\] is 2, but the step before sampled 2"):
            run([0, 2])
        run([5])  # after a failure any token will do
        pending = model._engine.submit(batch([0]))
        pending.result()
        with pytest.raises(infinilm.InfinilmError, match="taken already"):
            pending.result()
