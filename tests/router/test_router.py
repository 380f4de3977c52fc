"""A router in front of servers that are well."""

from __future__ import annotations

import json
import re
import socket
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from llm import tiny
from server.support import KEY, SECONDS, Gate, ServerProcess, gauge, hosted, wait_for

from infinilm import LLM
from infinilm.cli.main import main
from infinilm.errors import ConfigError
from infinilm.router.run import serve_router
from infinilm.router.settings import RouterSettings
from infinilm.server.settings import ServerSettings
from infinilm.server.silence import ping
from router.support import CLIENT_KEY, HostedRouter, routed
from router.test_failures import CHAT, HEADERS, REQUESTS, ask, said

CLIENT = {"Authorization": f"Bearer {CLIENT_KEY}"}


def test_every_route_answers_as_a_server_does(router: HostedRouter, replicas: list[ServerProcess]) -> None:
    direct = replicas[0].url
    for path, body in REQUESTS:
        assert said(ask(router.url, path, body, CLIENT_KEY)) == said(ask(direct, path, body, KEY))
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=CLIENT_KEY, max_retries=0) as client:
        assert client.models.list().data[0].id == "demo"
        assert client.embeddings.create(model="demo", input="a").data[0].embedding
        with pytest.raises(openai.NotFoundError, match="does not exist here"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    for path in ("/v1/models/demo", "/version", "/"):
        got = httpx.get(router.url + path, headers=HEADERS)
        alone = httpx.get(direct + path, headers={"Authorization": f"Bearer {KEY}"})
        assert got.status_code == 200
        assert re.sub(rb'"created.*?,', b"", got.content) == re.sub(rb'"created.*?,', b"", alone.content)
        assert got.headers["content-type"] == alone.headers["content-type"]
    got = httpx.post(f"{router.url}/tokenize", json={"prompt": "x"}, headers={**HEADERS, "x-request-id": "mine"})
    assert got.json()["count"] and got.headers.get_list("x-request-id") == ["mine"]
    assert httpx.get(f"{router.url}/v1/nothing", headers=HEADERS).status_code == 404
    assert httpx.get(f"{router.url}/health").json() == {"status": "ok", "replicas": 2, "replicas_up": 2}
    assert [one["state"] for one in httpx.get(f"{router.url}/replicas", headers=HEADERS).json()] == ["up", "up"]


def test_keys(router: HostedRouter) -> None:
    """Clients have theirs, which no replica sees; that of the replicas is no key for clients."""
    for headers in ({}, {"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert httpx.get(f"{router.url}/v1/models", headers=headers).status_code == 401
    assert httpx.get(f"{router.url}/v1/models", headers={"x-api-key": CLIENT_KEY}).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"x-infinilm-resumable": "1"}])
def test_clients_cannot_speak_as_a_router(router: HostedRouter, headers: dict[str, str]) -> None:
    body = {**CHAT, "continue_from": {"token_ids": [1], "seed": 1}}
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, headers=HEADERS | headers, timeout=SECONDS)
    assert answer.status_code == 400 and "continue_from" in answer.text
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=CHAT, headers=HEADERS | headers, timeout=SECONDS)
    assert "\n:" not in answer.text


def test_a_client_that_leaves_is_left_by_the_replica(router: HostedRouter, replicas: list[ServerProcess]) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 100}
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, headers=HEADERS, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
    wait_for(lambda: not any(replica.num_running for replica in router.pool.replicas))
    wait_for(lambda: not any(gauge(replica.url, "num_requests_running") for replica in replicas))


@pytest.mark.parametrize("n", [1, 2])
def test_what_fills_a_silence_is_passed_on(demo: LLM, n: int) -> None:
    """The router reads comments of streams that could go on elsewhere, and passes them on as those of others."""
    body = {**CHAT, "model": "tiny", "max_tokens": 8, "n": n}
    with hosted(demo, sse_ping_interval=0.02) as replica, routed((replica.url, None)) as router, Gate(demo) as gate:
        text = ""
        url = f"{router.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=SECONDS) as answer:
            for piece in answer.iter_text():
                text += piece
                if text.count(ping("")) > 2:
                    gate.open()
    assert set(re.findall("^:.*", text, re.MULTILINE)) == {": ping"}
    assert text.endswith("data: [DONE]\n\n")


def test_limits(replicas: list[ServerProcess]) -> None:
    with routed((replicas[0].url, KEY), max_requests=1) as router:
        body = {"model": "demo", "prompt": "Once", "max_tokens": 1}
        url = urlsplit(f"{router.url}/v1/completions")
        with socket.create_connection((url.hostname, url.port)) as client:  # a request that does not end
            head = f"POST {url.path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
            head += f"authorization: {HEADERS['Authorization']}\r\ncontent-length: 9\r\n\r\n{{"
            client.sendall(head.encode())

            def is_refused() -> bool:
                answer = httpx.post(url.geturl(), json=body, headers=HEADERS, timeout=SECONDS)
                return answer.status_code == 429 and answer.headers["retry-after"] == "1"

            wait_for(is_refused)
            assert httpx.get(f"{router.url}/health").status_code == 200


