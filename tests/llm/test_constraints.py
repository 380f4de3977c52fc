"""Requests with a constraint: only what it allows, the same tokens whatever else runs, and failures that stay alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinilm import LLM, InfinilmError, RequestError, SamplingParams
from llm import constraints, tiny
from llm.constraints import Toy, constrain, generate
from llm.support import PATIENCE, one, wait_for
from llm.test_run_ahead import Recorder, set_ahead

pytestmark = pytest.mark.one_rank  # what ranks could change has both sizes here

VOCAB_SIZE = tiny.VOCAB_SIZE  # no multiple of 32, and a half of it is none either
BLOCK_BYTES = 16 * 2 * 2 * (2 * 8) * 4  # 16 tokens; K and V of 2 layers, 2 heads of 8, float32


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[dict[int, LLM]]:
    """Models of one rank and of two, which round differently."""
    with LLM(folder, seed=0, use_tqdm=False) as one, LLM(folder, tensor_parallel_size=2, use_tqdm=False) as two:
        yield {1: one, 2: two}


@pytest.fixture
def free(models: dict[int, LLM]) -> LLM:
    return models[1]


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[1 + i, *range(20 + i % 3)] for i in range(14)]
    kinds: Iterator[dict[str, Any]] = itertools.cycle(
        [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 5},
            {"temperature": 0.7, "seed": 6, "logprobs": 2},
            {"stop_token_ids": (7, 12, 99), "temperature": 1.5, "seed": 3},
            {"temperature": 1.0, "seed": 1, "top_k": 5},
            {"temperature": 1.0, "seed": 2, "top_p": 0.8, "stop": ["the", "a"]},
            {"temperature": 0.0, "top_k": 1},
        ]
    )
    return prompts, [SamplingParams(**({"max_tokens": 25} | next(kinds))) for _ in prompts]


def toy_of(ids: list[int]) -> Toy | None:
    """The constraint of every second prompt."""
    return Toy(VOCAB_SIZE, seed=ids[0]) if ids[0] % 2 else None


def on_host(model: LLM, prompt: list[int], params: SamplingParams) -> list[Any]:
    """The answer to a request alone, the toy of its prompt as a logits_processor."""
    process = constraints.processor(VOCAB_SIZE, prompt[0])
    return generate(model, [prompt], replace(params, logits_processor=process))[0]


@pytest.fixture(scope="module")
def expected(models: dict[int, LLM]) -> dict[int, list[Any]]:
    """Answers to `make_requests`, one at a time, by number of ranks."""
    return {
        size: [
            generate(model, [prompt], p)[0] if toy_of(prompt) is None else on_host(model, prompt, p)
            for prompt, p in zip(*make_requests(), strict=True)
        ]
        for size, model in models.items()
    }


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache": 10 * BLOCK_BYTES, "max_num_batched_tokens": 32}, {"tensor_parallel_size": 2}],
    ids=["together", "preempted", "two ranks"],
)
def test_tokens_are_those_of_a_processor(
    folder: Path,
    expected: dict[int, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    ahead: bool,
) -> None:
    """In company, preempted, in chunks, on two ranks, ahead or not: those that it chooses alone on the host."""
    set_ahead(monkeypatch, ahead)
    constrain(monkeypatch, toy_of)
    prompts, params = make_requests()
    want = expected[settings.get("tensor_parallel_size", 1)]
    with LLM(folder, use_tqdm=False, speculation="off", **settings) as model:
        recorder = Recorder(model._engine)
        monkeypatch.setattr(model._thread, "_engine", recorder)
        assert generate(model, prompts, params) == want
        assert (recorder.num_ahead > 20) == ahead
        assert (model.metrics().num_preemptions > 0) == ("kv_cache" in settings)
        assert model.metrics().num_used_blocks == 0
        for i in (0, 1, 4):  # alone, from the prefix cache
            assert generate(model, [prompts[i]], params[i])[0] == want[i]


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_where_the_best_of_each_rank_decide(
    models: dict[int, LLM], monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int
) -> None:
    """Greedy and top_k alone; all rows masked, one, or all but one."""
    model = models[tensor_parallel_size]
    prompts = [[i, 3, 4] for i in range(1, 7)]
    params = [SamplingParams(temperature=i % 2, top_k=(1, 5)[i % 2], seed=i, max_tokens=30) for i in range(6)]
    whiches: list[Callable[[int], bool]] = [lambda i: True, lambda i: i == 3, lambda i: i != 3]
    for which in whiches:
        want = [
            on_host(model, prompt, p) if which(prompt[0]) else generate(model, [prompt], p)[0]
            for prompt, p in zip(prompts, params, strict=True)
        ]
        with monkeypatch.context() as patch:
            constrain(patch, lambda ids, which=which: Toy(VOCAB_SIZE, ids[0]) if which(ids[0]) else None)
            assert generate(model, prompts, params) == want


def test_several_sequences_of_a_prompt(free: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a matcher of its own; the toy would refuse the tokens of another."""
    made: list[Toy] = []

    def make(ids: list[int]) -> Toy:
        made.append(Toy(VOCAB_SIZE, 4))
        return made[-1]

    constrain(monkeypatch, make)
    output = free.generate([[1, 2, 3]], n=5, temperature=1.0, seed=3, max_tokens=20, use_tqdm=False)[0]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 5
    assert made[0].tokens == []
    monkeypatch.undo()
    for i, completion in enumerate(output.outputs):
        process = constraints.processor(VOCAB_SIZE, 4)
        alone = one(free, [1, 2, 3], temperature=1.0, seed=3 + i, max_tokens=20, logits_processor=process)
        assert alone.token_ids == completion.token_ids


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.5, "frequency_penalty": 0.3},
        {"logit_bias": {5: 100.0, 6: -100.0}},
        {"allowed_token_ids": list(range(0, VOCAB_SIZE, 2)), "max_tokens": 1},
        {"min_tokens": 20, "stop_token_ids": list(range(60))},
        {"logprobs": 3, "min_tokens": 5},
        {"logits_processor": lambda ids, logits: logits * 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_with_what_the_host_does(free: LLM, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Rows whose token the host draws are masked there, before the rest; log-probabilities are those of the model."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 8, "max_tokens": 25} | changes
    first = settings.pop("logits_processor", lambda ids, logits: logits)
    mask = constraints.processor(VOCAB_SIZE, 9)
    settings_of_host = settings | {"logits_processor": lambda ids, logits: first(ids, mask(ids, logits))}
    want = generate(free, [[5, 6]], SamplingParams(**settings_of_host))
    constrain(monkeypatch, lambda ids: Toy(VOCAB_SIZE, 9))
    if "logits_processor" in changes:
        settings["logits_processor"] = first
    assert generate(free, [[5, 6]], SamplingParams(**settings)) == want


def test_a_finished_matcher_ends_its_sequence(free: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "stop", after the token that completes it, whose text counts; before min_tokens and with ignore_eos, too."""
    constrain(monkeypatch, lambda ids: Toy(VOCAB_SIZE, 2, length=4))
    for changes in ({}, {"stop": ["never"]}, {"min_tokens": 10}, {"ignore_eos": True}, {"max_tokens": 4}):
        output = one(free, [1, 2], temperature=0, **({"max_tokens": 20} | changes))
        assert len(output.token_ids) == 4 and output.finish_reason == "stop" and output.stop_reason is None
        assert output.text == free.tokenizer.decode(list(output.token_ids))
    assert one(free, [1, 2], temperature=0, max_tokens=3).finish_reason == "length"


def raises_at(call: str, count: int, error: BaseException) -> Callable[[str, list[int]], None]:
    def act(name: str, tokens: list[int]) -> None:
        if name == call and len(tokens) == count:
            raise error

    return act


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("call", ["fill", "advance", "is_finished"])
def test_a_matcher_that_raises(
    free: LLM, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException, ahead: bool
) -> None:
    """Its request alone fails, wherever it raises; others get what they get without it."""
    set_ahead(monkeypatch, ahead)
    prompts = [[i, 3, 4] for i in range(1, 5)]
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 12}
    constrain(monkeypatch, lambda ids: Toy(VOCAB_SIZE, 1))
    want = generate(free, prompts, SamplingParams(**settings))
    for count in (0, 1, 7):
        act = raises_at(call, count, error)
        constrain(monkeypatch, lambda ids, act=act: Toy(VOCAB_SIZE, 1, act=act) if ids[0] == 2 else Toy(VOCAB_SIZE, 1))
        requests = [free.submit(prompt, **settings) for prompt in prompts]
        for i, request in enumerate(requests):
            if i == 1 and not (call == "is_finished" and count == 0):  # that is asked after a token
                with pytest.raises(type(error)):
                    request.result()
            else:
                assert constraints.answers([request.result()])[0] == want[i]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_mask_that_allows_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int, on_host: bool
) -> None:
    """The request ends with an error that says so; the others go on."""

    class Nothing(Toy):
        def fill(self, row: Any) -> None:
            super().fill(row)
            if len(self.tokens) == 2:
                row[:] = 0

        def copy(self) -> Nothing:
            return Nothing(self.vocab_size, self.seed)

    bias = {"logit_bias": {3: 1.0}} if on_host else {}
    with LLM(folder, use_tqdm=False, tensor_parallel_size=tensor_parallel_size) as model:
        constrain(monkeypatch, lambda ids: Nothing(VOCAB_SIZE) if ids[0] == 1 else Toy(VOCAB_SIZE))
        for settings in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 2}):
            bad, good = (model.submit([i, 2], max_tokens=6, **settings, **bias) for i in (1, 2))
            with pytest.raises(RequestError, match="no token is left to choose: the constraint"):
                bad.result()
            assert len(bad.output().outputs[0].token_ids) == 2
            assert len(good.result().outputs[0].token_ids) == 6


def test_a_failed_step_with_masks_behind_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that waits for masks behind a step that fails is given up; later requests run."""
    set_ahead(monkeypatch, True)
    constrain(monkeypatch, lambda ids: Toy(VOCAB_SIZE))
    with LLM(folder, use_tqdm=False, speculation="off") as model:
        recorder = Recorder(model._engine, fail_at=6, error=InfinilmError("the step failed"))
        monkeypatch.setattr(model._thread, "_engine", recorder)
        with pytest.raises(InfinilmError, match="the step failed"):
            one(model, [1, 2], temperature=0, max_tokens=20)
        assert recorder.num_ahead > 0
        assert len(one(model, [1, 2], temperature=0, max_tokens=20).token_ids) == 20


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_while_a_mask_is_awaited(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A matcher that takes its time, while the LLM is closed or the requests are cancelled: all end when it is done."""
    set_ahead(monkeypatch, True)
    begun, may_go_on = threading.Event(), threading.Event()

    def act(name: str, tokens: list[int]) -> None:
        if name == "fill" and len(tokens) == 5:
            begun.set()
            assert may_go_on.wait(PATIENCE)

    constrain(monkeypatch, lambda ids: Toy(VOCAB_SIZE, act=act))
    model = LLM(folder, use_tqdm=False)
    try:
        requests = [model.submit([i, 2], temperature=0, max_tokens=50) for i in range(3)]
        assert begun.wait(PATIENCE)
        closer = threading.Thread(target=model.close)
        if how == "close":
            closer.start()
            wait_for(lambda: model._thread._closed)
        else:
            for request in requests:
                request.cancel()
        may_go_on.set()
        if how == "close":
            closer.join(PATIENCE)
            assert not closer.is_alive()
            for request in requests:
                with pytest.raises(InfinilmError, match="closed"):
                    request.result()
        else:
            for request in requests:
                assert request.result().outputs[0].finish_reason == "abort"
            wait_for(lambda: model.metrics().num_used_blocks == 0)
            assert one(model, [9], temperature=0, max_tokens=3).finish_reason == "length"
    finally:
        may_go_on.set()
        model.close()
