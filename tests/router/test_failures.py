"""Replicas that are killed, stopped and started again: clients get what one server alone would have said."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from ports import free_port
from server.support import KEY, SECONDS, ServerProcess, served, started, wait_for

from infinilm import LLM
from infinilm.router.forward import _is_constrained
from infinilm.router.replicas import Replica
from infinilm.server.silence import ping
from router.support import CLIENT_KEY, HostedRouter, routed

HEADERS = {"Authorization": f"Bearer {CLIENT_KEY}"}

# A server whose engine waits until all requests are there, and stops for ever once a sequence has 24 tokens. Its
# connections stay open.
STUCK = """
import sys, dataclasses, threading, infinilm.llm
from infinilm.cli.main import main
count, all_there = 0, threading.Event()
class Stuck(infinilm.llm.LLM):
    def asubmit(self, prompts, sampling_params=None, **more):
        global count
        count += 1
        if count == {count}:
            all_there.set()
        begin = len(prompts[0])
        def wait(token_ids, logits):
            all_there.wait()
            if len(token_ids) - begin >= 24:
                print("stuck", file=sys.stderr, flush=True)
                threading.Event().wait()
            return logits
        return super().asubmit(prompts, dataclasses.replace(sampling_params, logits_processor=wait), **more)
infinilm.llm.LLM = Stuck
sys.exit(main(["serve", "demo", "--port", "0", "--api-key", "{key}"]))
"""

STORY = [{"role": "user", "content": "Tell me a story about a fox and a very small bird."}]
LONG = {"model": "demo", "stream": True, "seed": 7, "temperature": 1.0, "max_tokens": 120}
CHAT = {**LONG, "messages": STORY}
TEXT = {**LONG, "prompt": "Once upon a time", "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}, "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.5}),
    ("/v1/chat/completions", {**CHAT, "stop": ["the forest", "zzz"], "min_tokens": 60}),
    ("/v1/completions", TEXT),
    ("/v1/completions", {**TEXT, "logprobs": 1, "echo": True, "repetition_penalty": 1.1}),
    ("/v1/completions", {**TEXT, "stream": False}),
    ("/v1/messages", {**CHAT, "stop_sequences": ["zzz"], "seed": 8}),
]
CANNOT_GO_ON: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**TEXT, "n": 2}),
    ("/v1/responses", {"model": "demo", "input": "Tell me a story", "stream": True, "max_output_tokens": 120}),
]


def ask(url: str, path: str, body: dict[str, Any], key: str) -> str:
    """The text of an answer."""
    answer = httpx.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.text


def said(text: str) -> list[Any]:
    """All that an answer says, without what is its own, and with the pieces of a stream joined that came in others."""
    if text.startswith("{"):
        events = [json.loads(text)]
    else:
        text = text.replace(ping("/v1/messages"), "").replace(ping(""), "")  # of a slow machine
        lines = [line for line in text.splitlines() if line]
        assert all(line.startswith(("data: ", "event: ")) for line in lines)  # nothing that was meant for the router
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert text.endswith("data: [DONE]\n\n") or events[-1]["type"] == "message_stop"
    assert len({event.get("id") for event in events}) == 1
    found: list[Any] = []
    for event in events:
        for name in ("id", "created", "message"):
            event.pop(name, None)
        for part in flat(event):
            if found and isinstance(part, tuple) and isinstance(found[-1], tuple) and found[-1][0] == part[0]:
                found[-1] = (part[0], found[-1][1] + part[1])
            else:
                found.append(part)
    return found


def flat(event: dict[str, Any]) -> Iterator[Any]:
    """What grows, as pairs of name and value, one kind after the other; the rest as it is."""
    if "choices" not in event:
        if "usage" in event:  # what the cache had is not part of the answer
            event["usage"] = event["usage"]["output_tokens"]
        delta = event.get("delta", {})
        yield ("text", delta["text"]) if "text" in delta else event
        return
    for choice in event["choices"]:
        text = choice.pop("text", None) or choice.get("delta", {}).pop("content", None)
        ids, logprobs = choice.pop("token_ids", None), choice.pop("logprobs", None)
        grown = {"text": text, "ids": ids}
        grown |= logprobs if logprobs is not None else {}
        yield ("all", _Grown({name: value for name, value in grown.items() if value}))
        if choice.get("finish_reason"):
            yield choice
    if event.get("usage"):
        event["usage"].pop("prompt_tokens_details")
        yield event["usage"]


class _Grown(dict[str, Any]):
    def __add__(self, more: Any) -> Any:
        return _Grown({**self, **{name: self[name] + value if name in self else value for name, value in more.items()}})


def test_a_replica_killed_in_the_middle_of_streams(tmp_path: Path, replicas: list[ServerProcess]) -> None:
    """All of them end as they would have ended, or say that they cannot."""
    everything, second = REQUESTS + CANNOT_GO_ON, replicas[0]
    script = STUCK.format(count=len(everything), key=KEY)
    with (
        started("-c", script, folder=tmp_path) as first,
        ThreadPoolExecutor(len(everything)) as pool,
        routed((first.url, KEY)) as router,
    ):
        solo = [said(ask(second.url, path, body, KEY)) for path, body in REQUESTS]
        router.wait_for_up(1)
        answers = [pool.submit(ask, router.url, path, body, CLIENT_KEY) for path, body in everything]
        wait_for(lambda: any("stuck" in line for line in first.lines))
        router.call(lambda: router.pool.add(second.url, KEY))
        router.wait_for_up(2)
        first.stop(signal.SIGKILL)
        for (path, body), answer, alone in zip(REQUESTS, answers, solo, strict=False):
            assert said(answer.result(SECONDS)) == alone, (path, body)
        ends = [answer.result(SECONDS).splitlines()[-2:] for answer in answers[len(REQUESTS) :]]
        num_lost = sum("the server of this answer was lost" in end[0] for end in ends)
        assert num_lost > 0
        metrics = httpx.get(f"{router.url}/metrics", headers=HEADERS).text
    counts = dict(
        line.split() for line in metrics.splitlines() if line.startswith("infinilm_router:re") and "{" not in line
    )
    resumed, retried = (float(counts[f"infinilm_router:{name}_total"]) for name in ("resumed_streams", "retries"))
    assert resumed > 0 and retried > 0  # a stream of which nothing had come yet is begun anew
    assert resumed + retried + num_lost == len(everything)


class _Breaking(BaseHTTPRequestHandler):
    """A replica that ends every answer behind its first event, which was not made to be gone on with."""

    protocol_version = "HTTP/1.1"
    names: ClassVar[list[str]] = []  # of the requests

    def do_GET(self) -> None:
        body = json.dumps({"parts": {}, "instance": "one", "cache_tokens": 1024}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.names[:] = self.headers.get_all("x-request-id", [])
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        event = b'data: {"type": "begin"}\n\n'
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "given"), [("messages", "mine-7"), ("chat/completions", "mine-7"), ("messages", "not a name")]
)
def test_errors_of_streams_name_their_request(path: str, given: str) -> None:
    """Where Anthropic's clients look for it; all find it in the head of the answer, and replicas are told the same."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Breaking) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with routed((f"http://127.0.0.1:{server.server_port}", None)) as router:
                router.wait_for_up(1)
                headers = HEADERS | {"x-request-id": given}
                answer = httpx.post(f"{router.url}/v1/{path}", json=CHAT, headers=headers, timeout=SECONDS)
        finally:
            server.shutdown()
            thread.join()
    name = answer.headers["x-request-id"]
    assert answer.status_code == 200 and (name == given) == (given == "mine-7")
    assert _Breaking.names == [name]
    first, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert first == {"type": "begin"} and "was lost" in last["error"]["message"]
    assert last.get("request_id") == (name if path == "messages" else None)