def test_a_conversation_stays_where_its_cache_is(router: HostedRouter) -> None:
    """And others go to the other replica: the cache of each is used."""
    messages = {name: [{"role": "user", "content": name * 400}] for name in "ab"}
    homes: dict[str, str] = {}
    for turn in range(4):
        for name, said_so_far in messages.items():
            before = {replica.url: replica.num_sent for replica in router.pool.replicas}
            body = {"model": "demo", "messages": said_so_far, "max_tokens": 8, "temperature": 0}
            answer = json.loads(ask(router.url, "/v1/chat/completions", body, CLIENT_KEY))
            (home,) = [r.url for r in router.pool.replicas if r.num_sent > before[r.url]]
            assert homes.setdefault(name, home) == home
            if turn:
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            said_so_far += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
            said_so_far[-2] = {"role": "assistant", "content": said_so_far[-2]["content"]}
    assert len(set(homes.values())) == 2


def test_questions_about_a_picture_stay_together(router: HostedRouter) -> None:
    """Large bodies arrive whole; which replica gets them is chosen by what the pictures show."""
    homes: dict[str, set[str]] = {"A": set(), "B": set()}
    for _ in range(3):
        for letter in homes:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{letter * (3 << 20)}"}}
            content = [image, {"type": "text", "text": "What is this?"}]
            body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
            before = {replica.url: replica.num_sent for replica in router.pool.replicas}
            answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, headers=CLIENT, timeout=SECONDS)
            assert answer.status_code == 400 and "reads no pictures" in answer.text
            homes[letter] |= {r.url for r in router.pool.replicas if r.num_sent > before[r.url]}
    assert len(homes["A"] | homes["B"]) == len(homes["A"]) + len(homes["B"]) == 2


def test_metrics_of_all(router: HostedRouter, replicas: list[ServerProcess]) -> None:
    ask(router.url, *REQUESTS[0], CLIENT_KEY)
    text = httpx.get(f"{router.url}/metrics", headers=HEADERS, timeout=SECONDS).text
    for index in range(len(replicas)):
        assert f'infinilm_router:replica_up{{replica="{index}"}} 1.0' in text
        assert re.search(rf'infinilm:num_requests_running{{model_name="demo",replica="{index}"}} ', text)
        assert re.search(rf'infinilm:iteration_tokens_total_count{{model_name="demo",replica="{index}"}} ', text)
    assert text.count("# TYPE infinilm:num_requests_running gauge") == 1
    assert re.search(r'infinilm_router:requests_total{replica="[01]",status="200"} 1.0', text)
    handler = REQUESTS[0][0]
    expected = f'infinilm_router:http_requests_total{{handler="{handler}",method="POST",status="200"}} 1.0'
    assert expected in text
    assert re.search(r"infinilm_router:prefix_queries_total \d", text)


def test_bad_keys_leave_no_socket(tmp_path: Path) -> None:
    """Nothing listens before the keys are known."""
    settings = RouterSettings(ServerSettings((), api_keys=("",)))
    with pytest.raises(ConfigError, match="a key is empty"):
        serve_router(settings, [], host="127.0.0.1", port=0, uds=str(tmp_path / "socket"))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router of the command line waits for a busy replica: one that is down is not refused, and the router serves."""
    monkeypatch.setattr("infinilm.router.settings.RouterSettings", partial(RouterSettings, health_timeout=SECONDS))


@pytest.mark.usefixtures("patient")
def test_replicas_that_differ_are_refused_by_name(
    demo: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], replicas: list[ServerProcess]
) -> None:
    folder = tiny.make_checkpoint(tmp_path / "tiny")
    with LLM(folder) as other, hosted(other, model_names=("demo",), api_keys=(KEY,)) as server:
        arguments = ["route", "--port", "0", "--replica-url", replicas[0].url, server.url]
        assert main([*arguments, "--replica-api-key", KEY]) == 2
        printed = capsys.readouterr().err
        assert server.url in printed and replicas[0].url in printed and "of one model" in printed
        with routed((replicas[0].url, KEY), (server.url, KEY)) as router:
            wait_for(lambda: sorted(replica.state for replica in router.pool.replicas) == ["refused", "up"])


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--replica-url"),
        (["--replica-url", "ftp://x"], "http://10.0.0.7:8000"),
        (["--replica-url", "http://[::1"], "http://10.0.0.7:8000"),
        (["--replica-url", "http://x:99999"], "http://10.0.0.7:8000"),
        (["--replica-url", "http://127.0.0.1:1", "http://127.0.0.1:1/v1/"], "given twice"),
        (["--replica-url", "http://x", "--replica-api-key", " "], "--replica-api-key"),
        (["--replica-url", "{replica}"], "--replica-api-key is the key"),
        (["--replica-url", "{replica}", "--replica-api-key", "wrong"], "--replica-api-key is the key"),
        (["--replica-url", "http://x", "--imbalance", "-1"], "--imbalance"),
    ],
)
def test_what_cannot_start_says_why(
    arguments: list[str], message: str, replicas: list[ServerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument.format(replica=replicas[0].url) for argument in arguments]
    assert main(["route", "--port", "0", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed
