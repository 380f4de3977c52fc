"""HTTP byte by byte, as clients, proxies and others speak it; what is wrong is told as JSON."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.client
import importlib.metadata
import json
import logging
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.lifespan.on import LifespanOn

from infinilm import LLM
from infinilm.server import app, service
from infinilm.server.app import make_app
from infinilm.server.guard import MAX_HEAD_BYTES
from infinilm.server.protocol import HttpProtocol
from server.support import SECONDS, Gate, Hosted, gauge, hosted, wait_for

BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 3, "ignore_eos": True, "seed": 1}).encode()
STREAM = BODY[:-1] + b', "stream": true}'
JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, seed=0) as made:
        yield made


@pytest.fixture(scope="module")
def host(llm: LLM) -> Iterator[Hosted]:
    with hosted(llm) as running:
        yield running


def connect(host: Hosted) -> socket.socket:
    address, port = host.url.removeprefix("http://").split(":")
    return socket.create_connection((address, int(port)), timeout=SECONDS)


def head(line: str, *headers: str, length: int | None = None) -> bytes:
    lines = [line, *headers] + ([] if length is None else [f"Content-Length: {length}"])
    return "".join(f"{text}\r\n" for text in lines).encode() + b"\r\n"


def post(*headers: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    return head(f"POST /v1/completions HTTP/{version}", "Host: a", JSON, *headers, length=len(body)) + body


def read_one(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer, which has a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(1)
        assert piece, data
        data += piece
    lines = data.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    body = b""
    while missing := int(headers.get("content-length", 0)) - len(body):
        piece = connection.recv(missing)
        assert piece, data + body
        body += piece
    return int(lines[0].split()[1]), headers, body


def ask(host: Hosted, message: bytes) -> tuple[int, dict[str, str], bytes]:
    with connect(host) as connection:
        connection.sendall(message)
        return read_one(connection)


def read_to_end(host: Hosted, message: bytes) -> bytes:
    """What comes until the server closes the connection."""
    with connect(host) as connection:
        connection.sendall(message)
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
        return data


def refused(data: bytes, status: int) -> dict[str, Any]:
    lines, _, body = data.partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 %d " % status), data
    assert b"\r\nx-request-id: " in lines
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "message",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,  # TLS
        head("GET /health HTTP/9.9", "Host: a"),
        post("Content-Length: 5"),
        post("Transfer-Encoding: chunked"),  # beside a length
        head("POST /v1/completions HTTP/1.1", "Host: a", JSON, "Content-Length: -1"),
    ],
)
def test_what_is_no_http(host: Hosted, message: bytes) -> None:
    refused(read_to_end(host, message), 400)


def test_heads_have_a_bound(host: Hosted) -> None:
    assert ask(host, head("GET /health HTTP/1.1", "Host: a", "X: " + "x" * 30_000))[0] == 200
    for message in (head("GET /health HTTP/1.1", "Host: a", "X: " + "x" * (1 << 20)), b"GET /" + b"x" * (1 << 20)):
        with connect(host) as connection, pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(message)
    # What comes in one piece is no exception.
    for message in (
        head("GET /health HTTP/1.1", "Host: a", "X: " + "x" * 70_000),
        head("GET /health HTTP/1.1", "Host: a", *[f"X{i}: {'x' * 700}" for i in range(100)]),
    ):
        assert ask(host, message)[0] == 431
    with connect(host) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES)
        assert read_one(connection)[0] == 431
        assert connection.recv(1) == b""


def test_what_does_not_arrive(host: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may take longer than its request may."""
    monkeypatch.setattr(HttpProtocol, "arrival_seconds", 0.2)
    for message in (b"", b"GET /hea", post()[:-1], head("GET /health HTTP/1.1", "Host: a")[:-1]):
        assert "0.2 s" in refused(read_to_end(host, message), 408)["message"]
    monkeypatch.setattr(HttpProtocol, "arrival_seconds", SECONDS)
    with connect(host) as connection:  # the next one on the same connection
        connection.sendall(head("GET /health HTTP/1.1", "Host: a"))
        assert read_one(connection)[0] == 200
        monkeypatch.setattr(HttpProtocol, "arrival_seconds", 0.2)
        connection.sendall(b"G")
        assert read_one(connection)[0] == 408
    body = {"model": "tiny", "prompt": "x", "max_tokens": 120, "ignore_eos": True, "stream": True, "n": 128}
    while True:  # on a busy machine the request may not be there in time
        with suppress(httpx.TransportError):
            answer = httpx.post(f"{host.url}/v1/completions", json=body, timeout=SECONDS)
            if answer.status_code != 408:
                break
    assert answer.text.endswith("data: [DONE]\n\n")


