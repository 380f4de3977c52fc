"""Predicted answers: how they are followed, that they change no bit, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from llm import tiny

from infinilm import LLM, Constraint, RequestError, SamplingParams
from infinilm.speculation.prediction import Follower, Prediction, PredictionDrafter
from speculation.drafters import counts, told

FULL: dict[str, Any] = {"max_tokens": 60, "seed": 5, "use_tqdm": False}
SMALL_TOKENS = st.lists(st.integers(0, 4), max_size=30)


@given(SMALL_TOKENS, SMALL_TOKENS, st.integers(1, 15))
def test_any_answer_is_followed(predicted: list[int], answer: list[int], limit: int) -> None:
    """The draft is the part of the prediction behind the last tokens of the answer, where it has these."""
    follower = Follower(Prediction(predicted))
    assert follower.following(limit) == predicted[:limit]
    for i, token_id in enumerate(answer, 1):
        expected = follower.following(1)
        follower.advance(token_id)
        following = follower.following(limit)
        assert len(following) <= limit
        if expected == [token_id]:
            assert (expected + following)[: limit + 1] in _runs(predicted, min(limit + 1, 1 + len(following)))
        elif following:
            assert [*answer[i - 2 : i], *following] in _runs(predicted, 2 + len(following))
    assert follower.num_accepted <= min(len(predicted), len(answer))
    assert follower.num_accepted == Prediction(predicted).count_accepted(answer)


def _runs(tokens: list[int], length: int) -> list[list[int]]:
    return [tokens[i : i + length] for i in range(len(tokens) - length + 1)]


@given(st.integers(0, 20), st.integers(0, 5), st.integers(0, 5), st.integers(2, 20))
def test_an_edit_costs_two_tokens(before: int, taken: int, added: int, behind: int) -> None:
    """Behind tokens that were replaced, inserted or left out two tokens are not drafted, and all others are."""
    predicted = list(range(before + taken + behind))
    answer = [*predicted[:before], *range(1000, 1000 + added), *predicted[before + taken :]]
    follower, missed = Follower(Prediction(predicted)), 0
    for token_id in answer:
        missed += follower.following(1) != [token_id]
        follower.advance(token_id)
    is_edited = taken + added > 0
    assert missed == (added + 2 if is_edited else 0)
    assert follower.num_accepted == before + behind + (0 if is_edited else taken)


def test_the_next_place_is_taken() -> None:
    """A line that occurs many times is looked for from the difference on."""
    line = [1, 2, 3]
    predicted = [*line, 10, *line, 11, *line, 12]
    follower = Follower(Prediction(predicted))
    for token_id in (*line, 10, 99, 1, 2):
        follower.advance(token_id)
    assert follower.following(3) == [3, 11, 1]
    for token_id in (3, 11, 98, *line[:2]):
        follower.advance(token_id)
    assert follower.following(3) == [3, 12]
    for token_id in (97, *line[:2]):  # nothing is behind: the last place before
        follower.advance(token_id)
    assert follower.following(3) == [3, 12]


@pytest.mark.parametrize("cut", [0, 2, 3, 5])
def test_the_prompt_is_passed_over(cut: int) -> None:
    drafter, tokens = PredictionDrafter(Prediction([4, 5, 6, 7]), 3), [6, 7, 4, 4, 5]
    drafter.update(tokens[:cut])
    drafter.update(tokens[cut:])
    assert drafter.draft(15) == [6, 7]
    assert drafter.draft(1) == [6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("prediction") / "tiny")


@pytest.fixture(scope="module", params=["off", "lookup"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    """A prediction is followed whatever `speculation` says."""
    with LLM(folder, seed=0, speculation={"method": request.param, "adaptive": False}) as made:
        yield made


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 0.8, "logprobs": 2},
    "several": {"temperature": 1.0, "n": 3},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.9, "logprobs": 1},
    "constraint": {"temperature": 1.0, "constraint": Constraint.regex("[ab]{9,30}c"), "logprobs": 1},
    "stop": {"temperature": 1.0, "stop": ["e", "th"]},
    "processor": {"temperature": 1.0, "logits_processor": lambda _ids, logits: logits},
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_change(llm: LLM, kind: str) -> None:
    """Whether the prediction is right, edited or wrong."""
    sampling = FULL | KINDS[kind]
    alone = llm.generate("Once upon", **sampling)
    answer = list(alone[0].outputs[0].token_ids)
    assert alone[0].metrics is not None and alone[0].metrics.accepted_prediction_tokens is None
    half = len(answer) // 2
    for prediction in (answer, [*answer[:half], 3, *answer[half + 2 :]], answer[::-1], [9], list(range(100))):
        before = counts(llm)
        outputs = llm.generate("Once upon", prediction=prediction, **sampling)
        assert told(outputs) == told(alone)
        metrics = outputs[0].metrics
        assert metrics is not None and metrics.accepted_prediction_tokens is not None
        n = len(outputs[0].outputs)
        assert metrics.accepted_prediction_tokens + (metrics.rejected_prediction_tokens or 0) == n * len(prediction)
        if prediction is answer:
            assert metrics.accepted_prediction_tokens >= len(answer)
            if kind != "processor" and len(answer) > 2:
                assert counts(llm)[1] > before[1]
        if kind == "processor":
            assert counts(llm)[0] == before[0]


def test_fewer_steps(llm: LLM) -> None:
    sampling = FULL | {"ignore_eos": True, "temperature": 0, "max_tokens": 65}
    answer = llm.generate("the", **sampling)[0].outputs[0].token_ids
    before = llm.metrics().num_steps
    (output,) = llm.generate("the", prediction=answer, **sampling)
    assert llm.metrics().num_steps - before == 1 + 64 // 16
    assert output.metrics is not None
    assert (output.metrics.accepted_prediction_tokens, output.metrics.rejected_prediction_tokens) == (65, 0)


def test_texts() -> None:
    """The answer's own text, of which the tokenizer makes other tokens in places, and an edited one."""
    sampling = {"temperature": 0, "max_tokens": 60, "use_tqdm": False}
    with LLM("demo", speculation={"method": "auto", "adaptive": False}, use_tqdm=False) as llm:
        alone = llm.generate("Once upon a time", **sampling)
        for text in (alone[0].text, alone[0].text.replace("the", "her", 1), "A " + alone[0].text):
            before = llm.metrics().num_steps
            outputs = llm.generate("Once upon a time", prediction=text, **sampling)
            assert told(outputs) == told(alone)
            assert llm.metrics().num_steps - before < 30
        events = list(llm.stream("Once upon a time", prediction=alone[0].text, temperature=0, max_tokens=60))
        assert "".join(event.text for event in events) == alone[0].text


