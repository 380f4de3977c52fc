"""Prometheus metrics with the names and meanings of vLLM, under the prefix `infinilm:`.

They are counted when they are asked for. The engine notes when each token came (`Sequence.token_times`), and a look at
`/metrics` takes in what is new since the last look, of the answers that run as well. So counters move while an answer
is made, every gap between two tokens is observed, and a token costs the event loop nothing on its way to the client.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from infinilm.calls import AsyncRequests
from infinilm.llm import LLM
from infinilm.outputs import EngineMetrics
from infinilm.requests.request import Completion, GenerationRequest
from infinilm.server.records import Phases, Record, phases

__all__ = ["HttpCounter", "LoadedModels", "Metrics", "render"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = tuple(2.0**power for power in range(18))
_FEW = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_LARGEST_STEP = 14  # buckets for steps of up to 2^14 tokens, as vLLM has them


class _Histogram:
    """Counts values by buckets, one at a time or many at once; prometheus_client takes them one at a time alone."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self._name, self._about, self._bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_gaps(self, times: Sequence[float]) -> None:
        """Count the differences between points in time, ascending, in seconds."""
        if len(times) > 1:
            gaps = np.diff(np.array(times))
            found = np.bincount(np.searchsorted(self._bounds, gaps), minlength=len(self._counts)).tolist()
            self._counts = [count + new for count, new in zip(self._counts, found, strict=True)]
            self._sum += times[-1] - times[0]

    def family(self, model_name: str) -> Metric:
        """What is told of it."""
        return _histogram(self._name, self._about, model_name, self._bounds, self._counts, self._sum)


class _Following:
    """A call that runs, and how much of it has been counted: prompts that were scheduled, and that were computed."""

    def __init__(self, running: AsyncRequests) -> None:
        self.requests = running.requests
        self.scheduled: set[GenerationRequest] = set()
        self.computed: set[GenerationRequest] = set()
        self.num_tokens: Counter[Completion] = Counter()  # generated


