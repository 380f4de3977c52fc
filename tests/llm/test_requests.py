"""The engine thread and what hangs on it: handles, cancelling, failures of one and of all, metrics, exit."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import infinilm
from infinilm import LLM, SamplingParams
from infinilm.text.detokenize import OutputText
from infinilm.text.tokenizer import Tokenizer
from llm import tiny
from llm.support import PATIENCE, engine_threads, wait_for
from llm.tiny import SYSTEM

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


class Gate:
    """A logits processor that waits, from some token on, until it is opened."""

    def __init__(self, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        if len(token_ids) >= self.num_tokens:
            self.reached.set()
            assert self._open.wait(PATIENCE)
        return logits


def broken(token_ids: Any, logits: Any) -> Any:
    raise ValueError("on purpose")


# ---- handles ----


def test_submit(llm: LLM) -> None:
    expected = llm.generate("the", use_tqdm=False, **SETTINGS)[0]
    request = llm.submit("the", **SETTINGS)
    output = request.result(PATIENCE)
    assert (output.outputs, output.prompt, output.finished) == (expected.outputs, "the", True)
    assert output.request_id == request.request_id
    assert request.done
    assert "done" in repr(request)
    for _ in range(2):  # every iteration begins anew
        events = list(request)
        assert [e.token_id for e in events] == list(expected.outputs[0].token_ids)
        assert "".join(e.text for e in events) == expected.outputs[0].text
    request.cancel()  # too late, and harmless
    assert request.result().outputs[0].finish_reason == "length"


def test_submit_takes_one_prompt(llm: LLM) -> None:
    for prompts in (["the", "an"], []):
        with pytest.raises(infinilm.RequestError, match=f"got {len(prompts)}"):
            llm.submit(prompts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling_params"):
        llm.submit("the", {"temperature": 0})  # type: ignore[arg-type]


def test_result_in_time(llm: LLM) -> None:
    gate = Gate()
    request = llm.submit("the", logits_processor=gate, **SETTINGS)
    with pytest.raises(TimeoutError, match="goes on"):
        request.result(0.01)
    for bad in (-1, "1", True, float("nan")):
        with pytest.raises(infinilm.RequestError, match="timeout"):
            request.result(bad)  # type: ignore[arg-type]
    assert not request.done
    with pytest.raises(TimeoutError, match="goes on"):
        request.result(0)
    gate.open()
    assert len(request.result(float("inf")).outputs[0].token_ids) == 20
    assert len(llm.submit("the", **SETTINGS).result(1e300).outputs[0].token_ids) == 20


def test_cancel_anywhere(folder: Path) -> None:
    with LLM(folder, max_num_seqs=2, max_num_batched_tokens=8) as model:
        expected = model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs
        gate = Gate(len(model.tokenize("the")) + 5)
        decoding = model.submit("the", logits_processor=gate, **SETTINGS)
        assert gate.reached.wait(PATIENCE)
        long = model.submit([1] * 100, **SETTINGS)  # in chunks of at most 8 tokens: cancelled between them
        waiting = [model.submit("an", n=2, **SETTINGS) for _ in range(3)]
        for request in (long, *waiting[:2], decoding):
            request.cancel()
        gate.open()
        for request, count in ((long, 0), (waiting[0], 0), (decoding, 6)):
            output = request.result(PATIENCE)
            assert output.finished
            assert {c.finish_reason for c in output.outputs} == {"abort"}
            assert len(output.outputs[0].token_ids) == count
            assert "".join(e.text for e in request if e.completion == 0) == output.outputs[0].text
        assert [len(c.token_ids) for c in waiting[2].result(PATIENCE).outputs] == [20, 20]
        assert model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs == expected
        assert model.metrics().num_used_blocks == 0


def test_cancelling_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also who waits for others, or was not started yet; what runs goes on."""
    monkeypatch.setattr("infinilm.serving.engine_thread._MAX_STARTS", 3)
    with LLM(folder, max_num_seqs=2) as model:
        expected = model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs
        gate = Gate()
        running = model.submit("the", logits_processor=gate, **SETTINGS)
        assert gate.reached.wait(PATIENCE)
        waiting = [model.submit("an", n=1 + i % 3, prompt_logprobs=[None, 1][i % 2], **SETTINGS) for i in range(20)]
        metrics = model.metrics()
        assert metrics.num_running + metrics.num_waiting == 1 + sum(1 + i % 3 + i % 2 for i in range(20))
        for request in waiting[::-1]:
            request.cancel()
            request.cancel()
        gate.open()
        for request in waiting:
            assert {c.finish_reason for c in request.result(PATIENCE).outputs} == {"abort"}
        assert running.result(PATIENCE).outputs == expected
        wait_for(lambda: model.metrics().num_waiting == 0)
        model.reset_cache("1MiB")  # nothing is left that runs
        assert not model._thread._queue.open_requests
        assert not model._thread._queue.num_cancelled


