"""Log-probabilities with their tokens, continuations, and perplexity of texts beyond the context."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import infinilm
from infinilm import LLM, Logprob, RequestError, Score
from infinilm.calls.windows import sliding_windows
from llm import tiny

TEXT = "the end of the story is near and the little fox runs to the old tree"


def log_softmax(llm: LLM, ids: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[num_tokens, vocab_size], from logits, in float64."""
    logits = llm.forward(ids).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# ---- log-probabilities ----


def test_logprobs_know_their_tokens(llm: LLM) -> None:
    output = llm.generate("the", max_tokens=6, logprobs=3, prompt_logprobs=2, seed=1, use_tqdm=False)[0]
    (event, *_) = llm.stream("the", max_tokens=6, logprobs=3, seed=1)
    (answer,) = output.outputs
    assert answer.logprobs is not None and output.prompt_logprobs is not None
    assert event.top_logprobs == answer.logprobs[0]
    scored = llm.score("the", top=2)[0].top_logprobs
    assert scored is not None
    for count, chosen, places in (
        (3, answer.token_ids, answer.logprobs),
        (3, answer.token_ids[:1], [event.top_logprobs]),
        (2, output.prompt_token_ids[1:], output.prompt_logprobs[1:]),
        (2, [None] * len(scored), scored[1:]),
    ):
        for token_id, place in zip(chosen, places, strict=False):
            assert place is not None and (token_id is None or token_id in place)
            for rank, (other, logprob) in enumerate(place.items(), 1):
                assert logprob.rank == (rank if rank <= count else None)
                assert (logprob.token_id, logprob.logprob) == (other, float(logprob))
                assert logprob.decoded_token == llm.tokenizer.token_bytes(other).decode("utf-8", "replace")


def test_logprobs_are_floats(llm: LLM) -> None:
    answer = llm.generate("the", max_tokens=4, logprobs=2, seed=1, use_tqdm=False)[0]
    places = answer.outputs[0].logprobs
    assert places is not None
    plain = [{token_id: float(value) for token_id, value in place.items()} for place in places]
    assert places == plain and repr(places) == repr(plain) and json.dumps(places) == json.dumps(plain)
    for again in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
        assert again == answer
        first, second = (next(iter(o.outputs[0].logprobs[0].values())) for o in (again, answer))
        assert (first.decoded_token, first.rank) == (second.decoded_token, second.rank)
    assert type(answer.to_dict()["outputs"][0]["logprobs"][0][str(answer.outputs[0].token_ids[0])]) is float
    assert sum(places[0].values()) == sum(plain[0].values())


