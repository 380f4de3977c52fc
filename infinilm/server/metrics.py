"""Prometheus metrics, named as dashboards for vLLM expect them, with the prefix `infinilm:`."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from infinilm.outputs import EngineMetrics, RequestOutput

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = tuple(2.0**power for power in range(18))


class Metrics:
    """What the server has done, and what it does now.

    Parameters
    ----------
    model_name : str
        A label of everything.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._name = model_name
        self._finished = Counter(
            "infinilm:request_success",
            "Sequences that ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter("prefix_cache_hits", "Tokens of prompts found in the cache.")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts looked for in the cache.")
        self._preemptions = self._gauge("num_preemptions_total", "Sequences computed again for lack of blocks.")
        self.refused = self._counter("requests_refused", "Requests refused because the queue was full.")
        self._num_running = self._gauge("num_requests_running", "Sequences that run.")
        self._num_waiting = self._gauge("num_requests_waiting", "Sequences that wait.")
        self._cache_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Mean time between the tokens of a request.", _SECONDS
        )
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"infinilm:{name}", about, ["model_name"], registry=self._registry).labels(self._name)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"infinilm:{name}", about, ["model_name"], registry=self._registry).labels(self._name)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"infinilm:{name}", about, ["model_name"], buckets=buckets, registry=self._registry).labels(
            self._name
        )

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Count requests that have ended."""
        for output in outputs:
            num_prompt = len(output.prompt_token_ids)
            self._prompt_tokens.inc(num_prompt)
            self._queries.inc(num_prompt)
            self._prompt_length.observe(num_prompt)
            for choice in output.outputs:
                self._finished.labels(self._name, choice.finish_reason or "abort").inc()
                self._generation_tokens.inc(len(choice.token_ids))
                self._output_length.observe(len(choice.token_ids))
            metrics = output.metrics
            if metrics is None:
                continue
            self._cached_tokens.inc(metrics.cached_tokens)
            for histogram, value in (
                (self._ttft, metrics.ttft),
                (self._itl, metrics.itl),
                (self._queue, metrics.queue_time),
            ):
                if value is not None:
                    histogram.observe(value)
            if metrics.token_times:
                self._e2e.observe(metrics.token_times[-1])

    def render(self, engine: EngineMetrics | None) -> bytes:
        """The text format; `engine`: the state of the engine now, if there is one."""
        if engine is not None:
            self._num_running.set(engine.num_running)
            self._num_waiting.set(engine.num_waiting)
            self._cache_usage.set(engine.cache_usage)
            self._preemptions.set(engine.num_preemptions)
        return generate_latest(self._registry)