def test_many_at_once_start_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilm.serving.engine_thread._MAX_STARTS", 3)
    with LLM(folder) as model:
        prompts = [[1 + i, 2] for i in range(20)]
        together = model.generate(prompts, use_tqdm=False, **SETTINGS)
        for prompt, output in zip(prompts, together, strict=True):
            assert model.generate(prompt, use_tqdm=False, **SETTINGS)[0].outputs == output.outputs


def test_what_was_refused_leaves_nothing_behind(folder: Path) -> None:
    def refused(ids: Any, logits: Any) -> Any:
        for call in (model.generate, model.submit, model.score):
            with pytest.raises(infinilm.InfinilmError, match="logits_processor"):
                call("an")
        return logits

    model = LLM(folder)
    model.generate("the", logits_processor=refused, **SETTINGS)
    model.generate("the", **SETTINGS)  # takes up what was cancelled
    assert not model._thread._queue.num_cancelled
    model.close()
    with pytest.raises(infinilm.EngineDeadError):
        model.generate("the")
    assert not model._thread._queue.num_cancelled


def test_no_thread_to_be_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder) as model:

        def fail(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            for _ in range(2):
                with pytest.raises(infinilm.DeviceError, match="can't start new thread"):
                    model.generate("the", **SETTINGS)
        assert model.metrics().num_waiting == 0
        assert len(model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs[0].token_ids) == 20


def test_interrupted_while_the_thread_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder) as model:
        before, start = len(engine_threads()), threading.Thread.start

        def start_and_raise(self: threading.Thread) -> None:
            start(self)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_and_raise)
            with pytest.raises(KeyboardInterrupt):
                model.generate("the", **SETTINGS)
        for _ in range(2):
            assert len(model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs[0].token_ids) == 20
            assert len(engine_threads()) == before + 1


def test_cancel_between_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, max_num_batched_tokens=8, max_num_seqs=2) as model:
        requests: list[infinilm.Request] = []
        update = model._thread.scheduler.update

        def cancel_and_update(*args: Any) -> Any:
            wait_for(lambda: bool(requests))
            requests[0].cancel()
            return update(*args)

        monkeypatch.setattr(model._thread.scheduler, "update", cancel_and_update)
        requests.append(model.submit([1] * 100, **SETTINGS))
        output = requests[0].result(PATIENCE)
        assert (output.outputs[0].finish_reason, list(output.outputs[0].token_ids)) == ("abort", [])
        assert model.metrics().num_prompt_tokens < 100


def test_letting_go_of_a_handle_cancels(folder: Path) -> None:
    with LLM(folder) as model:
        for leave in (lambda r: None, lambda r: next(iter(r))):
            gate = Gate(3)
            request = model.submit([1, 2], logits_processor=gate, ignore_eos=True)
            leave(request)
            assert gate.reached.wait(PATIENCE)
            del request
            gc.collect()
            gate.open()
            wait_for(lambda: model.metrics().num_running == 0)
        assert model.metrics().num_output_tokens < 20


def test_a_handle_keeps_its_llm(folder: Path) -> None:
    model = LLM(folder)
    request = model.submit("the", **SETTINGS)
    del model
    gc.collect()
    assert request.result(PATIENCE).outputs[0].finish_reason == "length"


# ---- the thread ----


def test_the_thread_starts_late_sleeps_and_goes(folder: Path) -> None:
    before = len(engine_threads())
    model = LLM(folder)
    assert len(engine_threads()) == before
    model.generate("the", **SETTINGS)
    assert len(engine_threads()) == before + 1
    steps = model.metrics().num_steps
    time.sleep(0.05)
    assert model.metrics().num_steps == steps
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert len(engine_threads()) == before


