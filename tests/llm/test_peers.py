"""Prefixes fetched of another server: answers are as if all was computed, whatever that server sends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from goldens import golden
from hypothesis import given, settings, strategies as st

from infinilm import LLM, ConfigError
from infinilm.scheduling import scheduler
from infinilm.serving import prefix_exchange
from infinilm.tiers import PREFIXES, Peer, PeerRules, PrefixStore, peers
from llm import tiny
from llm.test_tiers import SECONDS, answers, open_llm, prompts

RULES = PeerRules(("127.0.0.1",), "a key")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts wait for the identity of a model, however busy the machine is."""
    monkeypatch.setattr(scheduler, "SEGMENT_BLOCKS", 2)
    monkeypatch.setattr(prefix_exchange, "_IDENTITY_SECONDS", SECONDS)
    monkeypatch.setattr(peers, "_SECONDS", SECONDS)


class Giver(BaseHTTPRequestHandler):
    """Gives the segments of a store, or what a fault makes of them."""

    protocol_version = "HTTP/1.1"
    store: PrefixStore
    fault, place = "", 0
    stop = threading.Event()

    def do_GET(self) -> None:
        key = self.path.removeprefix(PREFIXES)
        assert self.headers["Authorization"] == "Bearer a key"
        segment = self.store.read(key)
        data = b"" if segment is None else b"".join(segment.pieces(key))
        size, status = len(data), 200 if segment is not None else 404
        at = self.place % max(size, 1)
        if self.fault == "flipped" and data:
            data = data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]
        elif self.fault == "other":
            data = b"".join(segment.pieces("f" * 64)) if segment is not None else b""
        elif self.fault == "dies":
            data = data[:at]
        elif self.fault == "large":
            size = 1 << 40
        elif self.fault in ("refused", "moved"):
            status = {"refused": 500, "moved": 302}[self.fault]
        self.send_response(status)
        if self.fault == "moved":
            self.send_header("Location", "http://127.0.0.1:1/")
        if self.fault != "no length":
            self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault == "drips":
            while not self.stop.wait(0.01):
                self.wfile.write(b"x")
        self.wfile.write(data)
        if len(data) < size or self.fault == "no length":
            self.close_connection = True

    do_HEAD = do_GET

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # who asked has gone
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def giving(store: PrefixStore | None, **attributes: Any) -> Iterator[str]:
    """The address of a server that gives what a store has."""
    handler = type("OneGiver", (Giver,), {"store": store, "stop": threading.Event(), **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            handler.stop.set()  # type: ignore[attr-defined]
            server.shutdown()
            thread.join()


def fetched(llm: LLM, which: list[list[int]], url: str) -> list[str]:
    """As `answers`, of requests that may fetch their prefixes there."""

    async def ask(prompt: list[int]) -> str:
        asked = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
        async with llm.asubmit([prompt], prefixes_at=url, ends_only=True, **asked) as running:
            (result,) = await running.wait()
        return f"{result.outputs[0].token_ids} {result.outputs[0].logprobs!r}"

    return [asyncio.run(ask(prompt)) for prompt in which]


@pytest.mark.parametrize("name", ["qwen3", "gemma3-text", "deepseek-v3", "lfm2"])
def test_fetched_blocks_are_those_computed(name: str) -> None:
    """All kinds of cache; a server of other weights, or of kernels that round otherwise, has nothing that fits."""
    asked = prompts()
    with open_llm(golden(name), host_cache="8MiB") as one:
        expected = answers(one, asked)
        for prompt in asked:
            one.keep_prefix(prompt)
        with giving(one.prefix_store) as url:
            with open_llm(golden(name), prefix_peers=RULES) as two:
                assert fetched(two, asked, url) == expected
                assert two.metrics().num_external_hit_tokens >= 32
            with open_llm(golden(name), prefix_peers=RULES, kv_cache_dtype="bfloat16") as other:
                fetched(other, asked[:1], url)
                assert other.metrics().num_external_hit_tokens == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("peers") / "tiny")


FAULTS = ["", "flipped", "other", "dies", "large", "refused", "moved", "no length"]


@settings(max_examples=12)
@given(fault=st.sampled_from(FAULTS), place=st.integers(0, 1 << 20))
def test_whatever_a_peer_sends(model: Path, kept_once: tuple[list[str], PrefixStore], fault: str, place: int) -> None:
    """A wrong byte, an end in the middle, another segment, a size without end, a redirection: what comes is dropped."""
    expected, store = kept_once
    with giving(store, fault=fault, place=place) as url, open_llm(model, prefix_peers=RULES) as llm:
        assert fetched(llm, prompts()[:2], url) == expected[:2]
        assert (llm.metrics().num_external_hit_tokens > 0) == (fault == "")


@pytest.fixture(scope="module")
def kept_once(model: Path) -> Iterator[tuple[list[str], PrefixStore]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "SEGMENT_BLOCKS", 2)
        with open_llm(model, host_cache="8MiB") as llm:
            expected = answers(llm, prompts())
            for prompt in prompts():
                llm.keep_prefix(prompt)
            assert llm.prefix_store is not None
            yield expected, llm.prefix_store


def test_a_peer_that_drips(
    model: Path, kept_once: tuple[list[str], PrefixStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has some seconds, whatever it sends meanwhile; and one that is not there is no error either."""
    expected, store = kept_once
    monkeypatch.setattr(peers, "_SECONDS", 0.2)
    with open_llm(model, prefix_peers=RULES) as llm:
        with giving(store, fault="drips") as url:
            assert fetched(llm, prompts()[:1], url) == expected[:1]
        assert fetched(llm, prompts()[1:2], url) == expected[1:2]  # it has gone
        assert llm.metrics().num_external_hit_tokens == 0


def test_a_peer_that_is_slower_than_computing(model: Path, kept_once: tuple[list[str], PrefixStore]) -> None:
    """No prompt waits for it, until what was measured is forgotten."""
    expected, store = kept_once
    asked: list[float] = []

    class Slow(PrefixStore):
        def read(self, key: str) -> Any:
            asked.append(time.perf_counter())
            time.sleep(0.05)
            return super().read(key)

    with giving(Slow(store.tiers)) as url, open_llm(model, prefix_peers=RULES) as llm:
        for _ in range(3):
            llm.reset_prefix_cache()
            assert fetched(llm, prompts()[:1], url) == expected[:1]
        first = len(asked)
        llm._thread.exchange._computing.seconds = 1e-6  # type: ignore[union-attr]
        llm.reset_prefix_cache()
        assert fetched(llm, prompts()[:1], url) == expected[:1]
        assert len(asked) == first > 0


def test_only_named_hosts_are_asked() -> None:
    rules = PeerRules(("10.0.0.0/8", "[fd00::1]:9", "peer.local:8000"), "k")
    allowed = ["http://10.1.2.3:80", "https://10.0.0.1", "http://[fd00::1]:9", "http://PEER.local:8000/"]
    assert all(isinstance(rules.peer(url, 1), Peer) for url in allowed)
    for url in (
        "http://11.0.0.1", "http://peer.local:8001", "http://peer.local.evil:8000", "ftp://10.0.0.1", "10.0.0.1",
        "http://10.0.0.1/path", "http://10.0.0.1?q", "http://user@10.0.0.1", "http://[fd00::1", "http://10.0.0.1:x",
        "http://10.0.0.1@evil.example", "http://evil.example#10.0.0.1", "",
    ):  # fmt: skip
        assert rules.peer(url, 1) is None, url
    for host, told in (("10.0.0.0/40", "is no network"), ("a b", "expected hosts such as"), ("", "expected hosts")):
        with pytest.raises(ConfigError, match=f"prefix_peers: .*{told}"):
            PeerRules((host,), "k")


def test_without_a_prefix_cache(model: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_peers: needs enable_prefix_caching=True"):
        open_llm(model, prefix_peers=RULES, enable_prefix_caching=False)
