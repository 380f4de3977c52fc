"""How a model serves many requests at once: a trace of requests of mixed lengths. Called by `infinilm bench --trace`.

The default trace is that of nano-vllm (github.com/GeeeekExplorer/nano-vllm, bench.py): the same draws in the same
order, so that its figures and those of engines measured with it can be set beside these. Nothing is timed here but the
arrivals: the engine notes when each token came (`RequestMetrics.token_times`), so that watching adds no work to a step.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm.bench.limits import cpu_line
from infinilm.errors import ConfigError
from infinilm.planning.sizes import format_bytes
from infinilm.progress import progress_bar
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infinilm.calls.handle import Request
    from infinilm.llm import LLM
    from infinilm.outputs import EngineMetrics, RequestOutput

__all__ = ["Percentiles", "Trace", "TraceResult", "format_trace", "make_trace", "run_trace", "summarise"]

_MAX_TOKEN_ID = 10_000  # nano-vllm's; models with smaller vocabularies take the ids modulo theirs
_TEMPERATURE = 0.6
_TICK_SECONDS = 0.1  # between looks at what is done


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests to come.

    Attributes
    ----------
    prompts : tuple of tuple of int
        Token ids in 0..10000, [num_requests][prompt_len].
    max_tokens : tuple of int
        Tokens each request generates, [num_requests].
    arrivals : tuple of float
        Seconds from the start to each arrival, ascending from 0, [num_requests].
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    arrivals: tuple[float, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(self.max_tokens)

    @property
    def context_needed(self) -> int:
        """Tokens of the longest request, prompt and output together: the least max_model_len."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.max_tokens, strict=True))

    def check_context(self, max_model_len: int) -> None:
        """Raise ConfigError if a request is longer than `max_model_len`."""
        if self.context_needed > max_model_len:
            raise ConfigError(
                f"the longest request of the trace has {self.context_needed} tokens, prompt and output together, but "
                f"the context holds {max_model_len}: pass a larger --max-model-len, or --trace-lengths MIN:MAX with "
                f"MAX <= {max_model_len // 2}"
            )


DEFAULT_LENGTHS = (100, 1024)  # nano-vllm's