def test_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in generate, which waits for events."""
    with LLM(folder) as model:
        expected = model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs
        gate = Gate()

        class Interrupted:
            def __init__(self) -> None:
                self.put: Any = lambda event: None

            def empty(self) -> bool:
                return True

            def get(self, timeout: float | None = None) -> Any:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("infinilm.calls.streams.queue.SimpleQueue", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate(["the", "an"], logits_processor=gate, use_tqdm=False, **SETTINGS)
        gate.open()
        wait_for(lambda: model.metrics().num_running == 0)
        assert model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs == expected


def test_close_fails_what_runs(folder: Path) -> None:
    model = LLM(folder, max_num_seqs=1)
    gate = Gate()
    requests = [model.submit("the", logits_processor=gate, **SETTINGS), model.submit("an", n=2, prompt_logprobs=0)]
    assert gate.reached.wait(PATIENCE)
    closing = threading.Thread(target=model.close)
    closing.start()
    wait_for(lambda: model._thread._closed)
    gate.open()
    closing.join(PATIENCE)
    for request in requests:
        events: list[infinilm.TokenEvent] = []
        with pytest.raises(infinilm.EngineDeadError, match="closed"):
            request.result(PATIENCE)
        with pytest.raises(infinilm.EngineDeadError, match="closed"):
            for event in request:
                events.append(event)
        assert events[-1].finish_reason == "error"
    for call in (lambda: model.submit("the"), lambda: model.score("the"), lambda: model.generate("the")):
        with pytest.raises(infinilm.EngineDeadError, match="closed"):
            call()


# ---- failures ----


def bad_shape(token_ids: Any, logits: Any) -> Any:
    return logits[:-1]


def bad_nan(token_ids: Any, logits: Any) -> Any:
    logits[3] = np.nan
    return logits


def bad_exit(token_ids: Any, logits: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("processor", "error"),
    [
        (broken, ValueError),
        (bad_shape, infinilm.RequestError),
        (bad_nan, infinilm.RequestError),
        (bad_exit, SystemExit),
        (lambda ids, logits: None, infinilm.RequestError),
        (lambda ids, logits: logits - np.inf, infinilm.RequestError),
        (lambda ids, logits: "logits", ValueError),
    ],
)
def test_a_bad_processor_fails_its_request_alone(llm: LLM, processor: Any, error: type[BaseException]) -> None:
    prompts = ["the", "an", "the other"]
    good = SamplingParams(**SETTINGS)
    bad = SamplingParams(logits_processor=processor, **SETTINGS)
    expected = llm.generate(prompts, good, use_tqdm=False)
    outputs = llm.generate(prompts, [good, bad, good], use_tqdm=False)
    assert [o.outputs for o in outputs[::2]] == [o.outputs for o in expected[::2]]
    failed = outputs[1].outputs[0]
    assert (failed.finish_reason, list(failed.token_ids)) == ("error", [])
    assert isinstance(failed.error, error)
    events = list(llm.stream(prompts, [good, bad, good]))
    assert [e.finish_reason for e in events if e.index == 1] == ["error"]
    for call in (
        lambda: llm.generate("an", bad),
        lambda: list(llm.stream("an", bad)),
        lambda: llm.submit("an", bad).result(PATIENCE),
        lambda: list(llm.submit("an", bad)),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("more", [{}, {"stop": "zzzz"}])
def test_what_came_before_a_failure_is_kept(llm: LLM, more: dict[str, Any]) -> None:
    def fail_later(ids: Any, logits: Any) -> Any:
        if len(ids) >= len(llm.tokenize("the")) + 5:
            raise ValueError("on purpose")
        return logits

    params = [SamplingParams(**SETTINGS, **more), SamplingParams(logits_processor=fail_later, **SETTINGS, **more)]
    good, bad = (output.outputs[0] for output in llm.generate(["the"] * 2, params, use_tqdm=False))
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert bad.token_ids == good.token_ids[:5]
    assert bad.text
    assert good.text.startswith(bad.text)
    assert bad.text == "".join(e.text for e in llm.stream(["the"] * 2, params) if e.index == 1)


class MadeOfTwo(Exception):
    """That `copy` cannot make again of its args alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.mark.parametrize(
    "error", [ValueError("on purpose"), MadeOfTwo("on ", "purpose")], ids=lambda e: type(e).__name__
)
def test_a_failure_keeps_nothing_of_those_who_hear_of_it(llm: LLM, error: BaseException) -> None:
    class Held:
        pass

    def fail(ids: Any, logits: Any) -> Any:
        raise error from KeyError("the cause")

    request = llm.submit("the", logits_processor=fail, **SETTINGS)
    lengths: list[int] = []
    held: list[weakref.ref[Held]] = []

    def ask(call: Callable[[], object]) -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        with pytest.raises(type(error), match="on purpose") as caught:
            call()
        assert isinstance(caught.value.__cause__, KeyError)
        lengths.append(len(caught.traceback))

    for _ in range(5):
        ask(lambda: request.result(PATIENCE))
    assert len(set(lengths)) == 1
    for _ in range(5):
        ask(lambda: list(request))
    gc.collect()
    assert not any(ref() for ref in held)