def test_who_leaves_before_the_request_is_there_is_no_failure(host: Hosted, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with connect(host) as connection:
            connection.sendall(post()[:-1])
        with connect(host) as connection:
            connection.sendall(post())
            read_one(connection)
        wait_for(lambda: host.service._num_admitted == 0)
    assert not caplog.records


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [BODY, STREAM])
def test_who_sends_no_more_still_reads(host: Hosted, llm: LLM, version: str, body: bytes) -> None:
    """As `nc -N` does: the end of its input closes its half of the connection."""
    expected = json.loads(ask(host, post())[2])["choices"][0]["text"]
    with Gate(llm) as gate, connect(host) as connection:
        connection.sendall(post(body=body, version=version))
        connection.shutdown(socket.SHUT_WR)
        begin = connection.recv(1, socket.MSG_PEEK)  # of the answer, early
        assert begin == b"H"
        wait_for(lambda: gauge(host.url, "num_requests_running") == 1)
        gate.open()
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        text = answer.read().decode()
        assert connection.recv(1) == b""
    if body is STREAM:
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == expected
    else:
        assert json.loads(text)["choices"][0]["text"] == expected


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_who_sends_no_more_may_leave(host: Hosted, llm: LLM, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "probe_seconds", 0.2)
    with Gate(llm) as gate:
        with connect(host) as connection:
            connection.sendall(post(body=body))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b"H"
            wait_for(lambda: host.service._num_admitted == 1)
        wait_for(lambda: host.service._num_admitted == 0)
        gate.open()


def test_connections_are_used_again(host: Hosted) -> None:
    with connect(host) as connection:
        for message, status in ((post(), 200), (post(body=b"{"), 400), (post(), 200)):
            connection.sendall(message)
            assert read_one(connection)[0] == status
        connection.sendall(post() + post(body=b"[]"))  # both at once
        assert [read_one(connection)[0] for _ in range(2)] == [200, 400]
        connection.sendall(post("Connection: close"))
        assert read_one(connection)[1]["connection"] == "close"
        assert connection.recv(1) == b""


def test_http_1_0(host: Hosted) -> None:
    """Its clients know no chunks, and may send no Host."""
    expected = json.loads(ask(host, post())[2])["choices"][0]["text"]
    data = read_to_end(host, post(version="1.0"))
    assert json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected
    data = read_to_end(host, post(version="1.0", body=STREAM))
    assert b"chunked" not in data.lower()
    events = data.partition(b"\r\n\r\n")[2].decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-2]) == expected
    assert read_to_end(host, head("GET /health HTTP/1.0")).endswith(b'{"status":"ok"}')


def test_http_1_0_streams(host: Hosted, llm: LLM) -> None:
    """What there is of an answer arrives while the rest is made; the end of the connection is its end."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}).encode()
    message = head("POST /v1/chat/completions HTTP/1.0", JSON, length=len(body)) + body
    with Gate(llm) as gate, connect(host) as connection:
        connection.sendall(message)
        data = b""
        while b'"role":"assistant"' not in data:  # the first token is not made yet
            data += (piece := connection.recv(1 << 16))
            assert piece, data
        lines = data.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
        assert {"connection: close", "x-accel-buffering: no"} <= set(lines)
        assert not any(line.startswith(("content-length", "transfer-encoding")) for line in lines)
        gate.open()
        while piece := connection.recv(1 << 16):
            data += piece
    assert data.endswith(b"data: [DONE]\n\n")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx")
def test_nginx(host: Hosted, llm: LLM, tmp_path: Path) -> None:
    """It streams with nothing but an address, where it speaks HTTP/1.0 and has buffers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folders = "".join(f"{name}_temp_path {tmp_path}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; events {{}} http {{ access_log off; {folders}"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {host.url}; }} }} }}"
    )
    nginx = subprocess.Popen(["nginx", "-p", str(tmp_path), "-e", "stderr", "-c", str(tmp_path / "nginx.conf")])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:

            def is_up() -> bool:
                with suppress(httpx.ConnectError):
                    return client.get("/health").status_code == 200
                return False

            wait_for(is_up)
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
            with Gate(llm) as gate, client.stream("POST", "/v1/chat/completions", json=body) as answer:
                pieces = answer.iter_text()
                assert '"role":"assistant"' in next(pieces)
                gate.open()
                assert "".join(pieces).endswith("data: [DONE]\n\n")
    finally:
        nginx.terminate()
        nginx.wait(SECONDS)


