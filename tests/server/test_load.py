"""Many clients, clients that leave, hang or send what they should not: none harms another."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinilm import LLM, EngineDeadError, HookRegistry, RequestLimits
from infinilm.server import app, service
from server.support import SECONDS, Gate, Hosted, gauge, hosted, http_get, http_options, http_post, wait_for

LONG = {"model": "tiny", "prompt": "the", "max_tokens": 120, "ignore_eos": True}
MAX_NUM_SEQS = 4


MESSAGES: Any = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, max_num_seqs=MAX_NUM_SEQS, seed=0) as made:
        yield made


@pytest.fixture
def host(llm: LLM) -> Iterator[Hosted]:
    with hosted(llm) as running:
        yield running


def raw(host: Hosted, path: str, body: dict[str, Any], *, cut: int | None = None) -> socket.socket:
    """A connection over which a request was sent, the last `cut` bytes of it left out."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    address, port = host.url.removeprefix("http://").split(":")
    connection = socket.create_connection((address, int(port)), timeout=SECONDS)
    message = head.encode() + data
    connection.sendall(message[: len(message) - cut] if cut else message)
    return connection


def post(host: Hosted, **body: Any) -> httpx.Response:
    return httpx.post(f"{host.url}/v1/completions", json={"model": "tiny", "prompt": "x", **body}, timeout=SECONDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_who_leaves_is_cancelled(host: Hosted, llm: LLM, stream: bool, waiting: bool) -> None:
    """Also one that was never told a token, since others run."""
    with Gate(llm) as gate:
        num_others = 1 if waiting else 0  # in a step that is held up, which no request can join
        others = [raw(host, "/v1/completions", LONG | {"stream": True}) for _ in range(num_others)]
        wait_for(lambda: gauge(host.url, "num_requests_running") == num_others)
        leaver = raw(host, "/v1/completions", LONG | {"stream": stream})
        name = "num_requests_waiting" if waiting else "num_requests_running"
        wait_for(lambda: gauge(host.url, name) == 1)
        before = llm.metrics().num_output_tokens
        leaver.close()
        if waiting:
            wait_for(lambda: gauge(host.url, name) == 0 or not host.service._num_admitted > num_others)
        else:
            wait_for(lambda: host.service._num_admitted == 0)
        gate.open()
        for other in others:
            other.close()
        wait_for(lambda: gauge(host.url, "num_requests_running") == 0 == gauge(host.url, "num_requests_waiting"))
        assert waiting or llm.metrics().num_output_tokens <= before + 2
    assert post(host, max_tokens=2).status_code == 200


def test_slow_senders_and_readers_hold_nobody_up(host: Hosted) -> None:
    idle = [raw(host, "/v1/completions", LONG, cut=5) for _ in range(100)]
    readers = [raw(host, "/v1/completions", LONG | {"stream": True, "logprobs": 20}) for _ in range(8)]
    for _ in range(3):
        assert post(host, max_tokens=3).status_code == 200
    wait_for(lambda: gauge(host.url, "num_requests_running") == 0)
    for connection in idle + readers:
        connection.close()
    wait_for(lambda: host.service._num_admitted == 0)


def test_many_streams_at_once(host: Hosted) -> None:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 20, "stream": True, "seed": 3, "ignore_eos": True}

    async def read(client: httpx.AsyncClient) -> str:
        text = ""
        async with client.stream("POST", f"{host.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
            assert last == "data: [DONE]"
        return text

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=SECONDS, limits=limits) as client:
            return await asyncio.gather(*(read(client) for _ in range(256)))

    assert set(asyncio.run(main())) == {post(host, **{**body, "stream": False}).json()["choices"][0]["text"]}


def test_a_full_queue(llm: LLM) -> None:
    with hosted(llm, max_queued_requests=2) as host, Gate(llm) as gate:
        running = [raw(host, "/v1/completions", LONG)]
        wait_for(lambda: gauge(host.url, "num_requests_running") == 1)
        num_waiting = MAX_NUM_SEQS - 1 + 2  # those that can run with the first one wait for the step that is held up
        waiting = [raw(host, "/v1/completions", LONG) for _ in range(num_waiting)]
        wait_for(lambda: gauge(host.url, "num_requests_waiting") == num_waiting)
        for stream in (False, True):
            refused = post(host, stream=stream)
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert gauge(host.url, "requests_refused_total") == 2
        assert http_get(f"{host.url}/health").status_code == 200
        gate.open()
        for connection in running + waiting:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.close()