def test_requests_of_a_failed_step_share_no_exception(folder: Path) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    hooks = infinilm.HookRegistry()
    with LLM(folder, hooks=hooks, tensor_parallel_size=1) as model:
        hooks.register_hook("logits", fail)
        requests = [model.submit("the", n=2, prompt_logprobs=1, **SETTINGS) for _ in range(2)]
        requests += [model.submit("an", **SETTINGS) for _ in range(2)]
        errors: list[BaseException] = []
        for request in requests:
            with pytest.raises(ValueError, match="on purpose") as caught:
                request.result(PATIENCE)
            errors.append(caught.value)
            errors += [c.error for c in request._request.completions if c.error is not None]
        assert len({id(error) for error in errors}) == len(errors) == 4 + 2 * 2 + 2


def test_a_failure_behind_the_last_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has finished by then gets its answer, and another one the error; none waits for ever."""

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    with LLM(folder) as model:
        with monkeypatch.context() as patch:
            patch.setattr(model._thread.scheduler, "observe", fail)
            assert model.submit("the", ignore_eos=True, max_tokens=1).result(PATIENCE).finished
            with pytest.raises(ValueError, match="on purpose"):
                model.submit("the", ignore_eos=True, max_tokens=20).result(PATIENCE)
        assert not model._thread._queue.open_requests
        assert model.generate("the", use_tqdm=False, **SETTINGS)[0].finished


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_cannot_be_sampled_fail_their_request_alone(tmp_path: Path, value: float) -> None:
    """A token's embedding is damaged. The other requests of the step, and of the one made ahead, go on."""
    folder = tiny.make_checkpoint(tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][SYSTEM] = value
    weights["lm_head.weight"][SYSTEM] = 0  # so that it is never the likeliest
    save_file(weights, folder / "model.safetensors")
    prompts = [[1, 5, 6], [1, SYSTEM, 6], [1, 7], [1, 5, 6, 8, SYSTEM, 4]]
    for settings in (
        SETTINGS,
        {**SETTINGS, "logprobs": 2},
        {**SETTINGS, "temperature": 1, "top_k": 5, "seed": 1},
        {**SETTINGS, "repetition_penalty": 1.1},
        {**SETTINGS, "logits_processor": lambda ids, logits: logits},  # drawn on the host, all in one call
    ):
        with LLM(folder) as model:
            alone = [model.generate(prompts[i], use_tqdm=False, **settings)[0].outputs for i in (0, 2)]
            for _ in range(2):
                outputs = model.generate(prompts, use_tqdm=False, **settings)
                assert [outputs[i].outputs for i in (0, 2)] == alone
                for i in (1, 3):
                    failed = outputs[i].outputs[0]
                    assert (failed.finish_reason, list(failed.token_ids), failed.text) == ("error", [], "")
                    assert "logits that cannot be sampled: they hold NaN. A weight may be" in str(failed.error)
            with pytest.raises(infinilm.InfinilmError, match="cannot be sampled"):
                model.generate(prompts[1], use_tqdm=False, **settings)
            assert model.metrics().num_used_blocks == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"logit_bias": {5: 3e38}, "repetition_penalty": 0.1},
        {"logit_bias": {5: 100}, "repetition_penalty": 1e-38},
        {"logit_bias": {5: 3e38}, "logits_processor": lambda ids, logits: np.where(logits > 1e38, np.inf, logits)},
        {"logit_bias": {5: 3e38}, "logits_processor": lambda ids, logits: np.where(logits > 1e38, np.nan, logits)},
    ],
)
def test_parameters_that_overflow_together_fail_their_request_alone(llm: LLM, bad: dict[str, Any]) -> None:
    """Others whose tokens are drawn on the host, too, which is one call for all of them."""
    good = {**SETTINGS, "repetition_penalty": 1.1}
    expected = llm.generate(["the", "an"], use_tqdm=False, **good)
    params = [SamplingParams(**p) for p in (good, {**SETTINGS, **bad}, good)]
    outputs = llm.generate(["the", [5, 5], "an"], params, use_tqdm=False)
    assert [outputs[i].outputs for i in (0, 2)] == [o.outputs for o in expected]
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "float32" in str(outputs[1].outputs[0].error)