def test_one_host(llm: LLM) -> None:
    with hosted(llm, allowed_hosts=("a",)) as host:
        assert ask(host, head("GET /health HTTP/1.1", "Host: A:80"))[0] == 200
        assert ask(host, head("GET /health HTTP/1.1"))[0] == 400
        assert ask(host, head("GET /health HTTP/1.1", "Host: b", "Host: a"))[0] == 400
        assert ask(host, head("GET /health HTTP/1.1", "Host: a", "Host: b"))[0] == 400
        assert ask(host, head("GET /health HTTP/1.0", "Host: b"))[0] == 403


def test_requests_have_names(llm: LLM) -> None:
    """The client's own, if it is one; errors have one as well."""
    with hosted(llm, allowed_origins=("https://good.example",)) as host:
        names = set()
        for message in (post(), post(), post(body=b"{"), head("GET /nowhere HTTP/1.1", "Host: a"), post(body=STREAM)):
            with connect(host) as connection:
                connection.sendall(message)
                lines = connection.recv(1 << 16).partition(b"\r\n\r\n")[0].decode().split("\r\n")
                (name,) = [line.partition(": ")[2] for line in lines if line.startswith("x-request-id: ")]
                names.add(name)
        assert len(names) == 5
        assert ask(host, post("X-Request-Id: mine-1"))[1]["x-request-id"] == "mine-1"
        for bad in ("a b", "x" * 129, "\u00fc", ""):
            found = ask(host, post(f"X-Request-Id: {bad}"))[1]["x-request-id"]
            assert found != bad and found.startswith("req_")
        message = head("POST /v1/messages HTTP/1.1", "Host: a", JSON, length=2) + b"{}"
        headers = ask(host, message)[1]
        assert headers["request-id"] == headers["x-request-id"]
        headers = ask(host, post("Origin: https://good.example"))[1]
        assert "x-request-id" in headers["access-control-expose-headers"]


def test_expect(host: Hosted) -> None:
    """The body is asked for, unless it is too large."""
    with connect(host) as connection:
        whole = post("Expect: 100-continue")
        connection.sendall(whole[: -len(BODY)])
        assert read_one(connection)[0] == 100
        connection.sendall(BODY)
        assert read_one(connection)[0] == 200
    line = "POST /v1/completions HTTP/1.1"
    status, _, body = ask(host, head(line, "Host: a", JSON, "Expect: 100-continue", length=1 << 30))
    assert status == 413 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_bodies(host: Hosted) -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, bytes([byte])) for byte in BODY) + b"0\r\n\r\n"
    line = "POST /v1/completions HTTP/1.1"
    assert ask(host, head(line, "Host: a", JSON, "Transfer-Encoding: chunked") + chunks)[0] == 200
    assert ask(host, post("Content-Type: application/json; charset=utf-8"))[0] == 200
    with connect(host) as connection:
        for _ in range(3):  # larger than a head may be, and all there at once
            connection.sendall(post(body=BODY[:-1] + b" " * 200_000 + b"}"))
            assert read_one(connection)[0] == 200
    status, _, body = ask(host, post("Content-Encoding: br"))
    assert status == 415 and "gzip" in json.loads(body)["error"]["message"]
    assert ask(host, post("Content-Encoding: identity"))[0] == 200
    for bad in (b"\xff\xfe", b'{"model": "tiny", "prompt": "\xff"}', BODY[:-1] + b', "temperature": NaN}', b"null"):
        status, _, body = ask(host, post(body=bad))
        assert status == 400 and json.loads(body)["error"]["message"]


def test_gzipped_bodies(host: Hosted) -> None:
    """They are bounded as they are unpacked, which a bomb of a kilobyte for a megabyte needs."""
    limit = host.service.settings.max_body_bytes
    zipped = gzip.compress(BODY)
    for coding in ("gzip", "X-GZip"):
        assert ask(host, post(f"Content-Encoding: {coding}", body=zipped))[0] == 200
    chunks = b"".join(b"1\r\n%b\r\n" % bytes([byte]) for byte in zipped) + b"0\r\n\r\n"
    line = "POST /v1/completions HTTP/1.1"
    coded = ("Host: a", JSON, "Content-Encoding: gzip")
    assert ask(host, head(line, *coded, "Transfer-Encoding: chunked") + chunks)[0] == 200
    whole = gzip.compress(BODY[:-1] + b" " * (limit - len(BODY)) + b"}")
    assert ask(host, post("Content-Encoding: gzip", body=whole))[0] == 200
    bomb = gzip.compress(b" " * (limit + 1))
    assert refused(read_to_end(host, post(*coded[2:], "Connection: close", body=bomb)), 413)["message"]
    for bad in (BODY, zipped[:-1], zipped + b"x", zipped + zipped, b""):
        data = read_to_end(host, post(*coded[2:], "Connection: close", body=bad))
        assert "not gzip" in refused(data, 400)["message"]