@pytest.mark.parametrize("max_queued", [0, 3])
def test_requests_that_come_together_fill_the_queue(llm: LLM, max_queued: int) -> None:
    """Requests of which the engine has not heard count as well; as many as it can run at a time do not wait."""

    names = ("num_requests_running", "num_requests_waiting", "requests_refused_total")
    with hosted(llm, max_queued_requests=max_queued) as host, ThreadPoolExecutor(12) as pool, Gate(llm) as gate:
        answers = [pool.submit(post, host, max_tokens=3) for _ in range(12)]
        wait_for(lambda: sum(gauge(host.url, name) for name in names) == 12)
        gate.open()
        found = sorted(answer.result().status_code for answer in answers)
    num_served = MAX_NUM_SEQS + max_queued
    assert found == [200] * num_served + [429] * (12 - num_served)


def test_a_call_of_many_sequences(llm: LLM) -> None:
    """All of them count, beside others; alone it is served, as it would never be otherwise."""
    num_seqs = MAX_NUM_SEQS + 1
    with hosted(llm, max_queued_requests=0) as host:
        with Gate(llm) as gate:
            running = raw(host, "/v1/completions", LONG)
            wait_for(lambda: gauge(host.url, "num_requests_running") == 1)
            refused = post(host, n=num_seqs, max_tokens=1)
            assert refused.status_code == 429 and f"{num_seqs} more were asked for" in refused.text
            gate.open()
            running.close()
        wait_for(lambda: host.service._num_admitted == 0 and gauge(host.url, "num_requests_running") == 0)
        assert len(post(host, n=num_seqs, max_tokens=1).json()["choices"]) == num_seqs


def test_what_the_library_refuses_as_too_much(tiny_folder: Path) -> None:
    limits = RequestLimits(max_queued_seqs=0)
    with LLM(tiny_folder, max_num_seqs=1, limits=limits) as llm, hosted(llm) as host, Gate(llm) as gate:
        running = raw(host, "/v1/completions", LONG)
        wait_for(lambda: gauge(host.url, "num_requests_running") == 1)
        refused = post(host)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        gate.open()
        running.close()


def test_too_many_prompt_tokens(llm: LLM) -> None:
    with hosted(llm, max_queued_tokens=50) as host, Gate(llm) as gate:
        first = raw(host, "/v1/completions", LONG | {"prompt": "x" * 60})  # alone it may be as long as it likes
        wait_for(lambda: gauge(host.url, "num_requests_running") == 1)
        assert post(host).status_code == 429
        gate.open()
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        first.close()
        wait_for(lambda: host.service._num_admitted == 0)
        assert post(host, max_tokens=1).status_code == 200


def test_a_prompt_that_is_computed_waits_no_more(llm: LLM) -> None:
    """Also where no client reads what it gives."""
    with hosted(llm, max_queued_tokens=50) as host:
        slow = raw(host, "/v1/completions", LONG | {"prompt": "x" * 60, "n": 64, "stream": True, "logprobs": 20})
        wait_for(lambda: gauge(host.url, "num_requests_running") > 0)
        wait_for(lambda: gauge(host.url, "num_requests_running") == 0)
        assert host.service._num_admitted == 1  # its answer is more than the system takes in for it
        assert post(host, max_tokens=1).status_code == 200
        slow.close()
        wait_for(lambda: host.service._num_admitted == 0)


