"""Whatever is drafted, every kind of request gets the answer that it gets without drafts, bit for bit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm import tiny
from llm.constraints import Toy, constrain
from llm.support import wait_for
from lora.adapters import make_adapter

from infinilm import LLM, Constraint, HookRegistry, PagedKVCacheConfig, RequestError, RequestLimits, SamplingParams
from infinilm.speculation import MAX_DRAFT_TOKENS
from speculation.drafters import MODES, Book, assert_drafted, counts, told

PROMPTS: list[Any] = ["the", "Once upon a time there was an answer", [1, 2, 3], "a " * 25]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 0.8},
    "cut": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "many logprobs": {"temperature": 0.8, "logprobs": 100, "max_tokens": 12},
    "prompt logprobs": {"temperature": 0.8, "logprobs": 0, "prompt_logprobs": 2},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 1},
    "frequencies": {"temperature": 0.5, "frequency_penalty": 0.9, "logprobs": 1},
    "bias": {"temperature": 0.8, "logit_bias": {7: 2.0, 97: 3.0, 101: 3.0}, "logprobs": 1},
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(60, 75)), "logprobs": 1},
    "stop string": {"temperature": 0.8, "stop": ["e", "th", "!"], "logprobs": 1, "min_tokens": 3},
    "kept stop string": {"temperature": 1.0, "stop": ["A", "q", "x"], "include_stop_str_in_output": True},
    "stop ids": {"temperature": 1.0, "stop_token_ids": list(range(20, 40)), "min_tokens": 4, "logprobs": 1},
    "plain stop ids": {"temperature": 1.0, "stop_token_ids": list(range(20, 40))},
    "several": {"temperature": 1.0, "n": 3},
    "json": {"temperature": 0.8, "constraint": Constraint.json_schema(SCHEMA), "logprobs": 1},
    "regex": {"temperature": 1.0, "constraint": Constraint.regex("[a-z ]{5,20}(yes|no)"), "logprobs": 1},
    "constrained and penalised": {
        "temperature": 1,
        "constraint": Constraint.regex("[ab]{9,30}c"),
        "frequency_penalty": 0.3,
    },
    "one token": {"temperature": 1.0, "max_tokens": 1},
    "two tokens": {"temperature": 1.0, "max_tokens": 2},
    "to the end of the context": {"temperature": 1.0, "max_tokens": None, "ignore_eos": True},
    "adapter": {"temperature": 0.8, "lora": "one", "logprobs": 1},
}
FULL = {"max_tokens": 40, "seed": 5, "use_tqdm": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("speculation") / "tiny")


@pytest.fixture(scope="module")
def book() -> Book:
    return Book()


@pytest.fixture(scope="module")
def llm(folder: Path, book: Book) -> Iterator[LLM]:
    adapter = make_adapter(folder.parent / "adapter", folder)
    with LLM(folder, seed=0, speculation=book, lora={"one": adapter}, limits=RequestLimits(max_logprobs=200)) as made:
        yield made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(folder, seed=0, lora={"one": folder.parent / "adapter"}, limits=RequestLimits(max_logprobs=200)) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(llm: LLM, plain: LLM, book: Book, kind: str) -> None:
    sampling: dict[str, Any] = FULL | KINDS[kind]
    book.mode = "off"
    alone = told(llm.generate(PROMPTS, **sampling))
    assert alone == told(plain.generate(PROMPTS, **sampling))
    for mode in MODES:
        book.mode = mode
        before = counts(llm)
        assert told(llm.generate(PROMPTS, **sampling)) == alone, mode
        if kind not in ("one token", "two tokens") and (mode == "right" or "constraint" not in sampling):
            assert counts(llm)[0] > before[0]
        if kind in ("greedy", "warm", "logprobs", "penalties", "to the end of the context"):
            assert_drafted(llm, before, mode)
    assert llm.metrics().num_used_blocks == 0


def test_kinds_together(llm: LLM, plain: LLM, book: Book) -> None:
    """In one batch, where each sequence has a draft of its own length."""
    params = [SamplingParams(**{"max_tokens": 40, "seed": 5} | KINDS[kind]) for kind in KINDS if kind != "adapter"]
    prompts = list(itertools.islice(itertools.cycle(PROMPTS), len(params)))
    book.mode = "off"
    alone = told(llm.generate(prompts, params, use_tqdm=False))
    assert alone == told(plain.generate(prompts, params, use_tqdm=False))
    for book.mode in MODES:
        before = counts(llm)
        assert told(llm.generate(prompts, params, use_tqdm=False)) == alone, book.mode
        assert counts(llm)[0] > before[0]


def test_fewer_steps(llm: LLM, book: Book) -> None:
    """Right drafts of 15 tokens make a step of every 16."""
    book.mode = "off"
    settings: dict[str, Any] = FULL | {"ignore_eos": True, "temperature": 0, "max_tokens": 65}
    before = llm.metrics().num_steps
    llm.generate("the", **settings)
    assert llm.metrics().num_steps - before >= 65
    book.mode = "right"
    before = llm.metrics().num_steps
    output = llm.generate("the", **settings)[0]
    assert llm.metrics().num_steps - before == 1 + 64 // 16
    assert len(output.outputs[0].token_ids) == 65


def test_a_request_limits_its_drafts(llm: LLM, book: Book) -> None:
    """Or refuses them; its metrics tell of them, and so do those of the engine."""
    book.mode = "off"
    sampling: dict[str, Any] = FULL | {"temperature": 0.8, "n": 2}
    alone = told(llm.generate(PROMPTS, **sampling))
    book.mode = "right"
    for speculation, most in (("off", 0), (1, 1), (3, 3), (15, MAX_DRAFT_TOKENS), ("auto", MAX_DRAFT_TOKENS)):
        before = llm.metrics()
        outputs = llm.generate(PROMPTS, speculation=speculation, **sampling)
        after = llm.metrics()
        assert told(outputs) == alone
        num_drafts, num_tokens = after.num_drafts - before.num_drafts, after.num_draft_tokens - before.num_draft_tokens
        assert num_drafts <= num_tokens <= most * num_drafts
        assert (num_tokens > 0) == (most > 0)
        longest = max([i + 1 for i, count in enumerate(after.accepted_at) if count > before.accepted_at[i]], default=0)
        assert longest == most
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        assert sum(m.num_draft_tokens for m in metrics) == num_tokens
        assert sum(m.num_accepted_tokens for m in metrics) == after.num_accepted_tokens - before.num_accepted_tokens


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("on", RequestError, r"speculation must be 'auto', 'off' or an int in 1\.\.15, got 'on'"),
        (0, RequestError, r"speculation must be 'off' or in 1\.\.15, got 0"),
        (16, RequestError, r"speculation must be 'off' or in 1\.\.15, got 16"),
        (True, TypeError, r"speculation must be an int, got True"),
        (1.5, TypeError, r"speculation must be an int, got 1\.5"),
    ],
)
def test_wrong_limits(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(speculation=wrong)


def test_lengths_are_measured(folder: Path) -> None:
    """Where lengths follow from the clock, which this test does not know, answers are the same."""
    book = Book()
    sampling: dict[str, Any] = FULL | {"temperature": 0.8, "max_tokens": 100, "ignore_eos": True}
    with LLM(folder, seed=0, speculation={"method": book}) as llm:
        alone = told(llm.generate(PROMPTS, **sampling))
        for book.mode in ("right", "wrong", "until"):
            assert told(llm.generate(PROMPTS, **sampling)) == alone


def test_what_drafts_nothing(folder: Path) -> None:
    """Requests with a logits processor, and all while hooks are in use."""
    book, hooks = Book(), HookRegistry()
    settings: dict[str, Any] = FULL | {"temperature": 0.8}
    with LLM(folder, speculation=book, hooks=hooks) as llm:
        alone = told(llm.generate(PROMPTS, **settings))
        book.mode = "right"
        llm.generate(PROMPTS, **settings | {"logits_processor": lambda _ids, logits: logits})
        llm.score(["the other"])
        llm.embed(["the other"])
        seen: list[int] = []
        handle = hooks.register_hook("embedding", lambda _name, tensor, _layer: seen.append(tensor.shape[0]))
        assert told(llm.generate(PROMPTS, **settings)) == alone
        assert counts(llm) == (0, 0)
        assert seen[-1] <= len(PROMPTS)
        handle.remove()
        assert told(llm.generate(PROMPTS, **settings)) == alone
        assert counts(llm)[0] > 0


@pytest.mark.parametrize("mode", ["right", "until"])
@pytest.mark.parametrize("kind", ["warm", "logprobs", "stop string", "plain stop ids", "several", "json"])
def test_streams(llm: LLM, book: Book, kind: str, mode: str) -> None:
    """There is an event of each token, the same in any case; deltas may have several."""
    sampling: dict[str, Any] = {"max_tokens": 40, "seed": 5} | KINDS[kind]
    book.mode = "off"
    alone = _events(llm, sampling)
    outputs = llm.generate(PROMPTS, **sampling, use_tqdm=False)
    book.mode = mode
    before = counts(llm)
    assert _events(llm, sampling) == alone
    assert counts(llm)[1] > before[1]

    async def collect() -> dict[Any, str]:
        joined: dict[Any, str] = {}
        async for event in llm.astream(PROMPTS, **sampling):
            key = event.index, event.completion
            joined[key] = joined.get(key, "") + event.text
        return joined

    assert asyncio.run(collect()) == {(i, c.index): c.text for i, o in enumerate(outputs) for c in o.outputs}


def _events(llm: LLM, sampling: dict[str, Any]) -> dict[Any, list[Any]]:
    """The events of a stream, by completion."""
    events: dict[Any, list[Any]] = {}
    for event in llm.stream(PROMPTS, **sampling):
        what = event.token_id, event.text, event.logprob, event.finish_reason, repr(event.top_logprobs)
        events.setdefault((event.index, event.completion), []).append(what)
    return events


def test_cancelled_in_the_middle(llm: LLM, book: Book) -> None:
    book.mode = "off"
    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "seed": 5, "max_tokens": 100}
    alone = list(llm.generate("the", **settings, use_tqdm=False)[0].outputs[0].token_ids)
    for book.mode in ("right", "wrong"):
        request = llm.submit("the", **settings)
        next(iter(request))
        request.cancel()
        output = request.result().outputs[0]
        assert list(output.token_ids) == alone[: len(output.token_ids)]
        wait_for(lambda: llm.metrics().num_used_blocks == llm.metrics().num_running == 0)


def test_time_limit(folder: Path) -> None:
    book = Book("random")
    with LLM(folder, speculation=book, limits=RequestLimits(max_seconds=1e-3)) as llm:
        with pytest.raises(Exception, match="second"):
            llm.generate(["a " * 25] * 8, **FULL | {"ignore_eos": True})
        wait_for(lambda: llm.metrics().num_used_blocks == llm.metrics().num_running == 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fails_at", [None, 3, 11])
def test_matchers(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fails_at: int | None) -> None:
    """A matcher takes in the tokens of the answer alone, and copies of it what is drafted; any of them may fail.

    One fails after `fails_at` tokens, as it does without drafts.
    """

    def act(name: str, tokens: list[int]) -> None:
        if fails_at is not None and name == "fill" and len(tokens) == fails_at:
            raise ValueError("it fails here")

    def matcher_of(ids: list[int]) -> Toy | None:
        is_failing = len(ids) == 3
        return Toy(tiny.VOCAB_SIZE, len(ids), length=25, **({"act": act} if is_failing else {}))

    constrain(monkeypatch, matcher_of)
    book = Book()
    settings: dict[str, Any] = FULL | {"logprobs": 1, "temperature": 1.0}
    with LLM(folder, seed=0, use_tqdm=False, speculation=book) as llm:
        alone = told(llm.generate(PROMPTS, **settings))
        book.mode = mode
        assert told(llm.generate(PROMPTS, **settings)) == alone
        drafted, accepted = counts(llm)
        assert drafted > 0
        if mode in ("right", "some") and fails_at is None:
            assert accepted == drafted


class Broken:
    name = "broken"

    def __init__(self, at: str) -> None:
        self.at = at

    def update(self, _token_ids: Any) -> None:
        if self.at == "update":
            raise ValueError("broken")

    def draft(self, _limit: int) -> Any:
        return {"draft": None, "type": ["x"]}.get(self.at, [1])

    @property
    def evidence(self) -> Any:
        return ["x"] if self.at == "evidence" else 0


@pytest.mark.parametrize("at", ["make", "update", "draft", "type", "evidence"])
def test_a_drafter_that_fails_is_left_out(folder: Path, llm: LLM, book: Book, at: str) -> None:
    """The request goes on without drafts, and others do not notice."""

    def make(_request: Any) -> Any:
        if at == "make":
            raise ValueError("broken")
        return Broken(at)

    book.mode = "off"
    alone = told(llm.generate(PROMPTS, **FULL))
    with LLM(folder, seed=0, speculation=make) as other:
        assert told(other.generate(PROMPTS, **FULL)) == alone
        assert counts(other) == (0, 0)


SMALL: dict[str, Any] = {"kv_cache": PagedKVCacheConfig(num_blocks=11, block_size=8), "max_model_len": 80}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"max_num_batched_tokens": 1},
        SMALL,
        SMALL | {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ],
    ids=["chunks", "no room", "small pool", "small pool without prefixes", "ranks", "int8"],
)
def test_settings(folder: Path, settings: dict[str, Any], mode: str) -> None:
    book = Book()
    sampling: dict[str, Any] = FULL | {"ignore_eos": True, "temperature": 0.8, "logprobs": 1, "max_tokens": 28}
    with LLM(folder, seed=0, use_tqdm=False, speculation=book, **settings) as llm:
        prompts = PROMPTS * 2
        alone = told(llm.generate(prompts, **sampling))
        num_preemptions = llm.metrics().num_preemptions
        book.mode = mode
        for _ in range(2):  # again with what the prefix cache holds
            before = counts(llm)
            assert told(llm.generate(prompts, **sampling)) == alone
            if "max_num_batched_tokens" not in settings:
                assert_drafted(llm, before, mode)
        if "kv_cache" in settings:
            assert num_preemptions > 0
        wait_for(lambda: llm.metrics().num_used_blocks == llm.metrics().num_running == 0)