def test_nothing_is_decoded_unless_it_is_read(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def refuse(token_id: int) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr(llm.tokenizer, "token_bytes", refuse)
    answer = llm.generate("the", max_tokens=4, logprobs=2, use_tqdm=False)[0].outputs[0]
    assert answer.logprobs is not None
    with pytest.raises(AssertionError, match="decoded"):
        next(iter(answer.logprobs[0].values())).decoded_token  # noqa: B018


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    with LLM(tiny.make_checkpoint(tmp_path, tokenizer=False)) as llm:
        places = llm.generate([1, 2], max_tokens=2, logprobs=1, use_tqdm=False)[0].outputs[0].logprobs
    assert places is not None and {value.decoded_token for value in places[0].values()} == {None}
    assert Logprob(-1.0, 5).rank is None


# ---- continuations ----


def test_labels_of_a_prompt(llm: LLM) -> None:
    """The totals are those of the tokens behind the prompt, by an independent sum."""
    prompt, labels = "the end of", [" the story", " a", " little fox runs"]
    scores = llm.score(prompt, labels)
    before = llm.tokenize(prompt)
    for label, score in zip(labels, scores, strict=True):
        ids = llm.tokenize(prompt + label)
        assert (score.prompt, list(score.token_ids)) == (prompt + label, ids)
        assert score.start <= len(before)
        rows = log_softmax(llm, ids)
        expected = [rows[i - 1, ids[i]] for i in range(score.start, len(ids))]
        assert score.total == pytest.approx(math.fsum(expected), abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(-math.fsum(expected) / len(expected)), rel=1e-4)
    assert len({score.start for score in scores}) == 1


def test_tokens_that_reach_across_the_border(llm: LLM) -> None:
    """A label that joins the last token of the prompt moves the place where the others begin, too."""
    whole = llm.tokenize(TEXT)
    at = next(i for i in range(3, len(TEXT)) if llm.tokenize(TEXT[:i]) != whole[: len(llm.tokenize(TEXT[:i]))])
    prompt, joining = TEXT[:at], TEXT[at:]
    scores = llm.score(prompt, continuation=[joining, " the"])
    start = scores[0].start
    assert start < len(llm.tokenize(prompt)) and scores[1].start == start
    assert [list(score.token_ids[:start]) for score in scores] == [whole[:start]] * 2
    assert list(scores[0].token_ids) == whole
    # The total is that of the whole text, less what stands before.
    text = llm.score(TEXT)[0]
    before = Score(None, whole[:start], text.logprobs[:start])
    assert scores[0].total == pytest.approx(text.total - before.total)


def test_numbers_of_continuations(llm: LLM) -> None:
    def totals(*args: Any) -> list[float]:
        return [score.total for score in llm.score(args[0], continuation=args[1])]

    one, other = totals(["the end"], [" of"]), totals(["an old"], [" of"])
    assert totals(["the end", "an old"], " of") == totals(["the end", "an old"], [" of", " of"]) == one + other
    ids, more = llm.tokenize("the end"), llm.tokenizer.encode(" of", add_special_tokens=False)
    assert totals(ids, " of") == totals(ids, [more]) == totals(np.array(ids), more) == totals("the end", more)
    assert llm.score([], continuation="x") == llm.score("x", continuation=[]) == []
    for prompts, continuation, message in (
        (["a", "b"], ["c", "d", "e"], r"expected one, or one per prompt \(2\), got 3"),
        ("the", "", "continuation 0 is empty"),
        ([1, 2], [[3], []], "continuation 1 is empty"),
        ([1, 2], [[3], [-1]], "continuation 1: token id -1"),
        ("the", "x" * 1000, "prompt 0 has 1002 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.score(prompts, continuation=continuation)


# ---- perplexity ----


@given(num=st.integers(2, 60), length=st.integers(2, 20), data=st.data())
def test_every_token_counts_once(num: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length - 1))
    windows = list(sliding_windows(num, length, stride))
    counted = [i for begin, end, first in windows for i in range(first, end) if begin < first]
    assert counted == list(range(1, num))
    assert all(0 < end - begin <= length for begin, end, _ in windows)


@pytest.mark.parametrize(("length", "stride"), [(None, None), (8, 1), (8, 4), (8, 7), (2, 1)])
def test_perplexity_of_a_long_text(llm: LLM, length: int | None, stride: int | None) -> None:
    """Beside windows written out by hand, as transformers' documentation has them, in float64."""
    ids = (llm.tokenize(TEXT) * 20)[: 40 if length else 300]
    size, step = length or llm.max_model_len, stride or (length or llm.max_model_len) // 2
    logprobs: list[float] = []
    seen = 1
    for begin in range(0, len(ids), step):
        window = ids[begin : begin + size]
        rows = log_softmax(llm, window)
        fresh = begin + len(window) - seen
        logprobs += [rows[i - 1, window[i]] for i in range(len(window) - fresh, len(window))]
        seen = begin + len(window)
        if seen == len(ids):
            break
    assert len(logprobs) == len(ids) - 1
    expected = math.exp(-math.fsum(logprobs) / len(logprobs))
    assert llm.perplexity(ids, max_length=length, stride=stride) == pytest.approx(expected, rel=1e-5)


def test_perplexity_of_a_short_text_is_that_of_its_score(llm: LLM) -> None:
    assert llm.perplexity("the end of the story") == llm.score("the end of the story")[0].perplexity


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ([5], {}, "expected at least two, got one"),
        ([], {}, "text is empty"),
        ([5, -1], {}, "text: token id -1"),
        ([5, 6], {"max_length": 1}, "max_length must be an integer"),
        ([5, 6], {"max_length": 10**6}, "max_length is 1000000, and the context holds"),
        ([5, 6], {"max_length": 8, "stride": 8}, "stride must be below max_length=8"),
        ([5, 6], {"stride": 0}, "stride must be an integer"),
        ([5, 6], {"lora": "none"}, "none"),
    ],
)
def test_bad_perplexity(llm: LLM, text: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(infinilm.RequestError, match=message):
        llm.perplexity(text, **settings)


# ---- bars ----


def test_bars_tell_rates(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["the", "an"], max_tokens=3, ignore_eos=True)
    shown = capsys.readouterr().err
    assert "generating: 100%" in shown and "out " in shown and "tokens/s" in shown
    llm.score(["the", "an"])
    llm.embed(iter(["the", "an"]))
    shown = capsys.readouterr().err
    assert "scoring: 100%" in shown and "embedding: 2prompt" in shown and "in " in shown
    llm.generate(["the", "an"], max_tokens=3, use_tqdm=False)
    llm.score(["the", "an"], use_tqdm=False)
    llm.embed(["the", "an"], use_tqdm=False)
    assert capsys.readouterr().err == ""