def test_embeddings_are_bounded_as_all_is(llm: LLM) -> None:
    """They wait in the same queue, and end with their client; `test_time_limit` has their time."""
    body = {"model": "tiny", "input": "x" * 40}
    with Gate(llm) as gate, hosted(llm, max_queued_tokens=50) as holding:
        holder = raw(holding, "/v1/completions", LONG)
        wait_for(lambda: gauge(holding.url, "num_requests_running") == 1)
        with hosted(llm, max_queued_tokens=50) as host:
            leaver = raw(host, "/v1/embeddings", body)
            wait_for(lambda: host.service._num_admitted == 1)
            refused = httpx.post(f"{host.url}/v1/embeddings", json=body, timeout=SECONDS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            leaver.close()
            wait_for(lambda: host.service._num_admitted == 0)
            gate.open()
            assert httpx.post(f"{host.url}/v1/embeddings", json=body, timeout=SECONDS).status_code == 200
        holder.close()


def test_streams_are_not_silent(llm: LLM) -> None:
    """While a prompt waits or is computed something comes now and then, which clients pass over."""
    asked: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "x"},
        "chat/completions": {"messages": MESSAGES},
        "responses": {"input": "x"},
        "messages": {"messages": MESSAGES, "max_tokens": 3},
    }
    with hosted(llm, sse_ping_interval=0.02) as host, httpx.Client(timeout=SECONDS) as client:
        for path, body in asked.items():
            url, body = f"{host.url}/v1/{path}", {**body, "seed": 1, "stream": True, "temperature": 0}
            want = client.post(url, json=body | {"stream": False}).json()
            filler = 'event: ping\ndata: {"type":"ping"}' if path == "messages" else ": ping"
            with Gate(llm) as gate, client.stream("POST", url, json=body) as answer:
                text = ""
                for piece in answer.iter_text():
                    text += piece
                    if text.count(filler) > 2:
                        gate.open()
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert text.replace(f"{filler}\n\n", "").startswith(("data: {", "event: ")), path
            if path == "completions":
                assert "".join(event["choices"][0]["text"] for event in events) == want["choices"][0]["text"]