@pytest.mark.parametrize(
    ("prediction", "error", "message"),
    [
        (3, TypeError, r"prediction must be a text, a sequence of token ids, or None, got 3 of type int"),
        (b"x", TypeError, r"prediction must be a text"),
        ({"type": "content"}, TypeError, r"prediction must be a text"),
        (["x"], TypeError, r"prediction\[0\] must be an int, got 'x'"),
        ("", RequestError, r"prediction must not be empty: leave it out, or pass None"),
        ((), RequestError, r"prediction must not be empty"),
        ([-1], RequestError, r"prediction\[0\] must be a token id >= 0, got -1"),
        ([tiny.VOCAB_SIZE], RequestError, r"prediction.* 270"),
        ([1] * 129, RequestError, r"prediction has 129 tokens; the context holds 128"),
        ("ab" * 100, RequestError, r"prediction has 200 tokens; the context holds 128: shorten it"),
    ],
)
def test_wrong_predictions(llm: LLM, prediction: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate("the", prediction=prediction)
    assert llm.generate("the", max_tokens=2, use_tqdm=False)[0].finished


def test_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with LLM(tiny.make_checkpoint(tmp_path / "tiny", tokenizer=False), use_tqdm=False) as llm:
        with pytest.raises(RequestError, match="tokenizer"):
            llm.generate([1, 2], prediction="the")
        assert llm.generate([1, 2], SamplingParams(prediction=[3, 4], max_tokens=2), use_tqdm=False)[0].finished