def test_methods(host: Hosted) -> None:
    with connect(host) as connection:  # an answer to HEAD has no body: the next answer follows at once
        connection.sendall(head("HEAD /health HTTP/1.1", "Host: a") + head("HEAD /nowhere HTTP/1.1", "Host: a"))
        data = b""
        while data.count(b"\r\n\r\n") < 2:
            data += connection.recv(1 << 16)
        assert data.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 404 " in data and data.endswith(b"\r\n\r\n")
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
    ):
        status, headers, body = ask(host, head(f"{method} {path} HTTP/1.1", "Host: a", JSON))
        assert status == 405 and set(headers["allow"].split(", ")) == allowed
        assert path in json.loads(body)["error"]["message"]
    for path in ("/v2", "/v1/files", "/%ff", "/../etc/passwd", "/v1/responses/resp_1"):
        status, _, body = ask(host, head(f"GET {path} HTTP/1.1", "Host: a"))
        assert status == 404 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_addresses_that_are_nearly_right(host: Hosted) -> None:
    for path, meant in (
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/nothing/like/it", None),
    ):
        status, _, body = ask(host, head(f"POST {path} HTTP/1.1", "Host: a", JSON, length=2) + b"{}")
        message = json.loads(body)["error"]["message"]
        assert status == 404 and path in message
        assert message.partition("did you mean ")[2] == (f"{meant!r}?" if meant else ""), message


def test_paths_with_and_without_v1(host: Hosted) -> None:
    """As llama.cpp answers them: its tools/server/tests/unit/test_basic.py and test_chat_completion.py."""
    assert ask(host, post().replace(b"/v1/completions", b"/completions"))[0] == 200
    for path in ("/models", "/models/tiny", "/v1/health", "/v1/version", "/v1/metrics", "/tokenizer_info"):
        assert ask(host, head(f"GET {path} HTTP/1.1", "Host: a"))[0] == 200, path
    assert ask(host, head("GET /v1 HTTP/1.1", "Host: a"))[0] == 404
    assert ask(host, head("GET /v1/ HTTP/1.1", "Host: a"))[0] == 404


def test_a_prefix_of_all_paths(llm: LLM) -> None:
    with hosted(llm, root_path="/llm", api_keys=("k",)) as host:
        for prefix in ("", "/llm", "//llm/"):
            assert ask(host, head(f"GET {prefix}/health HTTP/1.1", "Host: a"))[0] == 200
            message = post("Authorization: Bearer k").replace(b" /v1", f" {prefix}/v1".encode())
            assert ask(host, message)[0] == 200
            assert ask(host, post().replace(b" /v1", f" {prefix}/v1".encode()))[0] == 401
        assert ask(host, head("GET /llm/ HTTP/1.1", "Host: a"))[1]["content-type"].startswith("text/html")
        status, headers, _ = ask(host, head("GET /llm HTTP/1.1", "Host: a"))
        assert (status, headers["location"]) == (308, "/llm/")
        assert ask(host, head("GET /llmx/health HTTP/1.1", "Host: a", "Authorization: Bearer k"))[0] == 404


def test_tokenizer_info(host: Hosted, llm: LLM) -> None:
    """As vLLM has it, in its test_tokenization.py; lm-eval reads these fields."""
    info = json.loads(ask(host, head("GET /tokenizer_info HTTP/1.1", "Host: a"))[2])
    assert info["chat_template"] == llm.chat_template.source_text(False)
    assert info["eos_token"] == llm.tokenizer.special_tokens["eos_token"]
    assert info["model_max_length"] == llm.max_model_len


