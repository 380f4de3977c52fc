"""Beam search: outputs and scores are those of transformers, and of a search by hand, whatever shares the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from goldens import KEPT, expected_of, golden
from hypothesis import given, settings, strategies as st

from infinilm import LLM, Constraint, PagedKVCacheConfig, RequestError, SamplingParams
from llm import tiny

KEPT_SEARCHES: dict[str, list[dict[str, Any]]] = json.loads((KEPT / "beams.json").read_text(encoding="utf-8"))
BLOCK, LONGEST = 4, 96


def open_llm(model: Any, num_blocks: int = 200, **options: Any) -> LLM:
    cache = PagedKVCacheConfig(block_size=BLOCK, num_blocks=num_blocks)
    fixed: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 12, "use_tqdm": False}
    return LLM(model, kv_cache=cache, **(fixed | options))


def told(output: Any) -> list[Any]:
    """All of an answer, as text that equals another only if every bit does."""
    return [(list(one.token_ids), one.beam_score, repr(one.logprobs), one.text) for one in output.outputs]


@pytest.mark.parametrize("name", KEPT_SEARCHES)
def test_outputs_and_scores_of_transformers(name: str) -> None:
    """All searches of a model at once, beside answers that are drawn; and one by one in a cache that is too small."""
    prompt = expected_of(name)["input_ids"].tolist()
    kept = KEPT_SEARCHES[name]
    params = [
        SamplingParams(
            **{key: value for key, value in case.items() if key not in ("token_ids", "scores")}, ignore_eos=True
        )
        for case in kept
    ]
    drawn = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, logprobs=2)
    with open_llm(golden(name), max_model_len=LONGEST) as llm:
        alone = told(llm.generate([prompt[:9]], drawn, use_tqdm=False)[0])
        outputs = llm.generate([prompt[:9], *[prompt] * len(kept)], [drawn, *params], use_tqdm=False)
        assert told(outputs[0]) == alone
        assert llm._thread.scheduler.stats.num_used_blocks == 0
    for case, output in zip(kept, outputs[1:], strict=True):
        assert [list(one.token_ids) for one in output.outputs] == case["token_ids"], case
        scores = [one.beam_score for one in output.outputs]
        np.testing.assert_allclose(scores, case["scores"], rtol=2e-5, atol=1e-6)
    with open_llm(golden(name), num_blocks=LONGEST // BLOCK + 2, max_model_len=LONGEST, max_num_seqs=3) as llm:
        crowded = llm.generate([prompt] * 3, params[-3:], use_tqdm=False)
        assert [told(one) for one in crowded] == [told(one) for one in outputs[-3:]]
        assert llm._thread.scheduler.stats.num_used_blocks == 0


# ---- a search by hand, over the log-probabilities of LLM.score ----


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with open_llm(tiny.make_checkpoint(tmp_path_factory.mktemp("beams") / "tiny")) as one:
        yield one


PROMPTS = [[(7 * i * i + 3 * i + 5 + k) % 250 for i in range(length)] for k, length in enumerate((1, 6, 8, 13))]
PROMPTS.append([*PROMPTS[3][:8], 7, 9])
SEARCHES = st.builds(
    SamplingParams,
    beam_width=st.sampled_from([None, 2, 3, 5]),
    max_tokens=st.integers(1, 14),
    min_tokens=st.sampled_from([0, 0, 1]),
    logprobs=st.sampled_from([None, 0, 3]),
    seed=st.just(3),
    stop=st.sampled_from([(), ("a",), ("e", "\x00")]),
    stop_token_ids=st.sampled_from([(), (5, 17, 33)]),
)


@settings(max_examples=25)
@given(
    asked=st.lists(st.tuples(st.sampled_from(PROMPTS), SEARCHES), min_size=1, max_size=5),
    num_blocks=st.sampled_from([8, 14, 60]),
    max_num_seqs=st.sampled_from([1, 2, 7]),
    cached=st.booleans(),
)
def test_nothing_depends_on_what_shares_the_engine(
    llm: LLM, asked: list[tuple[list[int], SamplingParams]], num_blocks: int, max_num_seqs: int, cached: bool
) -> None:
    """Searches and draws at once, with fewer slots and blocks than beams, are as each is alone."""
    prompts: list[Any] = [prompt for prompt, _ in asked]
    params = [one for _, one in asked]
    alone = [llm.generate([p], one, use_tqdm=False)[0] for p, one in zip(prompts, params, strict=True)]
    with open_llm(
        llm.model_path, num_blocks, max_num_seqs=max_num_seqs, max_model_len=28, enable_prefix_caching=cached
    ) as crowded:
        outputs = crowded.generate(prompts, params, use_tqdm=False)
        assert list(map(told, outputs)) == list(map(told, alone))
        assert crowded._thread.scheduler.stats.num_used_blocks == 0
    for output, one in zip(outputs, params, strict=True):
        if one.beam_width is not None:
            assert_scores(llm, output, one)


def assert_scores(llm: LLM, output: Any, params: SamplingParams) -> None:
    """The score of an output is what the model says of its tokens, and the best come first."""
    for one in output.outputs:
        whole = [*output.prompt_token_ids, *one.token_ids]
        (score,) = llm.score([whole])
        own = sum(score.logprobs[len(output.prompt_token_ids) :])
        assert math.isclose(one.beam_score, own / len(one.token_ids) ** params.length_penalty, rel_tol=1e-5)
    scores = [one.beam_score for one in output.outputs]
    assert scores == sorted(scores, reverse=True)


def test_a_wide_search_finds_the_best_of_all(llm: LLM) -> None:
    """A search of two tokens that has as many beams as the vocabulary has tokens misses no output."""
    size = llm.config.vocab_size
    params = SamplingParams(beam_width=size, n=3, max_tokens=2, length_penalty=0.0, ignore_eos=True)
    found = [list(one.token_ids) for one in llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs]
    first = np.array(log_softmax(llm.forward(PROMPTS[1])[-1]))
    behind = [log_softmax(llm.forward([*PROMPTS[1], token])[-1]) for token in range(size)]
    total = first[:, None] + np.array(behind)
    best = np.argsort(-total, axis=None)[:3]
    assert found == [[int(i) // size, int(i) % size] for i in best]


def log_softmax(logits: Any) -> Any:
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def test_events_come_at_the_end_and_make_the_text(llm: LLM) -> None:
    params = SamplingParams(beam_width=3, n=2, max_tokens=9, ignore_eos=True)
    (whole,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
    events = list(llm.stream([PROMPTS[2]], params))
    for index, output in enumerate(whole.outputs):
        own = [event for event in events if event.completion == index]
        assert [event.token_id for event in own] == list(output.token_ids)
        assert "".join(event.text for event in own) == output.text
        assert [event.finish_reason for event in own] == [None] * 8 + ["length"]


def test_a_cancelled_search_leaves_nothing(llm: LLM) -> None:
    request = llm.submit(PROMPTS[0], beam_width=4, n=2, max_tokens=60, ignore_eos=True)
    request.cancel()
    assert {one.finish_reason for one in request.result(60).outputs} <= {"abort", "length"}
    assert llm.generate([PROMPTS[1]], max_tokens=1, use_tqdm=False)
    assert llm._thread.scheduler.stats.num_used_blocks == 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"n": 4}, "n must be at most beam_width=3, got 4"),
        ({"beam_width": None}, "length_penalty is of a beam search"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty cannot be combined with beam_width=3.*1\.1"),
        ({"logit_bias": {3: 1.0}}, "logit_bias cannot be combined"),
        ({"constraint": Constraint.regex("a+")}, "constraint cannot be combined"),
        ({"prediction": "abc"}, "prediction cannot be combined"),
        ({"return_receipt": True}, "return_receipt cannot be combined"),
        ({"beam_width": 0}, "beam_width must be >= 1"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never', got 'soon'"),
        ({"length_penalty": 99}, r"length_penalty must be in -10\.\.10"),
        ({"beam_width": 2000}, "beam_width must be at most 1024, got 2000"),
    ],
)
def test_what_does_not_fit_is_named(llm: LLM, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        llm.generate([PROMPTS[0]], use_tqdm=False, **({"beam_width": 3, "length_penalty": 0.5} | changes))
    with pytest.raises(RequestError, match="a beam search begins behind a prompt"):
        llm.generate({"prompt_token_ids": [1], "output_token_ids": [2]}, beam_width=2, use_tqdm=False)