class Metrics(Collector):
    """Counters of finished work, and gauges of running work.

    Parameters
    ----------
    model_name : str
        A label of everything.

    Attributes
    ----------
    num_refused : int
        Requests for which the queue had no room.
    http : HttpCounter
    """

    def __init__(self, model_name: str) -> None:
        self._name = model_name
        self.http = HttpCounter("infinilm:")
        self._llm: LLM | None = None
        self._engine: EngineMetrics | None = None  # of the look that is being answered
        self._following: dict[AsyncRequests, _Following] = {}
        self.num_refused = 0
        self._num_prompt_tokens = self._num_generated = self._num_queried = self._num_cached = 0
        self._num_finished: Counter[str] = Counter()  # sequences, by the reason of their end
        made: list[_Histogram] = []

        def histogram(name: str, about: str, bounds: Sequence[float]) -> _Histogram:
            made.append(_Histogram(f"infinilm:{name}", about, bounds))
            return made[-1]

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Between a token and the one before it.", _SECONDS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first, of a sequence.", _SECONDS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self._inference = histogram("request_inference_time_seconds", "From the first step to the end.", _SECONDS)
        self._prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_length = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._n = histogram("request_params_n", "The parameter n.", _FEW)
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", _TOKENS)
        self._preempted = histogram("request_num_preemptions", "Times a sequence was preempted.", _FEW)
        self._histograms = tuple(made)

    def serve(self, llm: LLM | None) -> None:
        """Tell of this model from now on, or of none."""
        self._llm = llm

    def count_prompts(self, num_tokens: int) -> None:
        """Count prompts of so many tokens that were computed for vectors, scores or labels."""
        self._num_prompt_tokens += num_tokens

    def follow(self, running: AsyncRequests) -> None:
        """Count what a call does."""
        self._following[running] = _Following(running)

    def finish(self, running: AsyncRequests) -> None:
        """Count the rest of a call, and that it has ended."""
        following = self._following.pop(running)
        self._take(following)
        for request in following.requests:
            params, leader = request.leader.params, request.leader
            self._n.observe(params.n)
            if params.max_tokens is not None:
                self._max_tokens.observe(params.max_tokens)
            self._prompt_length.observe(len(leader.prompt_token_ids))
            for number, completion in enumerate(request.completions):
                self._finish(completion, phases(request, number))

    def _finish(self, completion: Completion, found: Phases | None) -> None:
        """Count the end of a sequence; `found`: None if it was never scheduled."""
        num_tokens = len(completion.sequence.token_times)
        self._num_finished[completion.finish_reason or "abort"] += 1
        self._output_length.observe(num_tokens)
        self._preempted.observe(completion.sequence.num_preemptions)
        if found is not None:
            self._queue.observe(found.queue)
        if found is not None and found.has_tokens:
            self._e2e.observe(found.e2e)
            self._prefill.observe(found.prefill)
            self._decode.observe(found.decode)
            self._inference.observe(found.inference)
            if num_tokens > 1:
                self._tpot.observe(found.decode / (num_tokens - 1))

    def _take(self, following: _Following) -> None:
        """Count what is new of a call. The engine thread may add tokens meanwhile: they are counted next time."""
        for request in following.requests:
            leader, first = request.leader, request.completions[0].sequence
            if leader.first_scheduled and request not in following.scheduled:
                following.scheduled.add(request)
                self._num_queried += len(leader.prompt_token_ids)
                self._num_cached += leader.cached_tokens
            if first.token_times and request not in following.computed:
                following.computed.add(request)
                self._num_prompt_tokens += len(leader.prompt_token_ids)
            for completion in request.completions:
                counted = following.num_tokens[completion]
                times = completion.sequence.token_times[max(counted - 1, 0) :]
                if not counted and times:
                    self._ttft.observe(times[0] - request.arrival)
                self._itl.observe_gaps(times)
                num_new = len(times) - bool(counted)
                self._num_generated += num_new
                following.num_tokens[completion] += num_new

    def look(self, engine: EngineMetrics | None) -> Metrics:
        """Tell of this state of the engine, if there is one, when metrics are collected next; returns itself."""
        self._engine = engine
        return self

    def collect(self) -> Iterator[Metric]:
        """All that is told now."""
        for following in self._following.values():
            self._take(following)
        yield from (histogram.family(self._name) for histogram in self._histograms)
        finished = CounterMetricFamily(
            "infinilm:request_success", "Sequences that ended.", labels=["model_name", "finished_reason"]
        )
        for reason in sorted({"stop", "length", "abort", "error"} | self._num_finished.keys()):
            finished.add_metric([self._name, reason], self._num_finished[reason])
        yield finished
        yield self._counter("prompt_tokens", "Tokens of prompts that were computed or cached.", self._num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self._num_generated)
        yield self._counter("prefix_cache_queries", "Tokens of prompts looked for in the cache.", self._num_queried)
        yield self._counter("prefix_cache_hits", "Tokens of prompts found in the cache.", self._num_cached)
        yield self._counter("requests_refused", "Requests refused because the queue was full.", self.num_refused)
        if self._engine is not None:
            yield from self._of_engine(self._engine)
        if self._llm is not None:
            yield from self._of_model(self._llm)

    def _of_engine(self, engine: EngineMetrics) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Sequences that run.", engine.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", engine.num_waiting)
        waiting = GaugeMetricFamily(
            "infinilm:num_requests_waiting_by_reason",
            "Sequences that wait: for room (capacity), or behind another one of their prompt (deferred).",
            labels=["model_name", "reason"],
        )
        waiting.add_metric([self._name, "capacity"], engine.num_waiting - engine.num_deferred)
        waiting.add_metric([self._name, "deferred"], engine.num_deferred)
        yield waiting
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", engine.cache_usage)
        queried, hits = engine.num_external_queried_tokens, engine.num_external_hit_tokens
        yield self._counter(
            "external_prefix_cache_queries", "Tokens of prompts looked for in host memory and on disk.", queried
        )
        yield self._counter("external_prefix_cache_hits", "Tokens of prompts that came from there.", hits)
        yield self._counter(
            "num_preemptions", "Sequences computed again for lack of blocks, or behind a query.", engine.num_preemptions
        )
        yield self._counter("spec_decode_num_drafts", "Drafts that steps have verified.", engine.num_drafts)
        drafted, accepted = engine.num_draft_tokens, engine.num_accepted_tokens
        yield self._counter("spec_decode_num_draft_tokens", "Tokens of these drafts.", drafted)
        yield self._counter("spec_decode_num_accepted_tokens", "Those of them that were right.", accepted)
        by_position = CounterMetricFamily(
            "infinilm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens at this position of a draft, from 0, that were right.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(engine.accepted_at):
            by_position.add_metric([self._name, str(position)], count)
        yield by_position
        sizes = engine.step_sizes
        counts = [*sizes[: _LARGEST_STEP + 1], sum(sizes[_LARGEST_STEP + 1 :])]
        total = engine.num_prompt_tokens + engine.num_output_tokens
        bounds = _TOKENS[: _LARGEST_STEP + 1]
        yield _histogram("infinilm:iteration_tokens_total", "Tokens of a step.", self._name, bounds, counts, total)

    def _of_model(self, llm: LLM) -> Iterator[Metric]:
        memory = llm.memory
        yield self._info(
            "cache_config_info",
            "The KV cache.",
            {
                "block_size": str(memory.block_size),
                "num_gpu_blocks": str(memory.num_blocks),  # as vLLM calls it, wherever they are
                "cache_dtype": memory.kv_cache_dtype,
                "sliding_window": str(memory.sliding_window or None),
            },
            1,
        )
        if llm.loras:
            running, waiting = set[str](), set[str]()
            for following in self._following.values():
                for request in following.requests:
                    if (name := request.leader.params.lora) is not None:
                        (running if request.leader.first_scheduled else waiting).add(name)
            yield self._info(
                "lora_requests_info",
                "Adapters that requests run and wait for; its value is the time.",
                {
                    "max_lora": str(len(llm.loras)),
                    "running_lora_adapters": ",".join(sorted(running)),
                    "waiting_lora_adapters": ",".join(sorted(waiting)),
                },
                time.time(),
            )

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"infinilm:{name}", about, labels=["model_name"])
        family.add_metric([self._name], value)
        return family

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        return self._info(name, about, {}, value)

    def _info(self, name: str, about: str, labels: Mapping[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(f"infinilm:{name}", about, labels=["model_name", *labels])
        family.add_metric([self._name, *labels.values()], value)
        return family


class _Together(Collector):
    """The metrics of several collectors, each once: the text format has the values of one metric in one place."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        """All that is told now."""
        by_name: dict[str, Metric] = {}
        for metric in (metric for collector in self._collectors for metric in collector.collect()):
            if metric.name in by_name:
                by_name[metric.name].samples += metric.samples
            else:
                by_name[metric.name] = metric
        yield from by_name.values()


class LoadedModels(Collector):
    """Which of several models are in memory.

    Parameters
    ----------
    models : callable
        Gives the name of each, whether it is loaded, and how often it was.
    """

    def __init__(self, models: Callable[[], Sequence[tuple[str, bool, int]]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """All that is told now."""
        loaded = GaugeMetricFamily("infinilm:model_loaded", "1: the model is in memory.", labels=["model_name"])
        loads = CounterMetricFamily("infinilm:model_loads", "Times a model was loaded.", labels=["model_name"])
        for name, is_loaded, num_loads in self._models():
            loaded.add_metric([name], float(is_loaded))
            loads.add_metric([name], num_loads)
        yield from (loaded, loads)


def render(collectors: Sequence[Collector]) -> bytes:
    """The text format of what they tell now."""
    registry = CollectorRegistry()
    registry.register(_Together(collectors))
    return generate_latest(registry)


class HttpCounter(Collector):
    """Requests of HTTP by method, route and status: those that failed or were refused among them.

    Parameters
    ----------
    prefix : str
        The beginning of the metric's name.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, record: Record) -> None:
        """Count a request that has ended."""
        self._counts[record.method, record.handler, str(record.status)] += 1

    def collect(self) -> Iterator[Metric]:
        """All that is told now."""
        family = CounterMetricFamily(
            f"{self._prefix}http_requests",
            "Requests of HTTP; 499: the client left.",
            labels=["method", "handler", "status"],
        )
        for labels, count in sorted(self._counts.items()):
            family.add_metric(labels, count)
        yield family


def _histogram(
    name: str, about: str, model_name: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """A histogram of the text format; `counts`: of each bucket, the last without an upper bound."""
    family = HistogramMetricFamily(name, about, labels=["model_name"])
    cumulated = np.cumsum(counts).tolist()
    buckets = [(str(bound), count) for bound, count in zip([*bounds, "+Inf"], cumulated, strict=True)]
    family.add_metric([model_name], buckets, total)
    return family