def test_the_page_has_no_other_origin(host: Hosted) -> None:
    """It asks this server alone, and runs no script and shows no style but its own."""
    status, headers, body = ask(host, head("GET / HTTP/1.1", "Host: a"))
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert (status, policy["default-src"], policy.pop("connect-src")) == (200, "'none'", "'self'")
    assert policy.pop("require-trusted-types-for") == "'script'"
    sources = {source for listed in policy.values() for source in listed.split(" ")}
    own = {
        "'sha256-" + base64.b64encode(hashlib.sha256(text).digest()).decode() + "'"
        for text in re.findall(rb"<(?:script|style)[^>]*>(.*?)</(?:script|style)>", body, re.DOTALL)
    }
    assert len(own) == 2 and sources == {"'none'", "data:"} | own
    page = body.decode()
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
    # What looks like an address; for links that models write the page has a pattern.
    assert set(re.findall(r"(?:https?|wss?):\\?/\\?/\w[\w./]*", page)) == namespaces
    addresses = re.findall(r'(?:src|href|action)="([^"]*)"', page)
    assert addresses and all(address.startswith(("data:image/", "#")) for address in addresses), addresses
    asked = re.findall(r"fetch\((.*?),", page)
    assert asked and all(re.fullmatch(r'"v1/[a-z/]+"', address) for address in asked), asked
    assert not re.search(r"XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts|import\(|@import|url\(", page)


def test_slashes_too_many(host: Hosted) -> None:
    """As of a base address that ends with one. An answer, and no redirect, on which some clients lose the body."""
    expected = json.loads(ask(host, post())[2])["choices"]
    for path in ("/v1/completions/", "//v1/completions", "/v1//completions//"):
        status, _, body = ask(host, post().replace(b"/v1/completions", path.encode()))
        assert status == 200 and json.loads(body)["choices"] == expected
    for path in ("/v1/models/", "/health/", "/v1/models/tiny/"):
        assert ask(host, head(f"GET {path} HTTP/1.1", "Host: a"))[0] == 200
    assert ask(host, head("GET // HTTP/1.1", "Host: a"))[1]["content-type"].startswith("text/html")
    assert ask(host, head("GET /v1/nothing/ HTTP/1.1", "Host: a"))[0] == 404


def test_upgrades_are_not_taken(host: Hosted) -> None:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    upgrade = ("Connection: Upgrade", "Sec-WebSocket-Version: 13", key)
    line = "GET /health HTTP/1.1"
    for kind in ("Upgrade: websocket", "Upgrade: h2c"):
        assert ask(host, head(line, "Host: a", kind, *upgrade))[0] == 200


def test_the_rest_of_asgi(host: Hosted) -> None:
    """Ray Serve tells applications that they begin and end, and fails those that do not answer."""

    async def live() -> None:
        lifespan = LifespanOn(uvicorn.Config(make_app(host.models), lifespan="on"))
        await lifespan.startup()
        assert not lifespan.should_exit
        await lifespan.shutdown()
        assert not lifespan.should_exit

    asyncio.run(live())


def test_what_comes_together_starts_together(host: Hosted, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are read before the first starts. One that comes alone, or among others that never end, waits for none."""
    monkeypatch.setattr(service, "_TOGETHER_SECONDS", SECONDS)
    happened: list[str] = []
    read, start = app.read_completion, llm.asubmit
    monkeypatch.setattr(app, "read_completion", lambda *a: happened.append("read") or read(*a))
    monkeypatch.setattr(llm, "asubmit", lambda *a, **more: happened.append("start") or start(*a, **more))
    connections = [connect(host) for _ in range(20)]
    wait_for(lambda: host.num_connections == len(connections))
    waits, ready = threading.Event(), threading.Event()
    host.call(lambda: waits.set() or ready.wait(SECONDS))  # type: ignore[func-returns-value]
    assert waits.wait(SECONDS)  # the server hears of nothing
    for connection in connections:
        connection.sendall(post())
    ready.set()
    texts = {json.loads(read_one(connection)[2])["choices"][0]["text"] for connection in connections}
    assert len(texts) == 1 and happened == ["read"] * 20 + ["start"] * 20
    for connection in connections:
        connection.close()
    monkeypatch.setattr(service, "_TOGETHER_SECONDS", 0.005)

    async def wait_among_others() -> None:
        waiting = asyncio.ensure_future(host.service._others_are_read())
        while not waiting.done():
            host.service._num_read += 1
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(wait_among_others(), SECONDS))


def test_version(host: Hosted) -> None:
    status, _, body = ask(host, head("GET /version HTTP/1.1", "Host: a"))
    assert status == 200 and json.loads(body) == {"version": importlib.metadata.version("infinilm")}