class _Dying(_Breaking):
    """A replica that is gone when a request comes."""

    requests: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.requests.append(self.path)
        self.close_connection = True


@pytest.mark.parametrize(
    ("fields", "num_asked"),
    [
        ({"response_format": {"type": "text"}}, 3),
        ({"response_format": {"type": "json_object"}}, 2),
        ({"tool_choice": "required"}, 2),
    ],
)
def test_what_two_replicas_died_over_is_not_passed_on(fields: dict[str, Any], num_asked: int) -> None:
    """A constraint may be the cause, and would end the others, too."""
    _Dying.requests.clear()
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(3):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Dying))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            urls.append((f"http://127.0.0.1:{server.server_port}", None))
        with routed(*urls) as router:
            router.wait_for_up(3)
            path = "/v1/chat/completions"
            answer = httpx.post(router.url + path, json=CHAT | fields, headers=HEADERS, timeout=SECONDS)
    assert answer.status_code == 502 and len(_Dying.requests) == num_asked
    assert ("constraint" in answer.json()["error"]["message"]) == (num_asked == 2)


@pytest.mark.parametrize(
    ("values", "is_constrained"),
    [
        ({}, False),
        ({"text": {"verbosity": "low"}}, False),
        ({"text": {"format": {"type": "text"}}, "response_format": None}, False),
        ({"text": {"format": {"type": "json_schema"}}}, True),
        ({"output_config": {"effort": "high"}}, False),
        ({"output_config": {"format": {"type": "json_schema"}}}, True),
        ({"guided_json": {"type": "object"}}, True),
        ({"grammar": "", "structured_outputs": None}, False),
        ({"tool_choice": "auto", "tools": [{"function": {"strict": False}}, {"name": "x"}, 5]}, False),
        ({"tool_choice": {"type": "auto"}}, False),
        ({"tool_choice": {"type": "any"}}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, True),
        ({"tools": [{"type": "function", "function": {"name": "x", "strict": True}}]}, True),
        ({"tools": [{"name": "x", "strict": True}]}, True),
        ({"tools": 5, "text": [], "tool_choice": "none"}, False),
    ],
)
def test_which_requests_are_constrained(values: dict[str, Any], is_constrained: bool) -> None:
    assert _is_constrained(values) == is_constrained


