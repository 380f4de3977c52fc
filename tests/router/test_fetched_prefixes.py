"""Prefixes that one replica has computed and another one fetches; replicas that compute prompts for others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from llm import tiny
from server.support import KEY, SECONDS, Hosted, hosted, http_get, http_post, wait_for

from infinilm import LLM, PeerRules
from infinilm.cli.main import main
from infinilm.scheduling import scheduler
from infinilm.server.prefixes import PREFILL, PREFIXES_AT
from infinilm.serving import prefix_exchange
from infinilm.tiers import PREFIXES, peers
from router.support import CLIENT_KEY, HostedRouter, routed

TEXT = "".join(f"the {number}th word, and " for number in range(90))
HEADERS = {"Authorization": f"Bearer {CLIENT_KEY}"}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts wait for the identity of a model, however busy the machine is."""
    monkeypatch.setattr(scheduler, "SEGMENT_BLOCKS", 2)
    monkeypatch.setattr(prefix_exchange, "_IDENTITY_SECONDS", SECONDS)
    monkeypatch.setattr(peers, "_SECONDS", SECONDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("fetched") / "tiny", max_position_embeddings=4096)


@contextmanager
def replica(model: Path, role: str = "both", **options: Any) -> Iterator[Hosted]:
    """A server whose prefixes others fetch, and which fetches theirs."""
    given: dict[str, Any] = {"host_cache": "64MiB", "prefix_peers": PeerRules(("127.0.0.1",), KEY)} | options
    with (
        LLM(model, max_model_len=4096, max_num_seqs=4, use_tqdm=False, **given) as llm,
        hosted(llm, api_keys=(KEY,), role=role) as server,
    ):
        yield server


@contextmanager
def routed_to(*servers: Hosted, **settings: Any) -> Iterator[HostedRouter]:
    with routed(*((server.url, KEY) for server in servers), **settings) as router:
        router.wait_for_up(len(servers))
        yield router


def ask(url: str, text: str = TEXT, key: str = CLIENT_KEY, **more: Any) -> dict[str, Any]:
    body = {"prompt": text, "max_tokens": 12, "seed": 3, "ignore_eos": True, "logprobs": 1, **more}
    answer = http_post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def hits(server: Hosted) -> int:
    llm = server.service.loaded
    assert llm is not None
    return llm.metrics().num_external_hit_tokens


@pytest.fixture
def expected(model: Path) -> dict[str, Any]:
    with replica(model, host_cache=None, prefix_peers=None) as alone:
        return ask(alone.url, key=KEY)


def test_a_replica_fetches_what_another_has(model: Path, expected: dict[str, Any]) -> None:
    """The one that has the prefix drains, so the other one answers, with its blocks."""
    with replica(model) as one, replica(model) as two, routed_to(one, two) as router:
        assert ask(router.url) == expected
        first, second = (one, two) if one.service.loaded.metrics().num_finished else (two, one)  # type: ignore[union-attr]
        first.service.loaded.flush_prefixes()  # type: ignore[union-attr]
        busy = next(a for a in router.pool.replicas if a.url == first.url)
        router.call(lambda: setattr(busy, "num_running", 100))
        wait_for(lambda: busy.num_running == 100)
        assert ask(router.url) == expected
        assert hits(second) >= 256
        assert hits(first) == 0


def test_prompts_are_computed_by_one_and_answered_by_another(model: Path, expected: dict[str, Any]) -> None:
    with replica(model, "prefill") as one, replica(model, "decode") as two, routed_to(one, two) as router:
        assert ask(router.url) == expected
        assert hits(two) >= 256
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 9, "stream": True}
        with httpx.stream(
            "POST", f"{router.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=SECONDS
        ) as events:
            assert "[DONE]" in list(events.iter_lines())[-2]
        assert hits(two) >= 512
        num_sent = router.pool.replicas[0].num_sent
        assert ask(router.url, "the ", max_tokens=2)["finish_reason"] == "length"
        assert ask(router.url) == expected
        assert router.pool.replicas[0].num_sent == num_sent == 2  # neither was worth it


