"""Spans of OpenTelemetry: one for each request of HTTP, and in it those of what the engine did, as vLLM writes them.

A span is written when its request has ended, from the times that were noted in any case, so that requests pay nothing
for traces on their way. A router that passes on a request begins its span before that, as the server needs its id.

This module is imported only where traces are wanted: it needs the extra `otel`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from infinilm.requests.request import GenerationRequest
from infinilm.server.records import Record, phases

__all__ = ["Traces"]


class Traces:
    """Writes the spans of a server or router.

    Parameters
    ----------
    name : str
        The name of the service, where `OTEL_SERVICE_NAME` does not say another one.
    model_name : str
    exporter : SpanExporter
        Where they go. How many are kept is decided by `OTEL_TRACES_SAMPLER`, as in all programs that use the SDK.
    """

    def __init__(self, name: str, model_name: str, exporter: SpanExporter) -> None:
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", name)})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("infinilm")
        self._model_name = model_name

    @classmethod
    def to(cls, endpoint: str, name: str, model_name: str) -> Traces:
        """Send them to a collector: OTLP over HTTP, at the whole address of its traces."""
        return cls(name, model_name, OTLPSpanExporter(endpoint=endpoint))

    def headers(self, record: Record) -> dict[str, str]:
        """What a request that is sent on for this one has to carry (W3C Trace Context): that it is part of its span."""
        carrier: dict[str, str] = {}
        inject(carrier, set_span_in_context(self._span_of(record)))
        return carrier

    def end(self, record: Record) -> None:
        """Write the spans of a request that has ended."""
        span = self._span_of(record)
        span.set_attribute("http.response.status_code", record.status)
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        if record.running is not None:
            context = set_span_in_context(span)
            for request in record.running.requests:
                self._write(request, record.request_id, context)
        span.end(_nanoseconds(record.ended))

    def close(self) -> None:
        """Send what has not been sent; takes seconds where no collector answers."""
        self._provider.shutdown()

    def _span_of(self, record: Record) -> Span:
        if record.span is None:
            attributes: Mapping[str, str] = {
                "http.request.method": record.method,
                "http.route": record.handler,
                "url.path": record.path,
                "gen_ai.request.id": record.request_id,
            }
            record.span = self._tracer.start_span(
                f"{record.method} {record.handler}",
                extract(record.headers),
                SpanKind.SERVER,
                attributes,
                start_time=_nanoseconds(record.began),
            )
        span: Span = record.span
        return span

    def _write(self, request: GenerationRequest, request_id: str, context: Context) -> None:
        """The span of a prompt with its answers, and those of its phases, which are of the first answer."""
        found = phases(request, 0)
        if found is None:
            return
        params = request.leader.params
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": params.lora or self._model_name,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(request.leader.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(c.sequence.token_times) for c in request.completions),
            "gen_ai.usage.num_sequences": len(request.completions),
            "gen_ai.latency.time_in_queue": found.queue,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if found.has_tokens:
            attributes |= {
                "gen_ai.latency.time_to_first_token": found.ttft,
                "gen_ai.latency.e2e": found.e2e,
                "gen_ai.latency.time_in_model_prefill": found.prefill,
                "gen_ai.latency.time_in_model_decode": found.decode,
                "gen_ai.latency.time_in_model_inference": found.inference,
            }
        moment = _nanoseconds(request.arrival)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER, attributes, start_time=moment)
        inner = set_span_in_context(span)
        parts = [("queue", found.queue)]
        parts += [("prefill", found.prefill), ("decode", found.decode)] if found.has_tokens else []
        for name, seconds in parts:
            part = self._tracer.start_span(name, inner, start_time=moment)
            moment += round(seconds * 1e9)
            part.end(moment)
        span.end(moment)


def _nanoseconds(moment: float) -> int:
    """Since 1970, of a moment of perf_counter."""
    return time.time_ns() - int((time.perf_counter() - moment) * 1e9)
