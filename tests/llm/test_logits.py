"""Penalties, masks, processors and log-probabilities: by themselves, and through `LLM`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st
from reference import ops as numpy_ops

import infinilm
from infinilm import LLM, Constraint, SamplingParams, _core
from infinilm.requests.logits import HostSampler, LogitsPipeline, best_logprobs
from infinilm.scheduling.token_changes import TokenChanges, logit_changes
from llm import tiny

Array = npt.NDArray[Any]
VOCAB = 40
PROMPTS = ["the", "Once upon a time there was an answer", "a " * 25, "the other one in the inner"]

some_params = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=3),
        "min_tokens": st.integers(0, 6),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32)),
        "repetition_penalty": st.floats(0.5, 2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=1),
        "ignore_eos": st.booleans(),
    },
)
some_ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


def oracle(p: SamplingParams, logits: Array, prompt: list[int], output: list[int]) -> Array:
    """The documented procedure, token by token, in float64."""
    out = [float(x) for x in logits]
    ends = set(p.stop_token_ids) | (set() if p.ignore_eos else {0})
    for i in range(VOCAB):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            out[i] = -math.inf
        if len(output) < p.min_tokens and i in ends:
            out[i] = -math.inf
        out[i] += (p.logit_bias or {}).get(i, 0.0)
        if i in prompt or i in output:
            out[i] = out[i] / p.repetition_penalty if out[i] > 0 else out[i] * p.repetition_penalty
        out[i] -= p.presence_penalty * (i in output) + p.frequency_penalty * output.count(i)
    return np.array(out)


@given(params=some_params, prompt=some_ids, output=some_ids, seed=st.integers(0, 99))
def test_the_pipeline_does_what_is_documented(
    params: dict[str, Any], prompt: list[int], output: list[int], seed: int
) -> None:
    p = SamplingParams(**params)
    logits = (4 * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)
    before = logits.copy()
    pipeline = LogitsPipeline(p, np.array(prompt, np.int32), {0}, VOCAB)
    matcher = pipeline.matcher(None)
    for token_id in output:
        pipeline.accept(token_id)
        if matcher is not None:
            matcher.advance(token_id)
    expected = oracle(p, logits, prompt, output)
    if np.isneginf(expected).all():
        with pytest.raises(infinilm.RequestError, match="no token is left"):
            pipeline.apply(logits, output, matcher)
        return
    got = pipeline.apply(logits, output, matcher)
    # A few roundings of values of this size.
    bound = 8 * np.finfo(np.float32).eps * (np.abs(logits).max() * 2 + 5 + 2 * (1 + len(output)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
    np.testing.assert_array_equal(logits, before)
    if pipeline.changes is None and matcher is None:
        np.testing.assert_array_equal(got, logits)


def assert_logprobs(got: Any, logits: Array, ids: Array, top: int) -> None:
    """Each place has its `top` most probable tokens in order and that of `ids`, to float32; logits [n, vocab]."""
    best, want = numpy_ops.log_probs(logits, np.asarray(ids), top)
    for told, row_ids, row in zip(got, best.tolist(), want.tolist(), strict=True):
        assert list(told) == list(dict.fromkeys([*row_ids[1:], row_ids[0]]))
        assert told == pytest.approx(dict(zip(row_ids, row, strict=True)), rel=2e-7, abs=1e-6)


@given(st.integers(1, 5), st.integers(0, VOCAB + 5), st.integers(0, 99), st.booleans())
def test_logprobs(num_rows: int, top: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = (10 * rng.standard_normal((num_rows, VOCAB))).astype(np.float32)
    logits = np.round(logits) if ties else logits
    ids = rng.integers(0, VOCAB, num_rows)
    best, logprobs = HostSampler().log_probs(logits, ids, top)
    told = [best_logprobs(i[1:], x[1:]) | {int(i[0]): float(x[0])} for i, x in zip(best, logprobs, strict=True)]
    assert_logprobs(told, logits, ids, min(top, VOCAB))


def test_logprobs_of_what_is_no_distribution() -> None:
    ids, logprobs = HostSampler().log_probs(np.full((1, 5), np.nan, np.float32), np.array([3]), 2)
    assert np.isnan(logprobs).all() and best_logprobs(ids[0, 1:], logprobs[0, 1:]) == {}


def test_the_host_draws_what_the_engine_draws(llm: LLM) -> None:
    params = [SamplingParams(seed=i, top_k=k, top_p=0.9, min_p=0.01) for i, k in enumerate((-1, 5, 0, 60))]
    expected = [llm.generate("the", p, max_tokens=1, use_tqdm=False)[0].outputs[0].token_ids[0] for p in params]
    ids = llm.tokenize("the")
    logits = np.stack([llm.forward(ids)[-1]] * len(params))
    assert HostSampler().sample(logits, params, [0, 1, 2, 3], [len(ids)] * 4) == expected
    assert 0 <= _core.uniform(0, 1) < 1


# ---- through LLM ----


def run(llm: LLM, prompt: Any, **sampling: Any) -> infinilm.CompletionOutput:
    return llm.generate(prompt, use_tqdm=False, **sampling)[0].outputs[0]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "top_k": 9, "top_p": 0.8}])
def test_a_processor_that_changes_nothing(llm: LLM, sampling: dict[str, Any]) -> None:
    plain = run(llm, "the", max_tokens=30, ignore_eos=True, **sampling)
    seen: list[list[int]] = []

    def same(token_ids: Array, logits: Array) -> Array:
        assert (token_ids.dtype, logits.dtype, logits.shape) == (np.int32, np.float32, (tiny.VOCAB_SIZE,))
        seen.append(token_ids.tolist())
        return logits

    got = run(llm, "the", max_tokens=30, ignore_eos=True, logits_processor=same, **sampling)
    assert list(got.token_ids) == list(plain.token_ids)
    prompt = llm.tokenize("the")
    assert seen == [prompt + list(plain.token_ids[:i]) for i in range(30)]


def test_the_device_counts_the_token_of_a_step_in_flight() -> None:
    """Entry -1 stands for it, behind those of its row alone (see LogitChanges in src/ops/backend.h)."""
    changes = TokenChanges(SamplingParams(frequency_penalty=0.5), np.array([5], np.int32))
    for token_id in (3, 7, 3):
        changes.accept(token_id)
    known = [[3, 2, 0], [7, 1, 0]]
    arrays = logit_changes([changes, changes], [0, 2], [True, False], 3)
    assert arrays["change_tokens"].tolist() == [*known, [-1, 0, 0], *known]
    assert arrays["change_rows"].tolist() == [[0, 3], [0, 0], [3, 5]]


def test_a_frequency_penalty_counts_every_time(llm: LLM) -> None:
    """Token 7 comes until its penalty of 2 each time outweighs its bias of 100: some 50 times, not for ever."""
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 90, "ignore_eos": True, "logit_bias": {7: 100.0}}
    got = run(llm, "the", frequency_penalty=2.0, **settings).token_ids
    assert np.ptp(llm.forward(llm.tokenize("the") + list(got))) < 40  # so that 30 times are too few
    assert list(got[:30]) == [7] * 30
    assert got.count(7) < 75


def test_greedy_with_penalties_is_the_oracle(llm: LLM) -> None:
    """Token by token from `forward`, with the order of the docs."""
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}
    got = run(llm, "the", temperature=0, max_tokens=20, ignore_eos=True, **settings)
    prompt = llm.tokenize("the")
    output: list[int] = []
    for token_id in got.token_ids:
        row = llm.forward(prompt + output)[-1]
        for i in set(prompt + output):
            row[i] = row[i] / np.float32(1.3) if row[i] > 0 else row[i] * np.float32(1.3)
        for i in set(output):
            row[i] = row[i] - np.float32(0.4)
            row[i] = row[i] - np.float32(0.7) * np.float32(output.count(i))
        assert token_id == row.argmax()
        output.append(token_id)
    assert got.token_ids != run(llm, "the", temperature=0, max_tokens=20, ignore_eos=True).token_ids


def test_bias_and_allowed(llm: LLM) -> None:
    assert set(run(llm, "the", max_tokens=20, logit_bias={7: 1e6}).token_ids) == {7}
    assert set(run(llm, "the", max_tokens=30, seed=1, allowed_token_ids=[5, 6, 8]).token_ids) <= {5, 6, 8}
    assert 5 not in run(llm, "the", max_tokens=30, seed=1, allowed_token_ids=[5, 6], logit_bias={5: -1e9}).token_ids


def test_min_tokens(llm: LLM) -> None:
    plain = run(llm, "the", seed=4, max_tokens=30, ignore_eos=True)
    stop = plain.token_ids[3]
    got = run(llm, "the", seed=4, max_tokens=30, ignore_eos=True, stop_token_ids=[stop], min_tokens=9)
    assert stop not in got.token_ids[:9]
    assert len(got.token_ids) > 9
    for others in ({}, {"allowed_token_ids": [5, 6, 8, tiny.EOS]}):  # a mask that ends with min_tokens, or stays
        ended = run(llm, "the", logit_bias={tiny.EOS: 1e6}, min_tokens=5, max_tokens=30, **others)
        assert len(ended.token_ids) == 6
    text = plain.text[2:4]
    assert (
        run(llm, "the", seed=4, max_tokens=30, ignore_eos=True, stop=text).text == plain.text[: plain.text.find(text)]
    )
    later = run(llm, "the", seed=4, max_tokens=30, ignore_eos=True, stop=text, min_tokens=12)
    assert len(later.token_ids) > 12
    assert later.text.startswith(llm.detokenize(plain.token_ids[:8]).rstrip("\ufffd"))


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1, "repetition_penalty": 1.2},
    {"seed": 2, "logit_bias": {3: 2.0}, "logprobs": 2},
    {"seed": 3},
    {"seed": 4, "logits_processor": lambda ids, logits: logits * np.float32(0.5)},
    {"seed": 5, "min_tokens": 8, "frequency_penalty": 1.0},
    {"temperature": 0, "prompt_logprobs": 1},
    {"seed": 6, "n": 3, "presence_penalty": 1.0},
    {"seed": 7, "constraint": Constraint.regex("[a-m]{30}"), "ignore_eos": False},
    {"seed": 8, "constraint": Constraint.regex("[n-z]{30}"), "ignore_eos": False},
]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}], ids=str)
def test_tokens_do_not_depend_on_what_runs_beside(folder: Any, llm: LLM, settings: dict[str, Any]) -> None:
    params = [SamplingParams(**{"max_tokens": 25, "ignore_eos": True, **m}) for m in MIXED]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    alone = [llm.generate(prompt, p, use_tqdm=False)[0] for prompt, p in zip(prompts, params, strict=True)]
    with LLM(folder, **settings) as other:
        together = other.generate(prompts, params, use_tqdm=False)
    for a, b in zip(alone, together, strict=True):
        assert a.outputs == b.outputs
        assert a.prompt_logprobs == b.prompt_logprobs


def test_n(llm: LLM) -> None:
    output = llm.generate("the", n=3, seed=10, max_tokens=15, ignore_eos=True, use_tqdm=False)[0]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for i, completion in enumerate(output.outputs):
        assert list(completion.token_ids) == list(
            run(llm, "the", seed=10 + i, max_tokens=15, ignore_eos=True).token_ids
        )
    texts = ["", "", ""]
    for event in llm.stream("the", n=3, seed=10, max_tokens=15, ignore_eos=True):
        texts[event.completion] += event.text
    assert texts == [c.text for c in output.outputs]


@pytest.mark.parametrize("top", [0, 1, 5, 64, 65])  # so many are told where the model runs, then by the host
def test_logprobs_of_completions(llm: LLM, top: int) -> None:
    settings: dict[str, Any] = {"seed": 7, "temperature": 0.7, "max_tokens": 12, "ignore_eos": True}
    plain = run(llm, "the", **settings)
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    got = run(llm, "the", logprobs=top, **settings)
    assert list(got.token_ids) == list(plain.token_ids)
    prompt = llm.tokenize("the")
    logits = llm.forward(prompt + list(got.token_ids))[len(prompt) - 1 : -1]
    assert got.logprobs is not None
    assert_logprobs(got.logprobs, logits, np.array(got.token_ids), top)
    own = [told[token_id] for told, token_id in zip(got.logprobs, got.token_ids, strict=True)]
    assert got.cumulative_logprob == pytest.approx(math.fsum(own), abs=1e-9)
    events = list(llm.stream("the", logprobs=top, **settings))
    assert [event.logprob for event in events] == own
    assert [event.top_logprobs for event in events] == list(got.logprobs)


@pytest.mark.parametrize("top", [3, 70])
@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"logit_bias": {3: 4.0, 5: -3.0}, "presence_penalty": 1.0, "allowed_token_ids": [3, 4, 5, 6, 7]},
        {"logits_processor": lambda ids, logits: np.where(np.arange(len(logits)) % 3 == 0, logits, -np.inf)},
    ],
    ids=["penalties", "bias and mask", "processor"],
)
def test_logprobs_are_those_of_the_model(llm: LLM, change: dict[str, Any], top: int) -> None:
    """Before all that changes logits, wherever that is done; the tokens are the same without them."""
    settings = {"seed": 7, "max_tokens": 12, "ignore_eos": True, **change}
    got = run(llm, "the", logprobs=top, **settings)
    assert got.token_ids == run(llm, "the", **settings).token_ids
    prompt = llm.tokenize("the")
    logits = llm.forward(prompt + list(got.token_ids))[len(prompt) - 1 : -1]
    assert_logprobs(got.logprobs, logits, np.array(got.token_ids), top)


def test_logprobs_that_fail_fail_their_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("on purpose")

    settings: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "seed": 3}
    params = [SamplingParams(**settings, logprobs=top) for top in (None, 2, 70)]  # the host tells the last ones
    expected = llm.generate(["the"] * 3, params, use_tqdm=False)
    monkeypatch.setattr(HostSampler, "log_probs", fail)
    *good, bad = llm.generate(["the"] * 3, params, use_tqdm=False)
    assert [o.outputs for o in good] == [o.outputs for o in expected[:2]]
    assert bad.outputs[0].finish_reason == "error" and str(bad.outputs[0].error) == "on purpose"


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_scores_and_prompt_logprobs(folder: Any, llm: LLM, chunk: int) -> None:
    with LLM(folder, max_num_batched_tokens=chunk, max_num_seqs=2) as other:
        scores = other.score([*PROMPTS, [3]], top=2)
        outputs = other.generate(PROMPTS, temperature=0, max_tokens=2, prompt_logprobs=2, use_tqdm=False)
    for prompt, score, output in zip(PROMPTS, scores, outputs, strict=False):
        ids = llm.tokenize(prompt)
        assert (score.prompt, score.token_ids) == (prompt, ids)
        logits = llm.forward(ids)[:-1]
        assert score.logprobs[0] is score.top_logprobs[0] is output.prompt_logprobs[0] is None
        own = score.logprobs[1:]
        told = [top | {i: x} for top, i, x in zip(score.top_logprobs[1:], ids[1:], own, strict=True)]
        assert_logprobs(told, logits, np.array(ids[1:]), 2)
        assert output.prompt_logprobs[1:] == told
        assert score.total == pytest.approx(sum(own))
        assert score.perplexity == pytest.approx(math.exp(-sum(own) / len(own)))
    assert (scores[-1].logprobs, scores[-1].perplexity) == ([None], None)
    assert llm.score("the")[0].top_logprobs is None
    assert llm.score([]) == []


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"allowed_token_ids": [tiny.VOCAB_SIZE]}, "allowed_token_ids: token id 270 is out of range"),
        ({"logit_bias": {10**6: 1}}, "logit_bias: token id 1000000"),
        ({"stop_token_ids": [999]}, "stop_token_ids: token id 999"),
        ({"logprobs": 271}, "logprobs must be an int in 0..270"),
        ({"prompt_logprobs": 271}, "prompt_logprobs must be"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model(llm: LLM, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(infinilm.RequestError, match=message):
        llm.generate("the", **sampling)


@pytest.mark.parametrize("top", [-1, 271, True, 1.5, None])
def test_bad_scores(llm: LLM, top: Any) -> None:
    with pytest.raises(infinilm.RequestError, match="top must be"):
        llm.score("the", top=top)
    with pytest.raises(infinilm.RequestError, match="prompt 1 is empty"):
        llm.score(["the", []])