@pytest.mark.parametrize("fault", ["gone", "other weights", "cut"])
def test_what_goes_wrong_with_a_prefill_is_no_fault_of_a_request(
    model: Path, expected: dict[str, Any], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica computes the prompt itself, and the answer is the same."""
    with ExitStack() as stack:
        one, two = (stack.enter_context(replica(model, role)) for role in ("prefill", "decode"))
        router = stack.enter_context(routed_to(one, two, health_interval=1000))
        if fault == "gone":
            one.stop()
            stack.callback(one._thread.join)
            monkeypatch.setattr(one, "stop", lambda: None)
        elif fault == "other weights":  # it says that it is as the others
            monkeypatch.setattr(type(one.service.loaded), "prefix_store", property(lambda _: None))
        else:
            monkeypatch.setattr(peers.Peer, "_ask", lambda *_: bytearray(b"infinilm prefix 2\n"))
        assert ask(router.url) == expected
        assert hits(two) == 0


def test_the_endpoint_asks_for_a_key(model: Path) -> None:
    """And gives nothing but segments, whose names are no paths."""
    with replica(model) as one:
        ask(one.url, key=KEY)
        llm = one.service.loaded
        assert llm is not None
        llm.flush_prefixes()
        (tier,) = llm.prefix_store.tiers  # type: ignore[union-attr]
        keys = list(tier._segments)  # type: ignore[attr-defined]
        path = f"{one.url}{PREFIXES}{keys[0]}"
        for headers in ({}, {"Authorization": "Bearer other"}, {"x-api-key": ""}):
            for method in ("GET", "HEAD", "POST"):
                assert httpx.request(method, path, headers=headers, timeout=SECONDS).status_code == 401
        with_key = {"Authorization": f"Bearer {KEY}"}
        answer = http_get(path, headers=with_key)
        assert answer.status_code == 200 and answer.content.startswith(b"infinilm prefix 2\n")
        head = httpx.head(path, headers=with_key, timeout=SECONDS)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("f" * 64, keys[0].upper(), keys[0][:-1], f"{keys[0]}/x", "../../etc/passwd", "%2e%2e/x", ""):
            assert http_get(f"{one.url}{PREFIXES}{name}", headers=with_key).status_code == 404
        assert http_post(path, json={}, headers=with_key).status_code == 405
    with LLM(model, host_cache="1MiB", use_tqdm=False) as llm, hosted(llm) as open_to_all:
        refused = http_get(f"{open_to_all.url}{PREFIXES}{'0' * 64}")
        assert (refused.status_code, "this server has none" in refused.text) == (403, True)


def test_clients_cannot_send_a_replica_anywhere(model: Path) -> None:
    """Neither through a router, which keeps such headers back, nor where the address is none of its peers."""
    asked = threading.Event()
    with replica(model, prefix_peers=PeerRules(("10.9.8.7",), KEY)) as one, routed_to(one) as router:
        for url, key in ((router.url, CLIENT_KEY), (one.url, KEY)):
            for name, value in ((PREFIXES_AT, "http://127.0.0.1:9"), (PREFIXES_AT, "file:///etc/passwd")):
                answer = http_post(
                    f"{url}/v1/completions",
                    json={"prompt": TEXT, "max_tokens": 1},
                    headers={"Authorization": f"Bearer {key}", name: value},
                )
                assert answer.status_code == 200
        assert http_get(f"{router.url}{PREFIXES}{'0' * 64}", headers=HEADERS).status_code == 404
        body, forged = {"prompt": TEXT, "max_tokens": 1}, {**HEADERS, PREFILL: "1"}
        assert "choices" in http_post(f"{router.url}/v1/completions", json=body, headers=forged).json()
    assert not asked.is_set()


def test_a_disk_outlives_its_process(model: Path, tmp_path: Path) -> None:
    """A router still knows what a replica has computed that is started again with the same folder."""
    with ExitStack() as stack:
        one = stack.enter_context(replica(model, disk_cache=tmp_path, host_cache=None))
        two = stack.enter_context(replica(model, host_cache=None))
        router = stack.enter_context(routed_to(one, two, health_interval=0.05))
        of_one, of_two = router.pool.replicas
        ask(router.url)
        chosen = of_one if of_one.num_sent else of_two
        for server in (one, two):
            server.service.instance = "another process"
        wait_for(lambda: all(known._instance == "another process" for known in (of_one, of_two)))
        assert len(of_two.prefixes) == 0
        assert (len(of_one.prefixes) > 0) == (chosen is of_one)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--role", "prefill", "--api-key", "k"], "--role prefill keeps what it computes for others: it needs"),
        (["--role", "prefill", "--host-cache", "1GiB"], "it needs --host-cache or --disk-cache, and an --api-key"),
        (["--role", "decode", "--api-key", "k"], "--role decode fetches what others computed: name these"),
        (["--prefix-peers", "10.0.0.1"], "--prefix-peers are shown a key of this server: it needs --api-key"),
        (["--prefix-peers", "10.0.0.0/99", "--api-key", "k"], "--prefix-peers: '10.0.0.0/99' is no network"),
        (["--role", "decode", "--replicas", "2"], "--role and --prefix-peers are of one server"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFINILM_API_KEY", raising=False)
    assert main(["serve", "demo", "--port", "0", *options]) == 2
    assert told in capsys.readouterr().err
