"""The trace of `infinilm bench --trace`: what is drawn, and what is made of the times."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st
from llm import tiny

from infinilm import LLM
from infinilm.bench.trace import Percentiles, Trace, make_trace, run_trace, summarise
from infinilm.errors import ConfigError
from infinilm.outputs import CompletionOutput, EngineMetrics, RequestMetrics, RequestOutput


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny.make_checkpoint(tmp_path_factory.mktemp("trace")), max_num_seqs=4) as made:
        yield made


# ---- what is drawn ----


def test_the_default_trace_is_nano_vllms() -> None:
    trace = make_trace()
    assert len(trace.prompts) == len(trace.max_tokens) == len(trace.arrivals) == 256
    assert trace.num_output_tokens == 133_966
    assert trace.num_prompt_tokens == 142_827
    assert all(100 <= n <= 1024 for n in (*map(len, trace.prompts), *trace.max_tokens))
    assert trace.prompts[0][:3] == (6311, 6890, 663)
    assert max(max(prompt) for prompt in trace.prompts) <= 10_000
    assert trace.context_needed == max(len(p) + n for p, n in zip(trace.prompts, trace.max_tokens, strict=True))
    assert trace.arrivals == (0.0,) * 256


def test_arrivals_are_poisson_and_repeatable() -> None:
    trace = make_trace(num_requests=2000, min_len=1, max_len=2, seed=3, request_rate=5.0)
    assert trace == make_trace(num_requests=2000, min_len=1, max_len=2, seed=3, request_rate=5.0)
    gaps = np.diff(trace.arrivals)
    assert trace.arrivals[0] == 0
    assert gaps.min() >= 0
    # The mean of 1999 exponential gaps deviates by 1/sqrt(1999) = 2.2%; their deviation is their mean.
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.15)


def test_the_rate_changes_when_but_not_what() -> None:
    slow, fast = (make_trace(num_requests=20, seed=1, request_rate=rate) for rate in (1.0, 4.0))
    assert (slow.prompts, slow.max_tokens) == (fast.prompts, fast.max_tokens)
    assert np.array(slow.arrivals) == pytest.approx(4 * np.array(fast.arrivals))
    assert make_trace(num_requests=20, seed=2).max_tokens != slow.max_tokens


def test_drawing_leaves_the_random_numbers_of_others_alone() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    make_trace(num_requests=3)
    assert random.random() == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"min_len": 0}, "min_len=0"),
        ({"min_len": 9, "max_len": 8}, "min_len=9, max_len=8"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": float("inf")}, "request_rate"),
        ({"request_rate": float("nan")}, "request_rate"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trace(**settings)


# ---- what is made of the times ----


@given(values=st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = Percentiles.of(values)
    expected = [np.percentile(values, p) for p in (50, 90, 99)]
    assert [found.p50, found.p90, found.p99] == pytest.approx(expected)
    assert (found.mean, found.max) == pytest.approx((np.mean(values), max(values)))


def test_percentiles_by_hand() -> None:
    assert Percentiles.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Percentiles(
        3.0, 3.0, pytest.approx(4.6), pytest.approx(4.96), 5.0
    )
    assert Percentiles.of([]) is None


def engine(**changes: int) -> EngineMetrics:
    names = ("num_running", "num_waiting", "num_finished", "num_steps", "num_prompt_tokens", "num_output_tokens")
    names = (*names, "num_preemptions", "num_used_blocks", "num_blocks", "cache_usage", "num_deferred")
    return EngineMetrics(
        **(dict.fromkeys(names, 0) | changes), step_sizes=(), prefix_hit_rate=0.0, prompt_tps=None, output_tps=None
    )


def output(arrival: float, scheduled: float, times: list[float], num_prompt: int, cached: int = 0) -> RequestOutput:
    metrics = RequestMetrics.from_times(arrival, scheduled, times, num_prompt, cached)
    return RequestOutput("0", None, [1] * num_prompt, [CompletionOutput(0, "", [1] * len(times))], True, None, metrics)


def test_summary_by_hand() -> None:
    outputs = [output(10.0, 10.5, [11.0, 12.0, 12.5], 6), output(11.0, 12.0, [13.0, 15.0], 4, cached=1)]
    result = summarise(
        [10.0, 11.0], outputs, engine(num_steps=2, num_preemptions=1), engine(num_steps=9, num_preemptions=4)
    )
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (2, 10, 5)
    assert result.wall_seconds == 5.0
    assert result.output_tokens_per_second == 1.0
    assert result.total_tokens_per_second == 3.0
    assert result.requests_per_second == 0.4
    assert result.ttft_seconds.mean == 1.5
    assert result.queue_seconds == Percentiles.of([0.5, 1.0])
    assert result.latency_seconds == Percentiles.of([2.5, 4.0])
    assert result.itl_seconds == Percentiles.of([1.0, 0.5, 2.0])
    assert result.prefix_hit_rate == 0.1
    assert (result.num_steps, result.num_preemptions) == (7, 3)
    assert result.mean_running == (2.0 + 3.0) / 5.0


def test_no_gaps_between_single_tokens() -> None:
    result = summarise([1.0], [output(1.0, 1.0, [2.0], 3)], engine(), engine())
    assert result.itl_seconds is None
    assert result.ttft_seconds.max == 1.0


# ---- serving ----


def test_a_trace_is_served_whole(llm: LLM) -> None:
    trace = make_trace(num_requests=9, min_len=3, max_len=40)
    result = run_trace(llm, trace)
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (
        9,
        trace.num_prompt_tokens,
        trace.num_output_tokens,
    )
    assert result.num_steps >= max(trace.max_tokens)
    assert 1 < result.mean_running <= 4
    assert 0 < result.ttft_seconds.p50 <= result.ttft_seconds.p99 <= result.latency_seconds.max <= result.wall_seconds
    assert 0 <= result.queue_seconds.p50 < result.ttft_seconds.max
    assert 0 <= result.prefix_hit_rate < 1
    assert llm.metrics().num_running == 0


def test_requests_come_when_they_are_due(llm: LLM) -> None:
    trace = Trace(prompts=((1, 2), (3, 4)), max_tokens=(1, 1), arrivals=(0.0, 0.3))
    result = run_trace(llm, trace)
    assert result.wall_seconds >= 0.3


def test_a_trace_longer_than_the_context(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"131 tokens.*holds 128.*--max-model-len.*MAX <= 64"):
        run_trace(llm, Trace(prompts=((1,) * 100,), max_tokens=(31,), arrivals=(0.0,)))


def test_whatever_ends_it_cancels_the_rest(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, submitted = llm.submit, []

    def interrupted(prompt: list[int], params: object) -> object:
        if len(submitted) == 5:
            raise KeyboardInterrupt
        submitted.append(submit(prompt, params))
        return submitted[-1]

    monkeypatch.setattr(llm, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_trace(llm, make_trace(num_requests=9, min_len=60, max_len=60))
    assert len(submitted) == 5
    assert all(request.result(timeout=300).outputs[0].finish_reason in ("abort", "length") for request in submitted)
    assert any(request.result().outputs[0].finish_reason == "abort" for request in submitted)