@pytest.fixture(scope="module")
def hurried(tiny_folder: Path) -> Iterator[LLM]:
    """Takes 50 ms for each step of at most 4 tokens, and gives a request 200."""
    registry, limits = HookRegistry(), RequestLimits(max_seconds=0.2)
    registry.register_hook("embedding", lambda *_: time.sleep(0.05))
    with LLM(tiny_folder, max_num_seqs=4, max_num_batched_tokens=4, hooks=registry, limits=limits) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_time_limit(hurried: LLM, stream: bool) -> None:
    """While they run and while they wait: one error each, and nothing of them is left."""
    with hosted(hurried) as host, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(host, stream=stream, max_tokens=100, ignore_eos=True), range(8)))
        for answer in answers:
            if stream:
                assert answer.status_code == 200
                *_, last, rest = answer.text.split("\n\n")
                error = json.loads(last.removeprefix("data: "))["error"]
                assert not rest and "[DONE]" not in answer.text
            else:
                assert answer.status_code == 504
                error = answer.json()["error"]
            assert error["code"] == "timeout" and "0.2 s" in error["message"]
        metrics = http_get(f"{host.url}/metrics").text
        assert re.search(r'^infinilm:request_success_total{.*"error".*} 8\.0$', metrics, re.MULTILINE), metrics
        handler = 'handler="/v1/completions",method="POST"'
        assert (
            f'infinilm:http_requests_total{{{handler},status="504"}} 8.0' in metrics and 'status="200"' not in metrics
        )
        if stream:  # Anthropic's errors name the request, in streams as well
            body = {"model": "tiny", "stream": True, "max_tokens": 100, "ignore_eos": True, "messages": MESSAGES}
            answer = httpx.post(f"{host.url}/v1/messages", json=body, timeout=SECONDS)
            told = json.loads(answer.text.split("data: ")[-1])
            assert told["error"]["type"] == "timeout_error"
            assert told["request_id"] == answer.headers["request-id"]
        else:
            answer = http_post(f"{host.url}/v1/embeddings", json={"model": "tiny", "input": list(range(3, 83))})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        wait_for(lambda: gauge(host.url, "num_requests_running") == 0 == gauge(host.url, "num_requests_waiting"))
        assert host.service._num_admitted == 0 == hurried.metrics().num_used_blocks


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_request_that_fails_is_one_error(
    host: Hosted, llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool, endpoint: str
) -> None:
    make = llm._requests.make

    def failing(prompts: Any, params: Any, sampling: Any) -> Any:
        def fail(token_ids: Any, logits: Any) -> Any:
            raise OSError("on purpose")

        return make(prompts, params, {**sampling, "logits_processor": fail})

    monkeypatch.setattr(llm._requests, "make", failing)
    prompt: dict[str, Any] = (
        {"prompt": "x"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {"model": "tiny", "stream": stream, "n": 2, **prompt}
    answer = httpx.post(f"{host.url}/v1/{endpoint}", json=body, timeout=SECONDS)
    if stream:
        events = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event]
        assert [list(event) for event in events if "error" in event] == [["error"]]
        error = events[-1]["error"]
    else:
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert error["type"] == "server_error" and "on purpose" in error["message"]
    monkeypatch.undo()
    assert post(host, max_tokens=1).status_code == 200


def test_a_completion_without_a_limit_is_short(host: Hosted) -> None:
    """As OpenAI's, where the model says nothing else."""
    assert post(host, ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    assert post(host, ignore_eos=True, min_tokens=20).json()["usage"]["completion_tokens"] == 20


def test_limits_that_do_not_fit_are_named(host: Hosted) -> None:
    for fields, name, why in (
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens=4"),
        ({"min_tokens": 10**6}, "min_tokens", "room behind the prompt"),
        ({"stop": "x" * 10_000}, "stop", "at most 1024"),
    ):
        answer = post(host, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert why in answer.json()["error"]["message"]


def test_one_prompt_of_several_that_fails(host: Hosted, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half of an answer is taken for a whole one."""
    make = llm._requests.make

    def failing(prompts: Any, params: Any, sampling: Any) -> Any:
        def fail(token_ids: Any, logits: Any) -> Any:
            if list(token_ids[: len(prompts[1])]) == list(prompts[1]):
                raise OSError("on purpose")
            return logits

        return make(prompts, params, {**sampling, "logits_processor": fail})

    monkeypatch.setattr(llm._requests, "make", failing)
    answer = post(host, prompt=["x", "y"])
    assert answer.status_code == 500 and "on purpose" in answer.json()["error"]["message"]


def test_a_stream_that_breaks_has_no_end(host: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen error in the middle of it closes the connection."""

    def broken(*_: Any) -> Any:
        raise SystemError("a secret")

    monkeypatch.setattr("infinilm.server.app.sent_event", broken)
    monkeypatch.setattr("infinilm.server.completions.CompletionStream.push", broken)
    with pytest.raises(httpx.RemoteProtocolError):
        post(host, stream=True)


ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the", "logprobs": 2, "echo": True, "max_tokens": 8},
    "/v1/chat/completions": {"messages": [], "logprobs": True, "top_logprobs": 2, "max_tokens": 8},
    "/v1/responses": {"input": "the", "max_output_tokens": 8},
    "/v1/messages": {"messages": [], "max_tokens": 8},
    "/v1/embeddings": {"input": "the"},
}


@pytest.mark.parametrize("path", ANSWERS)
def test_what_runs_ends_well_while_the_server_drains(llm: LLM, path: str) -> None:
    """Whatever its answer is made of."""
    body = {"model": "tiny", **ANSWERS[path]}
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "the"}]
    streams = [{}] if path.endswith("embeddings") else [{}, {"stream": True}]
    with (
        hosted(llm) as host,
        ThreadPoolExecutor(len(streams)) as pool,
        Gate(llm) as gate,
        raw(host, "/v1/completions", LONG),
    ):
        wait_for(lambda: gauge(host.url, "num_requests_running") == 1)
        asked = [pool.submit(http_post, f"{host.url}{path}", json=body | more) for more in streams]
        wait_for(lambda: host.service._num_admitted == 1 + len(streams))
        host.call(lambda: setattr(host.service, "is_draining", True))
        wait_for(lambda: http_get(f"{host.url}/health").status_code == 503)
        assert gauge(host.url, "num_requests_running") >= 1
        gate.open()
        for one in asked:
            answer = one.result(SECONDS)
            assert answer.status_code == 200 and "draining" not in answer.text, answer.text
        refused = http_post(f"{host.url}{path}", json=body)
        assert refused.status_code == 503 and refused.json()["error"].get("code") == "draining"


def test_constraints_are_compiled_beside_all_else(host: Hosted, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    matcher = llm.grammars.matcher

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert may_end.wait(SECONDS)
        return matcher(*arguments)

    monkeypatch.setattr(llm.grammars, "matcher", slow)
    with raw(
        host, "/v1/completions", {**LONG, "ignore_eos": False, "structured_outputs": {"choice": ["a", "b"]}}
    ) as one:
        assert begun.wait(SECONDS)
        assert httpx.get(f"{host.url}/health", timeout=SECONDS).status_code == 200
        assert post(host, max_tokens=3).status_code == 200
        may_end.set()
        assert one.recv(100).startswith(b"HTTP/1.1 200")


def test_metrics(tiny_folder: Path) -> None:
    """What two requests have added, the second of which finds the prompt of the first."""
    with LLM(tiny_folder) as llm, hosted(llm) as host:
        body = {"prompt": "x" * 40, "max_tokens": 5, "ignore_eos": True}
        usages = [post(host, **body).json()["usage"] for _ in range(2)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached[0] == 0 < cached[1] < usages[1]["prompt_tokens"]
        num_prompt = 2 * usages[0]["prompt_tokens"]
        expected = {
            "prompt_tokens_total": num_prompt,
            "generation_tokens_total": 10,
            "prefix_cache_queries_total": num_prompt,
            "prefix_cache_hits_total": cached[1],
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            "num_preemptions_total": 0,
            "time_to_first_token_seconds_count": 2,
            "e2e_request_latency_seconds_count": 2,
            "request_queue_time_seconds_count": 2,
            "inter_token_latency_seconds_count": 8,
            "request_time_per_output_token_seconds_count": 2,
            "request_prefill_time_seconds_count": 2,
            "request_decode_time_seconds_count": 2,
            "request_inference_time_seconds_count": 2,
            "request_num_preemptions_sum": 0,
            "request_params_n_sum": 2,
            "request_params_max_tokens_sum": 10,
            "iteration_tokens_total_sum": num_prompt - cached[1] + 10,
            "request_prompt_tokens_sum": num_prompt,
            "request_generation_tokens_sum": 10,
        }
        assert {name: gauge(host.url, name) for name in expected} == expected
        text = http_get(f"{host.url}/metrics").text
        assert 'infinilm:request_success_total{finished_reason="length",model_name="tiny"} 2.0' in text
        assert "# TYPE infinilm:num_preemptions_total counter" in text
        assert 'infinilm:http_requests_total{handler="/v1/completions",method="POST",status="200"} 2.0' in text
        block_size, num_blocks = llm.memory.block_size, llm.memory.num_blocks
        assert re.search(rf'cache_config_info{{block_size="{block_size}",.*num_gpu_blocks="{num_blocks}"', text)
        with Gate(llm) as gate:
            one = raw(host, "/v1/completions", LONG)
            wait_for(lambda: gauge(host.url, "num_requests_running") == 1)
            assert 0 < gauge(host.url, "kv_cache_usage_perc") < 1
            gate.open()
        one.close()
        wait_for(lambda: "abort" in http_get(f"{host.url}/metrics").text)


def test_an_answer_is_counted_before_the_next_request_is_read(tiny_folder: Path) -> None:
    """A client may ask for metrics as soon as it has the last byte of a whole answer or of a stream."""
    with LLM(tiny_folder, use_tqdm=False) as llm, hosted(llm) as host, httpx.Client(timeout=SECONDS) as client:
        body = {"model": "tiny", "prompt": "the", "max_tokens": 2, "ignore_eos": True}
        for num_answers in range(1, 21):
            assert client.post(f"{host.url}/v1/completions", json=body | {"stream": num_answers % 2 == 0}).is_success
            text = client.get(f"{host.url}/metrics").text
            assert f'finished_reason="length",model_name="tiny"}} {num_answers}.0' in text
            assert f'generation_tokens_total{{model_name="tiny"}} {2 * num_answers}.0' in text
            assert 'num_requests_running{model_name="tiny"} 0.0' in text


def test_metrics_of_drafts(tiny_folder: Path) -> None:
    """And a request may refuse drafts, or limit their length."""
    drafts = {"method": "lookup", "min_match": 1, "adaptive": False}
    body = {"prompt": "the one and the one and the", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    names = ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]

    def counts() -> list[float]:
        return [gauge(host.url, f"{name}_total") for name in names]

    with LLM(tiny_folder, speculation=drafts) as llm, hosted(llm) as host:
        text = post(host, **body, speculation="off").json()["choices"][0]["text"]
        assert counts() == [0, 0, 0]
        assert post(host, **body, speculation=2).json()["choices"][0]["text"] == text
        num_drafts, num_tokens, num_accepted = counts()
        assert 0 < num_drafts <= num_tokens <= 2 * num_drafts
        assert 0 < num_accepted <= num_tokens
        assert post(host, **body).json()["choices"][0]["text"] == text
        engine = llm.metrics()
        assert counts() == [engine.num_drafts, engine.num_draft_tokens, engine.num_accepted_tokens]
        assert sum(engine.accepted_at) == engine.num_accepted_tokens
        told = http_get(f"{host.url}/metrics").text
        first = engine.accepted_at[0]
        assert f'accepted_tokens_per_pos_total{{model_name="tiny",position="0"}} {first:.1f}' in told
        for wrong in ("on", 0, 16, 1.5, True, [1]):
            answer = post(host, **body, speculation=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "speculation"), answer.text
            assert "speculation" in answer.json()["error"]["message"]


def test_metrics_move_while_an_answer_runs(tiny_folder: Path) -> None:
    """Each token is counted once, however often it is looked, and each gap between two is one of a histogram."""
    held, released = threading.Event(), threading.Event()
    steps, registry = itertools.count(), HookRegistry()

    def hold(*_: Any) -> None:
        if next(steps) == 4:
            held.set()
            assert released.wait(SECONDS)

    registry.register_hook("final_norm", hold)
    with LLM(tiny_folder, max_num_seqs=1, hooks=registry) as llm, hosted(llm) as host:
        with ThreadPoolExecutor() as pool:
            call = pool.submit(post, host, max_tokens=9, n=2, ignore_eos=True)
            assert held.wait(SECONDS)
            names = ("generation_tokens_total", "inter_token_latency_seconds_count")
            for _ in range(2):
                num_tokens, num_gaps = (gauge(host.url, name) for name in names)
                assert 0 < num_tokens < 9 and num_gaps == num_tokens - 1
                assert gauge(host.url, "time_to_first_token_seconds_count") == 1
                assert gauge(host.url, "prompt_tokens_total") > 0 == gauge(host.url, "request_prompt_tokens_count")
            text = http_get(f"{host.url}/metrics").text
            assert re.search(r'waiting_by_reason{.*reason="capacity"} 1.0', text), text
            released.set()
            assert call.result().status_code == 200
        ends = {"generation_tokens_total": 18, "inter_token_latency_seconds_count": 16, "request_params_n_count": 1}
        ends |= {"time_to_first_token_seconds_count": 2, "request_generation_tokens_sum": 18}
        assert {name: gauge(host.url, name) for name in ends} == ends


def test_what_nobody_foresaw(host: Hosted, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(llm._requests, "make", broken)
    for stream in (False, True):
        answer = post(host, stream=stream)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine(tiny_folder: Path, stream: bool) -> None:
    with LLM(tiny_folder) as llm, hosted(llm) as host:
        assert http_get(f"{host.url}/health").status_code == 200
        llm.close()
        assert post(host, stream=stream).status_code == 503
        health = http_get(f"{host.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        assert http_get(f"{host.url}/metrics").status_code == 200
        assert isinstance(host.service.death, EngineDeadError)


def test_loading(llm: LLM) -> None:
    with hosted(None) as host:
        health = http_get(f"{host.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for answer in (post(host), http_get(f"{host.url}/v1/models")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
            assert "retry-after" in answer.headers
        host.call(lambda: host.service.serve(llm))
        wait_for(lambda: http_get(f"{host.url}/health").status_code == 200)
        assert post(host, max_tokens=1).status_code == 200


def test_guards(llm: LLM) -> None:
    settings: dict[str, Any] = {"api_keys": ("one", "two"), "max_body_bytes": 1000, "allowed_hosts": ("127.0.0.1",)}
    with hosted(llm, **settings, allowed_origins=("https://good.example",)) as host:
        url, key = f"{host.url}/v1/completions", {"Authorization": "Bearer two"}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}

        def error(answer: httpx.Response, status: int) -> dict[str, Any]:
            assert answer.status_code == status, answer.text
            found: dict[str, Any] = answer.json()["error"]
            assert set(found) == {"message", "type", "param", "code"}
            return found

        assert http_post(url, json=body, headers=key).status_code == 200
        assert http_post(url, json=body, headers={"x-api-key": "one"}).status_code == 200
        both = {"Authorization": "Bearer of another server", "x-api-key": "one"}
        assert http_post(url, json=body, headers=both).status_code == 200
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}, {"x-api-key": ""}):
            assert error(http_post(url, json=body, headers=headers), 401)["code"] == "invalid_api_key"
        assert http_get(f"{host.url}/metrics").status_code == 401
        assert http_get(f"{host.url}//metrics/").status_code == 401
        assert http_get(f"{host.url}/").status_code == http_get(f"{host.url}/health").status_code == 200
        error(http_post(url, content="x" * 1001, headers=key | {"content-type": "application/json"}), 413)

        def chunks() -> Iterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        error(http_post(url, content=chunks(), headers=key | {"content-type": "application/json"}), 413)
        error(http_post(url, content=json.dumps(body), headers=key | {"content-type": "text/plain"}), 415)
        error(http_get(url, headers=key), 405)
        error(http_get(f"{host.url}/v2/models", headers=key), 404)
        error(http_get(f"{host.url}/v1/models", headers=key | {"Host": "evil.example"}), 403)
        for content in (b"{", b"[1]", b"\xff", b"[" * 900, b'"x"', b""):
            error(http_post(url, content=content, headers=key | {"content-type": "application/json"}), 400)
        for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
            answer = http_post(url, json=body, headers=key | {"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
            names = "authorization,content-type,x-stainless-lang"  # OpenAI's client in a browser sends more of them
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
            answer = http_options(url, headers=asked)
            assert answer.status_code == (204 if allowed else 403)
            assert answer.headers.get("access-control-allow-headers") == (names if allowed else None)


def test_keys_may_hold_any_characters(llm: LLM) -> None:
    with hosted(llm, api_keys=("clé",)) as host:
        for key, status in (("clé", 200), ("cle", 401)):
            headers = {b"Authorization": f"Bearer {key}".encode()}
            assert http_get(f"{host.url}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_does_not_end(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The engine cannot keep the time limit then; its clients are told all the same."""
    monkeypatch.setattr(service, "_GRACE_SECONDS", 0.5)
    with LLM(tiny_folder, limits=RequestLimits(max_seconds=0.3)) as llm, Gate(llm) as gate, hosted(llm) as host:
        answer = post(host, stream=stream, max_tokens=3)
        assert answer.status_code == (200 if stream else 504)
        assert "much longer than 0.3 s" in answer.text and '"timeout"' in answer.text
        gate.open()


def test_a_client_that_does_not_read_in_time(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let go of, though it stays."""
    monkeypatch.setattr(service, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(app, "_LAST_SECONDS", 0.2)
    with LLM(tiny_folder, limits=RequestLimits(max_seconds=2)) as llm, hosted(llm) as host:
        slow = raw(host, "/v1/completions", LONG | {"n": 64, "stream": True, "logprobs": 20})
        assert slow.recv(1)  # it was admitted, also where it has ended since
        wait_for(lambda: host.service._num_admitted == 0)
        slow.close()
