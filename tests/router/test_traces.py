"""Spans of a server and of a router in front of it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from llm import tiny
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server.support import SECONDS, hosted

from infinilm import LLM
from infinilm.cli.main import main
from infinilm.server.traces import Traces
from router.support import routed
from router.test_failures import HEADERS

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_trace(tmp_path: Path, stream: bool) -> None:
    """The client's, over the router's span and the server's, to the phases of the engine, which follow each other."""
    exporters = InMemorySpanExporter(), InMemorySpanExporter()
    of_router, of_server = (Traces(name, "tiny", exporter) for name, exporter in zip("rs", exporters, strict=True))
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "n": 2, "ignore_eos": True, "stream": stream}
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    with LLM(tiny.make_checkpoint(tmp_path)) as llm, hosted(llm) as host:
        host.service.traces = of_server
        with routed((host.url, None), traces=of_router) as router:
            answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=HEADERS | parent, timeout=SECONDS)
            assert answer.status_code == 200
            assert httpx.get(f"{router.url}/nothing", headers=HEADERS, timeout=SECONDS).status_code == 404
    spans: dict[str, ReadableSpan] = {}
    for traces, exporter in zip((of_router, of_server), exporters, strict=True):
        traces.close()
        for span in exporter.get_finished_spans():
            assert span.context is not None
            if f"{span.context.trace_id:032x}" == TRACE:
                spans[f"{span.resource.attributes['service.name']} {span.name}"] = span
    assert set(spans) == {"r POST /v1/completions", "s POST /v1/completions"} | {
        f"s {name}" for name in ("llm_request", "queue", "prefill", "decode")
    }
    first, second, inner = (
        spans[name] for name in ("r POST /v1/completions", "s POST /v1/completions", "s llm_request")
    )
    assert first.parent is not None and f"{first.parent.span_id:016x}" == PARENT
    assert second.parent is not None and first.context is not None and second.parent.span_id == first.context.span_id
    assert inner.parent is not None and second.context is not None and inner.parent.span_id == second.context.span_id
    told = dict(inner.attributes or {})
    expected = {"request.id": "mine", "request.n": 2, "request.max_tokens": 4, "usage.completion_tokens": 8}
    assert {name: told[f"gen_ai.{name}"] for name in expected} == expected
    assert dict(second.attributes or {})["http.response.status_code"] == 200
    parts = [spans[f"s {name}"] for name in ("queue", "prefill", "decode")]
    assert [one.end_time for one in parts[:2]] == [one.start_time for one in parts[1:]]
    times = [told[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_inference", "e2e")]
    assert times[0] + times[1] == pytest.approx(times[2])  # type: ignore[operator]


def test_addresses_of_collectors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--otlp-endpoint", "localhost:4317"]) == 2
    assert "http://localhost:4318" in capsys.readouterr().err