def test_what_the_log_says_of_a_replica(caplog: pytest.LogCaptureFixture) -> None:
    """That one has come is news and no warning; each change is told once."""
    found = {"parts": {}, "instance": "one", "cache_tokens": 1024}
    replica = Replica("http://127.0.0.1:1", None)
    with caplog.at_level(logging.INFO, "infinilm.router"):
        for _ in range(2):
            replica.come(found)
        for _ in range(2):
            replica.go("down", "it is silent")
        replica.come(found)
    said = [(record.levelname, record.getMessage().partition(" is ")[2]) for record in caplog.records]
    assert said == [("INFO", "up"), ("WARNING", "down: it is silent"), ("INFO", "up")]


def test_none_left_then_one_comes_back(tmp_path: Path) -> None:
    port = free_port()
    body = {"model": "demo", "prompt": "x", "max_tokens": 2}
    with routed((f"http://127.0.0.1:{port}", KEY)) as router:
        assert httpx.get(f"{router.url}/health").status_code == 503
        answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=HEADERS, timeout=SECONDS)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "no_replica"
        with served("demo", "--port", str(port), folder=tmp_path) as replica:
            router.wait_for_up(1)
            ask(router.url, "/v1/completions", body, CLIENT_KEY)
            replica.stop(signal.SIGKILL)
        answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=HEADERS, timeout=SECONDS)
        assert answer.status_code == 503


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[list[int]]:
    yield [free_port(), free_port()]


def roll(folder: Path, ports: list[int], router: HostedRouter, work: Any) -> None:
    """Start a server at each port, run `work(restart)`; `restart` ends them one after the other and starts others."""
    servers: list[ServerProcess] = []

    def start(port: int) -> ServerProcess:
        arguments = ["-m", "infinilm", "serve", "demo", "--port", str(port), "--api-key", KEY, "--num-threads", "1"]
        return ServerProcess(*arguments, folder=folder)

    def restart() -> None:
        for i, port in enumerate(ports):
            assert servers[i].stop() == 0
            servers[i] = start(port)
            router.wait_for_up(2)

    try:
        servers += [start(port) for port in ports]
        router.wait_for_up(2)
        work(restart)
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()


def test_a_rolling_restart_loses_nothing(tmp_path: Path, ports: list[int], demo: LLM) -> None:
    """`ROLLING_REQUESTS` of them, half of them streams; each is equal to its solo answer."""
    count = int(os.environ.get("ROLLING_REQUESTS", "24"))
    prompts = [f"Once upon a time there were {i} foxes who" for i in range(count)]
    params = [{"seed": i, "temperature": 1.0, "max_tokens": 20 + i % 80, "ignore_eos": True} for i in range(count)]

    def one(router: HostedRouter, i: int) -> str:
        body = {"model": "demo", "prompt": prompts[i], "stream": i % 2 == 0, **params[i]}
        answer = ask(router.url, "/v1/completions", body, CLIENT_KEY)
        if i % 2:
            text: str = json.loads(answer)["choices"][0]["text"]
            return text
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        assert answer.endswith("data: [DONE]\n\n") and not any("error" in event for event in events), answer
        return "".join(event["choices"][0]["text"] for event in events)

    with routed(*((f"http://127.0.0.1:{port}", KEY) for port in ports)) as router, ThreadPoolExecutor(8) as pool:

        def work(restart: Any) -> None:
            restarting = pool.submit(lambda: [restart() for _ in range(max(1, count // 200))])
            answers = [pool.submit(one, router, i) for i in range(count)]
            restarting.result(10 * SECONDS)
            answers += [pool.submit(one, router, i) for i in range(4)]  # by those that have come
            got = [answer.result(10 * SECONDS) for answer in answers]
            each = [replace(demo.default_sampling_params, **one) for one in params]
            wanted = [output.outputs[0].text for output in demo.generate(prompts, each, use_tqdm=False)]
            assert got == wanted + wanted[:4]

        roll(tmp_path, ports, router, work)