def test_a_failing_tokenizer_fails_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(OutputText):
        def push(self, token_id: int, search: bool = True) -> str:
            raise RuntimeError("on purpose")

    def make(tokenizer: Tokenizer, params: SamplingParams) -> OutputText:
        return (Broken if params.stop == ("zzzz",) else OutputText)(tokenizer, params)

    expected = llm.generate("the", use_tqdm=False, **SETTINGS)[0].outputs
    monkeypatch.setattr("infinilm.requests.prompts.OutputText", make)
    params = [SamplingParams(**SETTINGS), SamplingParams(stop="zzzz", **SETTINGS)]
    good, bad = llm.generate(["the", "the"], params, use_tqdm=False)
    assert good.outputs == expected
    assert bad.outputs[0].finish_reason == "error"
    assert str(bad.outputs[0].error) == "on purpose"


def test_events_that_cannot_be_delivered(llm: LLM) -> None:
    """As those of an asyncio loop that is closed: their request is cancelled, others do not notice."""
    gate = Gate()
    request = llm.submit("the", logits_processor=gate, ignore_eos=True)

    def fail(event: Any) -> None:
        raise RuntimeError("the loop is closed")

    request._request.listen(fail)
    gate.open()
    assert len(llm.generate("the", use_tqdm=False, **SETTINGS)[0].outputs[0].token_ids) == 20
    wait_for(lambda: llm.metrics().num_running == 0)
    assert request._request.completions[0].finish_reason == "abort"


def test_a_failed_forward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, engine: Any, error: BaseException) -> None:
            self._engine, self._error = engine, error

        def submit(self, batch: Any, late_masks: bool) -> Any:
            return self

        def wait(self, seconds: float) -> bool:
            return True

        def result(self) -> Any:
            raise self._error

        def close(self) -> None:
            self._engine.close()

    with LLM(folder) as model:
        expected = model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs
        with monkeypatch.context() as patch:
            patch.setattr(model._thread, "_engine", Failing(model._engine, RuntimeError("on purpose")))
            for call in (
                lambda: model.generate(["the", "an"], n=2, **SETTINGS),
                lambda: model.generate("the", prompt_logprobs=1),
                lambda: model.score("the"),
            ):
                with pytest.raises(RuntimeError, match="on purpose"):
                    call()
        assert model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs == expected
        assert not model._thread._queue.open_requests
        death = infinilm.EngineDeadError("rank 0 failed")
        monkeypatch.setattr(model._thread, "_engine", Failing(model._engine, death))
        with pytest.raises(infinilm.EngineDeadError, match="rank 0 failed"):
            model.generate("the", **SETTINGS)
        with pytest.raises(infinilm.EngineDeadError, match="rank 0 failed") as caught:
            model.generate("the", **SETTINGS)
        assert caught.value.__cause__ is death


def test_metrics(folder: Path) -> None:
    with LLM(folder, max_num_seqs=2) as model:
        fresh = model.metrics()
        assert (fresh.num_running, fresh.num_waiting, fresh.num_steps, fresh.output_tps) == (0, 0, 0, None)
        gate = Gate()
        requests = [model.submit([1, 2, 3], logits_processor=gate, **SETTINGS) for _ in range(5)]
        assert gate.reached.wait(PATIENCE)
        during = model.metrics()
        assert during.num_running + during.num_waiting == 5
        assert 1 <= during.num_running <= 2
        assert 1 <= during.num_used_blocks <= during.num_blocks
        gate.open()
        for request in requests:
            request.result(PATIENCE)
        after = model.metrics()
        assert (after.num_running, after.num_waiting, after.num_used_blocks, after.num_finished) == (0, 0, 0, 5)
        assert (after.num_prompt_tokens, after.num_output_tokens) == (15, 100)
        assert after.num_steps >= 60
        assert after.output_tps is not None
        assert after.output_tps > 0
        assert 0 <= after.prefix_hit_rate <= 1


def test_many_threads_that_cancel(folder: Path) -> None:
    with LLM(folder, max_num_seqs=3, max_num_batched_tokens=16) as model:
        expected = [model.generate([1 + i], use_tqdm=False, **SETTINGS)[0].outputs for i in range(4)]
        failures: list[str] = []

        def work(i: int) -> None:
            for k in range(6):
                request = model.submit([1 + i], **SETTINGS)
                if k % 2:
                    for _ in zip(request, range(k), strict=False):
                        pass
                    request.cancel()
                outputs = request.result(PATIENCE).outputs
                cut = len(outputs[0].token_ids)
                if list(outputs[0].token_ids) != list(expected[i][0].token_ids)[:cut] or (k % 2 == 0 and cut < 20):
                    failures.append(f"{i} {k}")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failures
        wait_for(lambda: model.metrics().num_running == 0)