def default_lengths(max_model_len: int) -> tuple[int, int]:
    """Least and most tokens of a prompt, and of an output: nano-vllm's, or in proportion what a context holds."""
    least, most = DEFAULT_LENGTHS
    room = max(min(most, max_model_len // 2), 1)
    return max(least * room // most, 1), room


def make_trace(
    *,
    num_requests: int = 256,
    min_len: int = 100,
    max_len: int = 1024,
    seed: int = 0,
    request_rate: float | None = None,
) -> Trace:
    """Draw a trace; the default one has 142,827 prompt tokens and 133,966 output tokens.

    Parameters
    ----------
    num_requests : int
    min_len, max_len : int
        Tokens of a prompt, and of an output: each uniform in min_len..max_len.
    seed : int
        The same seed gives the same requests, whatever the rate.
    request_rate : float, optional
        Requests per second on average, as a Poisson process; None: all at once.

    Raises
    ------
    ConfigError
        A number out of its range.
    """
    if num_requests < 1:
        raise ConfigError(f"num_requests: expected an integer >= 1, got {num_requests}")
    if not 1 <= min_len <= max_len:
        raise ConfigError(f"lengths: expected 1 <= min_len <= max_len, got min_len={min_len}, max_len={max_len}")
    if request_rate is not None and not (math.isfinite(request_rate) and request_rate > 0):
        raise ConfigError(
            f"request_rate: expected requests per second > 0, or None for all at once, got {request_rate}"
        )
    rng = random.Random(seed)
    # The order of the draws is what makes the default trace nano-vllm's: length, then ids, prompt after prompt.
    prompts = tuple(
        tuple(rng.randint(0, _MAX_TOKEN_ID) for _ in range(rng.randint(min_len, max_len))) for _ in range(num_requests)
    )
    max_tokens = tuple(rng.randint(min_len, max_len) for _ in range(num_requests))
    gaps = (0.0 if request_rate is None else rng.expovariate(request_rate) for _ in range(num_requests - 1))
    return Trace(prompts, max_tokens, tuple(itertools.accumulate(gaps, initial=0.0)))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution in five numbers."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Summarise, linear between neighbours as numpy's default; None of nothing."""
        if not len(values):
            return None
        p50, p90, p99, most = np.percentile(values, [50, 90, 99, 100]).tolist()
        return cls(float(np.mean(values)), p50, p90, p99, most)


@dataclass(frozen=True, slots=True)
class TraceResult:
    """What serving a trace took; times in seconds.

    Attributes
    ----------
    num_requests, num_prompt_tokens, num_output_tokens : int
    wall_seconds : float
        From the first arrival to the last token.
    output_tokens_per_second, total_tokens_per_second, requests_per_second : float
        Over the wall time; total is prompts and outputs.
    ttft_seconds, queue_seconds, latency_seconds : Percentiles or None
        Over requests, from the arrival to the first token, to the first step, to the last token.
    itl_seconds : Percentiles or None
        Over all pairs of neighbouring tokens of all requests; None: no request had two tokens.
    prefix_hit_rate : float
        Share of the prompt tokens that the prefix cache held, 0 to 1.
    num_preemptions, num_steps : int
    mean_running : float
        Requests being served, mean over the wall time: begun and not done, the preempted included.
    """

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    ttft_seconds: Percentiles | None
    itl_seconds: Percentiles | None
    queue_seconds: Percentiles | None
    latency_seconds: Percentiles | None
    prefix_hit_rate: float
    num_preemptions: int
    num_steps: int
    mean_running: float


def run_trace(llm: LLM, trace: Trace, *, progress: bool = False) -> TraceResult:
    """Serve a trace and measure it; one short unmeasured request goes first, which reads the weights from disk.

    Parameters
    ----------
    llm : LLM
        With nothing else to do.
    trace : Trace
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Raises
    ------
    ConfigError
        A request is longer than the context.
    Exception
        What made a request fail. Whatever is raised, KeyboardInterrupt too, nothing of the trace runs on.
    """
    trace.check_context(llm.max_model_len)
    vocab_size = llm.config.vocab_size
    prompts = [[token_id % vocab_size for token_id in prompt] for prompt in trace.prompts]
    # Nothing is drafted: random prompts and weights would tell nothing of what drafts gain.
    alike = SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, speculation="off")
    params = [replace(alike, max_tokens=n) for n in trace.max_tokens]
    llm.generate([[0] * min(16, llm.max_model_len - 1)], params[0], use_tqdm=False, max_tokens=2)
    before = llm.metrics()
    requests: list[Request] = []
    submitted: list[float] = []  # perf_counter
    try:
        with progress_bar(trace.num_output_tokens, "trace", "token", wanted=progress) as advance:
            num_shown = before.num_output_tokens

            def update() -> None:
                nonlocal num_shown
                now = llm.metrics()
                advance(now.num_output_tokens - num_shown, f"{now.num_running} running, {now.num_waiting} waiting")
                num_shown = now.num_output_tokens

            started = time.perf_counter()
            for arrival, prompt, param in zip(trace.arrivals, prompts, params, strict=True):
                while (delay := started + arrival - time.perf_counter()) > 0:
                    update()
                    time.sleep(min(delay, _TICK_SECONDS))
                submitted.append(time.perf_counter())
                requests.append(llm.submit(prompt, param))
            while not all(request.done for request in requests):
                update()
                time.sleep(_TICK_SECONDS)  # waiting on a request would wake this thread at each of its tokens
            update()
    finally:
        for request in requests:
            request.cancel()  # nothing to those that are done
    return summarise(submitted, [request.result() for request in requests], before, llm.metrics())


def summarise(
    submitted: Sequence[float], outputs: Sequence[RequestOutput], before: EngineMetrics, after: EngineMetrics
) -> TraceResult:
    """Compute the result from what the requests and the engine noted.

    Parameters
    ----------
    submitted : sequence of float
        When each request arrived, in seconds of one clock.
    outputs : sequence of RequestOutput
        In the same order, all finished.
    before, after : EngineMetrics
        Metrics of the engine before the trace and after it.
    """
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    times = [m.token_times for m in metrics]
    queues = [m.queue_time for m in metrics if m.queue_time is not None]
    latencies = [t[-1] for t in times]
    wall = max(begin + latency for begin, latency in zip(submitted, latencies, strict=True)) - submitted[0]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(map(len, times))
    return TraceResult(
        num_requests=len(outputs),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        wall_seconds=wall,
        output_tokens_per_second=num_output_tokens / wall,
        total_tokens_per_second=(num_prompt_tokens + num_output_tokens) / wall,
        requests_per_second=len(outputs) / wall,
        ttft_seconds=Percentiles.of([t[0] for t in times]),
        itl_seconds=Percentiles.of([b - a for t in times for a, b in itertools.pairwise(t)]),
        queue_seconds=Percentiles.of(queues),
        latency_seconds=Percentiles.of(latencies),
        prefix_hit_rate=sum(m.cached_tokens for m in metrics) / num_prompt_tokens,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        num_steps=after.num_steps - before.num_steps,
        mean_running=(sum(latencies) - sum(queues)) / wall,  # the area under the curve, summed by request
    )


def format_trace(about: Mapping[str, Any], result: TraceResult) -> str:
    """Write a result for people; `about` has what `infinilm bench --trace --json` prints beside it."""
    on = cpu_line(about) if about["devices"][0] == "cpu" else ", ".join(about["devices"])
    rate = about["request_rate"]
    lines = [
        f"{about['model']}: {about['architecture']}, weights {format_bytes(about['weight_bytes'])}, {about['dtype']} "
        f"on {on}",
        f"{result.num_requests} requests {'at once' if rate is None else f'at {rate:g} a second'}, seed "
        f"{about['seed']}, lengths {about['min_len']}..{about['max_len']}: {result.num_prompt_tokens:,} prompt tokens, "
        f"{result.num_output_tokens:,} output tokens",
        f"at most {about['max_num_seqs']} sequences and {about['max_num_batched_tokens']} tokens a step, KV cache "
        f"{format_bytes(about['kv_bytes'])}",
        f"wall time        {result.wall_seconds:10.2f} s",
        f"output tokens/s  {result.output_tokens_per_second:10.1f}",
        f"total tokens/s   {result.total_tokens_per_second:10.1f}",
        f"requests/s       {result.requests_per_second:10.3f}",
        f"{'':17}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        _row("TTFT, ms", result.ttft_seconds, 1e3),
        _row("ITL, ms", result.itl_seconds, 1e3),
        _row("queue time, ms", result.queue_seconds, 1e3),
        _row("latency, s", result.latency_seconds, 1),
        f"prefix hit rate  {result.prefix_hit_rate * 100:10.1f} %",
        f"preemptions      {result.num_preemptions:10d}",
        f"steps            {result.num_steps:10d}",
        f"mean running     {result.mean_running:10.1f}",
    ]
    return "\n".join(lines)


def _row(name: str, values: Percentiles | None, scale: float) -> str:
    if values is None:
        return f"{name:17}{'none':>10}"
    each = (values.mean, values.p50, values.p90, values.p99, values.max)
    return f"{name:17}" + "".join(f"{value * scale:10.2f}" for value in each)
