"""Results and timings."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

import infinilm
from infinilm.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenEvent


def test_metrics_by_hand():
    metrics = RequestMetrics.from_times(10.0, 10.5, [11.0, 11.25, 11.5, 12.5], num_prompt_tokens=110, cached_tokens=10)
    assert metrics == RequestMetrics(
        queue_time=0.5,
        ttft=1.0,
        itl=0.5,
        itl_p50=0.25,
        itl_p99=pytest.approx(np.percentile([0.25, 0.25, 1.0], 99)),
        prefill_tps=200.0,
        decode_tps=2.0,
        cached_tokens=10,
        token_times=(1.0, 1.25, 1.5, 2.5),
    )


def test_metrics_that_cannot_be_known():
    never = RequestMetrics.from_times(1.0, None, [], 5)
    assert dataclasses.astuple(never) == (None, None, None, None, None, None, None, 0, None, None, (), 0, 0)
    no_token = RequestMetrics.from_times(1.0, 2.0, [], 5)
    assert (no_token.queue_time, no_token.ttft, no_token.prefill_tps) == (1.0, None, None)
    one = RequestMetrics.from_times(1.0, 2.0, [4.0], 5)
    assert (one.ttft, one.itl, one.itl_p50, one.decode_tps, one.prefill_tps) == (3.0, None, None, None, 2.5)
    at_once = RequestMetrics.from_times(1.0, 1.0, [1.0, 1.0], 5)
    assert (at_once.ttft, at_once.itl, at_once.prefill_tps, at_once.decode_tps) == (0.0, 0.0, None, None)
    all_cached = RequestMetrics.from_times(1.0, 1.0, [2.0], 5, cached_tokens=5)
    assert all_cached.prefill_tps is None


@given(gaps=st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_percentiles_are_numpys(gaps):
    times = np.cumsum([5.0, *gaps]).tolist()
    metrics = RequestMetrics.from_times(1.0, 2.0, times, 3)
    gaps = np.diff(times)
    assert metrics.itl == pytest.approx(gaps.mean(), abs=1e-9)
    assert metrics.itl_p50 == pytest.approx(np.percentile(gaps, 50), abs=1e-9)
    assert metrics.itl_p99 == pytest.approx(np.percentile(gaps, 99), abs=1e-9)


def test_numpy_times():
    assert RequestMetrics.from_times(0.0, 1.0, np.array([2.0, 3.0]), 4).itl == 1.0
    assert RequestMetrics.from_times(0.0, 1.0, np.array([]), 4).ttft is None


def test_outputs_are_frozen_and_pickle():
    completion = CompletionOutput(0, "text", [1, 2], finish_reason="length")
    metrics = RequestMetrics.from_times(0.0, 0.0, [1.0], 3)
    output = RequestOutput("7", "prompt", [5], [completion], True, metrics=metrics)
    event = TokenEvent("7", 0, 5, "t")
    for value in (completion, output, event, metrics):
        assert pickle.loads(pickle.dumps(value)) == value
        assert not hasattr(value, "__dict__")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)
    contract = {
        RequestOutput: "request_id prompt prompt_token_ids outputs finished prompt_logprobs metrics",
        CompletionOutput: "index text token_ids logprobs cumulative_logprob finish_reason stop_reason",
        TokenEvent: "request_id index token_id text logprob finish_reason",
        RequestMetrics: "queue_time ttft itl itl_p50 itl_p99 prefill_tps decode_tps cached_tokens",
    }
    for kind, names in contract.items():
        assert [f.name for f in dataclasses.fields(kind)][: len(names.split())] == names.split()  # more may follow


def test_text_of_a_request_for_one():
    first, second = (CompletionOutput(i, f"text {i}", [1, 2], finish_reason="length") for i in range(2))
    assert RequestOutput("7", None, [5], [first], True).text == "text 0"
    with pytest.raises(infinilm.RequestError, match=r"n=1; this one has 2 texts"):
        RequestOutput("7", None, [5], [first, second], True).text  # noqa: B018


def test_what_notebooks_show():
    """One line, however long the text is; in Jupyter the whole text, and nothing in it is markup."""
    completion = CompletionOutput(0, "<b>" + "x" * 100, [1, 2], finish_reason="length")
    output = RequestOutput("7", "a\n< b", [5], [completion], True)
    assert repr(completion) == f"<CompletionOutput '<b>{'x' * 54}...', 2 tokens, length>"
    assert repr(output) == f"<RequestOutput 7: 'a\\n< b' -> {completion!r}>"
    assert "a\n&lt; b<mark>&lt;b&gt;" + "x" * 100 in output._repr_html_()
    assert "3 tokens -> " in repr(RequestOutput("7", None, [5, 6, 7], [], False))
